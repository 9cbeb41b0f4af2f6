"""Models of as many tensors as one likes, of any size: what `sizes` pushes, and a reference engine that holds one.

python -m benchmarks.blocks COUNTxBYTES --port PORT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from weightsync.engine.adapter import Expected
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.testing import ModelAdapter, ReferenceEngine, serve

COLUMNS = 8


class Blocks(nn.Module):
    """``count`` parameters of ``nbytes`` bytes, each in a module of its own, as experts are; random by ``seed``."""

    def __init__(self, count: int, nbytes: int, seed: int):
        super().__init__()
        self.experts = nn.ModuleList(nn.Module() for _ in range(count))
        generator = torch.Generator().manual_seed(seed)
        for expert in self.experts:
            values = torch.randint(-(1 << 7), 1 << 7, (nbytes // 2,), generator=generator).to(torch.bfloat16)
            expert.weight = nn.Parameter(values.view(-1, COLUMNS), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """Of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def digest(self) -> str:
        """As the engine's sink has it."""
        return digest_of(self.state_dict().items())


class BlocksSink(ModelAdapter):
    """Such a model in the reference engine."""

    def __init__(self, count: int, nbytes: int):
        self.device, self.model = torch.device("cpu"), Blocks(count, nbytes, seed=0)

    def expected(self) -> Expected:
        """Every parameter under its name."""
        return Expected(tuple(spec_of(name, tensor) for name, tensor in self.model.state_dict().items()))


def engine(count: int, nbytes: int) -> ReferenceEngine:
    """A reference engine that holds so many blocks, for a ``with`` block."""
    return ReferenceEngine(f"{count}x{nbytes}", launcher=(sys.executable, "-m", "benchmarks.blocks"))


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("blocks")
    parser.add_argument("--port", type=int)
    parser.add_argument("--device")
    args = parser.parse_args()
    count, _, nbytes = args.blocks.partition("x")
    serve(BlocksSink(int(count), int(nbytes)), Path(args.blocks), args.port)


if __name__ == "__main__":
    main()
