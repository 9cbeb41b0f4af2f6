"""A stream whose tensors are not adjacent in memory, because they are read in place."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed

_serial: Final = itertools.count(1)


class Scattered:
    """Several parts of memory, sliced as if they were one 1-D uint8 tensor of ``nbytes``; a slice lies in one part.

    ``parts`` are 1-D uint8 tensors on one device, at least one; ``starts`` are their offsets in the stream. ``revoked``
    is a tensor of one element, not zero once the owner of the memory may write there again. ``owner_lives`` tells
    whether the owner still lives: a dead one cannot set ``revoked``.
    """

    def __init__(
        self,
        starts: Sequence[int],
        parts: Sequence[torch.Tensor],
        nbytes: int,
        revoked: torch.Tensor,
        owner_lives: Callable[[], bool] = lambda: True,
    ):
        self._starts, self._parts, self._nbytes, self._revoked = starts, parts, nbytes, revoked
        self._owner_lives = owner_lives
        self.serial, self.device = next(_serial), parts[0].device

    def numel(self) -> int:
        """Length of the stream in bytes."""
        return self._nbytes

    def __getitem__(self, where: slice[int, int, Any]) -> torch.Tensor:
        """A slice of the stream, a view. Raises `TransferFailed` unless it lies within one part."""
        if where.start == where.stop:
            return self._parts[0].new_empty(0)  # a new tensor: a view's offset might not suit every dtype
        at = bisect.bisect_right(self._starts, where.start) - 1
        start = self._starts[at]
        found = self._parts[at][where.start - start : where.stop - start]
        if found.numel() != where.stop - where.start:
            raise TransferFailed(f"bytes {where.start} to {where.stop} of the stream do not lie in one part of memory")
        return found

    def spans(self) -> list[tuple[int, int]]:
        """First address and end address of each part."""
        return [(part.data_ptr(), part.data_ptr() + part.numel()) for part in self._parts]

    def check(self) -> None:
        """Raise `TransferFailed` if the memory may have changed since the owner offered it."""
        if self._revoked.item():
            raise TransferFailed("the trainer cancelled the push and may have changed its parameters since")
        if not self._owner_lives():
            raise TransferFailed("the trainer's process has ended, and its parameters may have changed since")


Stream = torch.Tensor | Scattered
"""A whole stream: a 1-D uint8 tensor, or a `Scattered` that is sliced like one."""


def spans(stream: Stream) -> list[tuple[int, int]]:
    """First address and end address of each part of a stream."""
    if isinstance(stream, Scattered):
        return stream.spans()
    return [(stream.data_ptr(), stream.data_ptr() + stream.numel())] if stream.numel() else []


def key(stream: Stream) -> int:
    """A key that changes when the stream moves to other memory."""
    return -stream.serial if isinstance(stream, Scattered) else stream.data_ptr()
