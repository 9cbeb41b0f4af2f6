"""Copies and sums of many pieces of a GPU's memory, in one launch each. Needs Triton, which torch for CUDA brings.

Pieces are rows of numpy arrays, one dtype, int64. A large piece is divided among several programs.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightsync.tensors import gpu_copy

Table = npt.NDArray[np.int64]

#: Bytes of the pieces that one program sums or copies: multiples of a word, and so few that 64 MiB keep a GPU busy.
_SUM_BYTES: Final = 32 << 10
_COPY_BYTES: Final = 64 << 10
#: Words that a program sums or copies at a time.
_SUM_BLOCK: Final = 1024
_COPY_BLOCK: Final = 2048
_STEP, _FIRST, _SECOND = (tl.constexpr(gpu_copy.signed(one)) for one in (gpu_copy.STEP, *gpu_copy.FACTORS))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _mixed(word, at):  # type: ignore[no-untyped-def]
    mixed = word + (at + 1) * _STEP
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return mixed ^ (mixed >> 31)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _sum(tiles, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tiles + tl.program_id(0) * 4
    address, nbytes, first, owner = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    words, count = address.to(tl.pointer_type(tl.int64)), nbytes // 8
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(words + at, mask=at < count, other=0)
        total += tl.where(at < count, _mixed(word, first + at), 0)
    found = tl.sum(total)
    if nbytes % 8:
        byte = tl.arange(0, 8)
        rest = (address + count * 8).to(tl.pointer_type(tl.uint8)) + byte
        last = tl.load(rest, mask=byte < nbytes % 8, other=0).to(tl.int64) << (byte * 8).to(tl.int64)
        found += _mixed(tl.sum(last), first + count)
    tl.atomic_add(sums + owner, found)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _copy(tiles, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tiles + tl.program_id(0) * 3
    source, target, nbytes = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    done = nbytes * 0
    if (source | target) % 8 == 0:
        done = nbytes // 8 * 8
        out_of, into = source.to(tl.pointer_type(tl.int64)), target.to(tl.pointer_type(tl.int64))
        for start in range(0, nbytes // 8, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(into + at, tl.load(out_of + at, mask=at < nbytes // 8), mask=at < nbytes // 8)
    out_of8, into8 = source.to(tl.pointer_type(tl.uint8)), target.to(tl.pointer_type(tl.uint8))
    for start in range(done, nbytes, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(into8 + at, tl.load(out_of8 + at, mask=at < nbytes), mask=at < nbytes)


def _tiles(table: Table, addresses: int, tile: int, device: torch.device) -> torch.Tensor:
    """The rows of ``table``, cut to ``tile`` bytes, on a device. ``addresses`` columns come first, then the bytes."""
    counts = -(-table[:, addresses] // tile)
    found = np.repeat(table, counts, axis=0)
    within = (np.arange(len(found)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
    found[:, :addresses] += within[:, None]
    found[:, addresses] = np.minimum(found[:, addresses] - within, tile)
    found[:, addresses + 1 : addresses + 2] += within[:, None] // 8  # the first word's position, if there is one
    return torch.from_numpy(found).to(device)


class Sums:
    """``count`` sums of mixed words, see `digest`, prepared once and made any number of times.

    A row of ``table`` has the address, a multiple of 8, and bytes of a piece, the position of its first word, and the
    number of its sum. Bytes after the last whole word are a word with zeros.
    """

    def __init__(self, table: Table, count: int, device: torch.device):
        self._tiles = _tiles(table, 1, _SUM_BYTES, device)
        self._sums = torch.zeros(count, dtype=torch.int64, device=device)

    def make(self) -> list[int]:
        """The sums of what the memory holds now, signed; waits for the GPU."""
        with torch.cuda.device_of(self._sums):  # type: ignore[no-untyped-call]
            self._sums.zero_()
            if len(self._tiles):
                _sum[(len(self._tiles),)](self._tiles, self._sums, _SUM_BLOCK)
        found: list[int] = self._sums.tolist()
        return found


class Copies:
    """Copies, prepared once; a row of ``table`` has the source's address, the target's and the bytes."""

    def __init__(self, table: Table, device: torch.device):
        self._tiles = _tiles(table, 2, _COPY_BYTES, device)

    def make(self) -> None:
        """Make every copy, in the current stream."""
        with torch.cuda.device_of(self._tiles):  # type: ignore[no-untyped-call]
            if len(self._tiles):
                _copy[(len(self._tiles),)](self._tiles, _COPY_BLOCK)
