"""The sums of `digest._Mix64` on a GPU, of any number of pieces of memory at once: one pass over them, and one launch.

Imported only where Triton is installed, which comes with torch for CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

#: Words that one program sums, and how many of them at a time.
_TILE, _BLOCK = 1 << 15, 1 << 11
_STEP = tl.constexpr(0x9E3779B97F4A7C15 - (1 << 64))
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9 - (1 << 64))
_SECOND = tl.constexpr(0x94D049BB133111EB - (1 << 64))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(tiles, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tiles + tl.program_id(0) * 4
    words = tl.load(row).to(tl.pointer_type(tl.int64))
    first, count, owner = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mixed = tl.load(words + at, mask=at < count, other=0) + (first + at + 1) * _STEP
        mixed = (mixed ^ (mixed >> 30)) * _FIRST
        mixed = (mixed ^ (mixed >> 27)) * _SECOND
        total += tl.where(at < count, mixed ^ (mixed >> 31), 0)
    tl.atomic_add(sums + owner, tl.sum(total))


def sums(pieces: Sequence[tuple[torch.Tensor, int, int]], count: int) -> list[int]:
    """``count`` sums, signed. A piece is (words, position of its first word, number of its sum).

    ``words`` is 1-D int64; all lie on one device.
    """
    table = np.array([(words.data_ptr(), first, words.numel(), owner) for words, first, owner in pieces], np.int64)
    # A large piece is divided among several programs.
    tiles = -(-table[:, 2] // _TILE)
    every = np.repeat(table, tiles, axis=0)
    within = (np.arange(len(every)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * _TILE
    every[:, 0] += within * 8
    every[:, 1] += within
    every[:, 2] = np.minimum(every[:, 2] - within, _TILE)
    device = pieces[0][0].device
    found = torch.zeros(count, dtype=torch.int64, device=device)
    _add[(len(every),)](torch.from_numpy(every).to(device), found, _BLOCK)
    listed: list[int] = found.tolist()
    return listed
