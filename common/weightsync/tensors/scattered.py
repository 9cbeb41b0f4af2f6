"""A stream whose tensors are not adjacent in memory, because they are read in place."""

from __future__ import annotations

import abc
import bisect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed

_serial: Final = itertools.count(1)


class Scattered(abc.ABC):
    """Several parts of memory on one ``device``, sliced as if they were one 1-D uint8 tensor of ``nbytes``."""

    def __init__(self, device: torch.device, nbytes: int):
        self.device, self._nbytes, self.serial = device, nbytes, next(_serial)

    def numel(self) -> int:
        """Length of the stream in bytes."""
        return self._nbytes

    @abc.abstractmethod
    def pieces(self, start: int, end: int) -> list[torch.Tensor]:
        """Views that are bytes ``start`` to ``end`` of the stream, in order. Raises `TransferFailed` for others."""

    def __getitem__(self, where: slice[int, int, Any]) -> torch.Tensor:
        """A slice of the stream: a view if it lies in one part, otherwise a copy. Raises as `pieces`."""
        if where.start == where.stop:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        found = self.pieces(where.start, where.stop)
        return found[0] if len(found) == 1 else torch.cat(found)

    @abc.abstractmethod
    def spans(self) -> list[tuple[int, int]]:
        """First address and end address of each part."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `TransferFailed` if the memory may have changed since its owner offered it."""


class Parts(Scattered):
    """Memory of one process.

    ``parts`` are 1-D uint8 tensors, at least one; ``starts`` are their offsets in the stream. ``revoked`` is a tensor
    of one element, not zero once the owner of the memory may write there again. ``owner_lives`` tells whether the
    owner still lives: a dead one cannot set ``revoked``.
    """

    def __init__(
        self,
        starts: Sequence[int],
        parts: Sequence[torch.Tensor],
        nbytes: int,
        revoked: torch.Tensor,
        owner_lives: Callable[[], bool] = lambda: True,
    ):
        super().__init__(parts[0].device, nbytes)
        self._starts, self._parts, self._revoked = starts, parts, revoked
        self._owner_lives = owner_lives

    def pieces(self, start: int, end: int) -> list[torch.Tensor]:
        """See `Scattered`."""
        found, upto, at = [], start, bisect.bisect_right(self._starts, start) - 1
        while upto < end and 0 <= at < len(self._starts):
            first = self._starts[at]
            part = self._parts[at][upto - first : end - first] if first <= upto else self._parts[at][:0]
            if not part.numel():
                break  # between two parts
            found.append(part)
            upto, at = upto + part.numel(), at + 1
        if upto < end:
            raise TransferFailed(f"bytes {start} to {end} of the stream lie in no part of memory")
        return found

    def spans(self) -> list[tuple[int, int]]:
        """See `Scattered`."""
        return [(part.data_ptr(), part.data_ptr() + part.numel()) for part in self._parts]

    def check(self) -> None:
        """See `Scattered`."""
        if self._revoked.item():
            raise TransferFailed("the trainer cancelled the push and may have changed its parameters since")
        if not self._owner_lives():
            raise TransferFailed("the trainer's process has ended, and its parameters may have changed since")


Stream = torch.Tensor | Scattered
"""A whole stream: a 1-D uint8 tensor, or a `Scattered` that is sliced like one."""


def pieces(stream: Stream, start: int, nbytes: int) -> list[torch.Tensor]:
    """Views that are ``nbytes`` bytes of a stream from ``start`` on, in order."""
    return stream.pieces(start, start + nbytes) if isinstance(stream, Scattered) else [stream[start : start + nbytes]]


def spans(stream: Stream) -> list[tuple[int, int]]:
    """First address and end address of each part of a stream."""
    if isinstance(stream, Scattered):
        return stream.spans()
    return [(stream.data_ptr(), stream.data_ptr() + stream.numel())] if stream.numel() else []


def key(stream: Stream) -> int:
    """A key that changes when the stream moves to other memory."""
    return -stream.serial if isinstance(stream, Scattered) else stream.data_ptr()
