"""Models of any number of tensors of any size, for `sizes`, and a reference engine that serves one.

python -m benchmarks.blocks [--copied] COUNTxBYTES --port PORT
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from weightsync.engine.adapter import Expected, Sealed, StandbyHooks
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.testing import ModelAdapter, ReferenceEngine, ReferenceFrontEnd, ReferenceInProcess, serve

COLUMNS = 8


class Blocks(nn.Module):
    """``count`` parameters of ``nbytes`` bytes, each in a module of its own, as experts are; random by ``seed``."""

    def __init__(self, count: int, nbytes: int, seed: int, device: str = "cpu"):
        super().__init__()
        self.experts = nn.ModuleList(nn.Module() for _ in range(count))
        generator = torch.Generator(device).manual_seed(seed)
        for expert in self.experts:
            values = torch.randint(-(1 << 7), 1 << 7, (nbytes // 2,), generator=generator, device=device)
            values = values.to(torch.bfloat16)
            expert.weight = nn.Parameter(values.view(-1, COLUMNS), requires_grad=False)

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def digest(self) -> str:
        """The digest, as the engine's adapter computes it."""
        return digest_of(self.state_dict().items())


class BlocksAdapter(ModelAdapter):
    """The adapter of such a model in the reference engine."""

    def __init__(self, count: int, nbytes: int, device: str = "cpu"):
        self.model = Blocks(count, nbytes, seed=0, device=device)
        self.device = next(self.model.parameters()).device

    def expected(self) -> Expected:
        """Every parameter by its name."""
        return Expected(tuple(spec_of(name, tensor) for name, tensor in self.model.state_dict().items()))


class CopiedAdapter(BlocksAdapter):
    """As that, with a loader that is not replayed: a standby is loaded, and copied to where the weights stay."""

    def loader_hooks(self) -> Sealed:
        """Only `load`, and the standby."""
        return Sealed(self.model, "this one is loaded into a standby", self._standby)

    def _standby(self) -> StandbyHooks:
        def nothing(*_: object) -> None:
            pass

        return StandbyHooks(self.model, self.model.nbytes, self._make, self._load, nothing, nothing, stays=True)

    def _make(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Blocks:
        weight = self.model.experts[0].weight
        model = Blocks(len(self.model.experts), weight.nbytes, seed=0, device=str(self.device))
        self._load(model, weights)
        return model

    def _load(self, model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        state = model.state_dict()
        for name, tensor in weights:
            state[name].copy_(tensor)


def engine(
    count: int, nbytes: int, python: Sequence[str] = (sys.executable,), device: str = "cpu", *, copied: bool = False
) -> ReferenceEngine:
    """A reference engine with such a model; a context manager. ``python`` is the command that runs Python."""
    launcher = (*python, "-m", "benchmarks.blocks", *(["--copied"] if copied else ()))
    return ReferenceEngine(f"{count}x{nbytes}", launcher=launcher, device=device)


class InProcess(ReferenceInProcess):
    """A reference engine with such a model in this process."""

    def __init__(self, count: int, nbytes: int):
        self._serve(ReferenceFrontEnd(BlocksAdapter(count, nbytes), Path(f"{count}x{nbytes}"), False))


def main() -> None:
    """Serve such a model; the command line of the process that `engine` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("blocks")
    parser.add_argument("--port", type=int)
    parser.add_argument("--device")
    args = parser.parse_args()
    count, _, nbytes = args.blocks.partition("x")
    kind = CopiedAdapter if args.copied else BlocksAdapter
    serve(kind(int(count), int(nbytes), args.device), Path(args.blocks), args.port)


if __name__ == "__main__":
    main()
