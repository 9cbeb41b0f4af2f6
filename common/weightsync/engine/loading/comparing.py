"""Comparisons of memory, bit by bit, and what is sampled of what is too much to be compared in every push."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from typing import Final

import torch

from weightsync.tensors.native_copy import SHARE_BYTES, Run, chunks

#: Bytes that are compared at once.
_COMPARED_BYTES: Final = 64 << 20
#: Of a sample, bytes that are compared in one piece.
PIECE_BYTES: Final = 64 << 10
#: A sample of what a loader does takes `_SHARE` of the tensors, or one in `_SHARES` if those are more, or `_MOST` where
#: they would be more than that, but no less than one in `_LEAST`. There are two samples in a push, so every tensor has
#: its turn within 16 pushes, and of more than 4096 tensors within 64. Each costs 15 microseconds.
_SHARE: Final = 16
_SHARES: Final = 32
_MOST: Final = 128
_LEAST: Final = 128

memcmp: Final = ctypes.CDLL(None).memcmp
memcmp.restype = ctypes.c_int
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def alike(runs: Iterable[Run], between: Callable[[], None]) -> bool:
    """Whether every run has been made; ``between`` is called every few milliseconds."""
    for run in runs:
        for part in chunks(run, SHARE_BYTES):
            if memcmp(*part):
                return False
            between()
    return True


def sample(count: int, turn: int, most: int) -> range:
    """At most ``most`` of ``count`` numbers, evenly spread; successive turns go through all of them."""
    step = max(1, -(-count // max(1, most)))
    return range(turn % step, count, step)


def share_of(count: int) -> int:
    """How many of ``count`` tensors a sample of what a loader does takes."""
    return max(_SHARE, min(-(-count // _SHARES), _MOST), -(-count // _LEAST))


def rows_of(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """Some rows of a tensor, others in every turn."""
    if not tensor.ndim or not tensor.numel():
        return tensor
    rows = max(1, PIECE_BYTES * len(tensor) // tensor.nbytes)
    start = turn * rows % len(tensor)
    return tensor.narrow(0, start, min(rows, len(tensor) - start))


def same(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether copying ``source`` to ``target`` would change no bit."""
    alike = source.dtype == target.dtype and source.device == target.device
    if alike and source.device.type == "cpu" and source.is_contiguous() and target.is_contiguous():
        return bool(memcmp(source.data_ptr(), target.data_ptr(), target.nbytes) == 0)
    if not target.ndim:
        source, target = source.view(1), target.view(1)
    rows = max(1, _COMPARED_BYTES // max(1, math.prod(target.shape[1:]) * target.itemsize))
    pairs = zip(torch.split(source, rows), torch.split(target, rows), strict=True)
    return all(torch.equal(_bits(ours.to(device=own.device, dtype=own.dtype)), _bits(own)) for ours, own in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # The clone also normalises the stride of a dimension with one element.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
