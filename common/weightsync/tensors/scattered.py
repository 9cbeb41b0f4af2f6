"""A stream whose tensors lie apart, in memory that somebody else has laid out."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed

_serial: Final = itertools.count(1)


class Scattered:
    """Parts of memory, sliced like the 1-D uint8 tensor of ``nbytes`` that they stand for; a slice lies within one.

    ``parts`` are 1-D uint8 tensors on one device, at least one, of which each stands for what begins at its start.
    ``revoked`` is one element, not zero once their owner may write there again; ``owner_lives`` tells whether the
    owner could still say so.
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
        """The stream's bytes."""
        return self._nbytes

    def __getitem__(self, where: slice[int, int, Any]) -> torch.Tensor:
        """Raises `TransferFailed` for what is in no part, or in several."""
        if where.start == where.stop:
            return self._parts[0].new_empty(0)  # at no place, which would be none for every dtype
        at = bisect.bisect_right(self._starts, where.start) - 1
        start = self._starts[at]
        found = self._parts[at][where.start - start : where.stop - start]
        if found.numel() != where.stop - where.start:
            raise TransferFailed(f"bytes {where.start} to {where.stop} of the stream are not in one part of memory")
        return found

    def spans(self) -> list[tuple[int, int]]:
        """Where the parts lie: addresses, from and to."""
        return [(part.data_ptr(), part.data_ptr() + part.numel()) for part in self._parts]

    def check(self) -> None:
        """Raise `TransferFailed` unless all that was read here so far was what the owner had offered."""
        if self._revoked.item():
            raise TransferFailed("the trainer gave the push up and may have changed its parameters since")
        if not self._owner_lives():
            raise TransferFailed("the process that pushed has ended, and its parameters may have changed since")


Stream = torch.Tensor | Scattered
"""A whole stream: a 1-D uint8 tensor, or what is sliced as if it were."""


def spans(stream: Stream) -> list[tuple[int, int]]:
    """Where a stream lies: addresses, from and to."""
    if isinstance(stream, Scattered):
        return stream.spans()
    return [(stream.data_ptr(), stream.data_ptr() + stream.numel())] if stream.numel() else []


def key(stream: Stream) -> int:
    """Equal as long as a stream is where it was."""
    return -stream.serial if isinstance(stream, Scattered) else stream.data_ptr()
