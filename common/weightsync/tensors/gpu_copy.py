"""Copies and hashes a GPU's memory with no cost for each tensor, as `native_copy` does in host memory.

Memory is given by address and is not kept alive: the caller makes sure that it stays valid.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from weightsync.tensors.native_copy import LARGE_BYTES, STEP_BYTES, Block, Run

if TYPE_CHECKING:
    from weightsync.tensors import gpu_kernels

logger = logging.getLogger(__name__)
#: Addresses of what is hashed are multiples of this.
WORD_BYTES: Final = 8
#: The constants of SplitMix64, with which `mix64` mixes words.
STEP: Final = 0x9E3779B97F4A7C15
FACTORS: Final = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Whether kernels can be made for a GPU.
_able: Final[dict[torch.device, bool]] = {}


def aligned(pieces: Iterable[Block]) -> bool:
    """Whether `Hashes` takes these pieces."""
    return all(piece.address % WORD_BYTES == 0 for piece in pieces)


def available(device: torch.device) -> bool:
    """Whether this can be done on a device: a GPU, where Triton is installed and finds what it needs."""
    if device.type != "cuda":
        return False
    if device not in _able:
        try:
            _able[device] = _has_kernels(device)
        except torch.OutOfMemoryError:
            return False  # another time there may be memory
    return _able[device]


def _has_kernels(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        # On this GPU, because using another one would take memory there.
        word = torch.zeros(8, dtype=torch.uint8, device=device)
        sums([(word.data_ptr(), 8, 0, 0)], 1, word.device).make()
        Copies([Run(word.data_ptr(), word.data_ptr(), 8)], word.device).make()
        torch.cuda.synchronize(word.device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler is missing, or a version does not fit
        logger.warning(
            "Triton cannot make kernels here, so pushing many small tensors from or to this GPU takes longer: %s", error
        )
        return False
    return True


def sums(table: Sequence[tuple[int, int, int, int]], count: int, device: torch.device) -> gpu_kernels.Sums:
    """See `gpu_kernels.Sums`."""
    from weightsync.tensors import gpu_kernels

    return gpu_kernels.Sums(np.array(table, np.int64).reshape(-1, 4), count, device)


class Hashes:
    """As `native_copy.Hashes`, with the digest `mix64`; pieces are `aligned`."""

    def __init__(self, pieces: Sequence[Block], device: torch.device):
        self._nbytes = [piece.nbytes for piece in pieces]
        rows = [(piece.address, piece.nbytes, 0, number) for number, piece in enumerate(pieces)]
        self._sums = sums(rows, len(pieces), device)

    def make(self) -> list[int]:
        """The hashes of what the memory holds now, in the order of the pieces."""
        return list(map(finished, self._sums.make(), self._nbytes))


def signed(word: int) -> int:
    """The number that has the 64 bits of ``word``, in two's complement."""
    return word - (1 << 64) if word >= 1 << 63 else word


def finished(total: int, nbytes: int) -> int:
    """The digest `mix64` of so many bytes, given the sum of their words."""
    return (total ^ nbytes * STEP) % (1 << 64)


class Copies:
    """As `native_copy.Copies`, in the current stream."""

    def __init__(self, runs: Sequence[Run], device: torch.device):
        from weightsync.tensors import gpu_kernels

        self._copies = gpu_kernels.Copies(np.array(runs, np.int64).reshape(-1, 3), device)

    def make(self) -> None:
        """Make every copy."""
        self._copies.make()


class TensorCopies:
    """Copies of ``sources`` to ``targets``, tensors of equal shapes, prepared once; they are kept alive."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]):
        self.targets, self.sources = targets, sources
        runs: dict[torch.device, list[Run]] = {}
        #: What torch copies, and from where, in groups of about `STEP_BYTES`.
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        nbytes = STEP_BYTES
        for target, source in zip(targets, sources, strict=True):
            if _by_address(target, source):
                run = Run(source.data_ptr(), target.data_ptr(), target.nbytes)
                runs.setdefault(target.device, []).append(run)
                continue
            if nbytes >= STEP_BYTES:
                self._groups.append(([], []))
                nbytes = 0
            nbytes += target.nbytes
            into, out_of = self._groups[-1]
            into.append(target)
            out_of.append(source)
        self._by_address = [Copies(found, device) for device, found in runs.items()]

    def make(self) -> None:
        """Make every copy."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """Make every copy; what torch copies, about `STEP_BYTES` between two yields."""
        for copies in self._by_address:
            copies.make()
            yield
        for into, out_of in self._groups:
            with torch.no_grad():
                torch._foreach_copy_(into, out_of)
            yield


def _by_address(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `Copies` makes this copy faster than torch, which starts a small one for longer than it takes."""
    alike = target.dtype == source.dtype and target.device == source.device and not source.is_neg()
    if not (alike and target.is_contiguous() and source.is_contiguous()):
        return False
    in_words = (target.data_ptr() | source.data_ptr()) % WORD_BYTES == 0
    return (in_words or target.nbytes < LARGE_BYTES) and available(target.device)
