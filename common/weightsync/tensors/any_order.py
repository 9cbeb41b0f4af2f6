"""Streams whose tensors come in any order: the announcement of each bucket names those that begin in it.

In the stream every tensor starts at a multiple of `ALIGN_BYTES`, as in `layout.Layout`, so it has one length in any
order. A stage has each tensor where the layout has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weightsync.errors import TransferFailed
from weightsync.tensors.layout import Entry, Layout, Piece, align, listed


class Order:
    """The order of a stream, as a trainer makes it: gives each tensor its place after those before."""

    def __init__(self) -> None:
        self._end = 0

    def placed(self, entry: Entry) -> Entry:
        """The tensor as it lies in the stream, next after the last."""
        at, self._end = self._end, self._end + align(entry.nbytes)
        return entry._replace(offset=at)


class Arrival:
    """The order of a stream, as a rank learns it from announcements."""

    def __init__(self, layout: Layout):
        self._layout = layout
        self._missing = {entry.number for entry in layout.entries if entry.nbytes}
        #: The tensor that the next bucket goes on with, and how many bytes of it have come.
        self._rest: tuple[Entry, int] | None = None

    def pieces(self, begins: Sequence[int], nbytes: int) -> Iterator[Piece]:
        """What a bucket of ``nbytes`` holds in which these tensors begin, by their numbers.

        Raises `TransferFailed` if that cannot be.
        """
        at = 0
        there = [self._rest] if self._rest is not None else []
        there += [(self._begun(number), 0) for number in begins]
        self._rest = None
        for entry, done in there:
            if at >= nbytes or self._rest is not None:
                raise TransferFailed(f"{entry.spec.name} was announced in a bucket that has no room for it")
            size = min(entry.nbytes - done, nbytes - at)
            if done + size < entry.nbytes:
                self._rest = entry, done + size
            yield Piece(entry, done, at, size, self._rest is None)
            at += align(size)

    def _begun(self, number: int) -> Entry:
        if number not in self._missing:
            raise TransferFailed(f"tensor {number} was announced, and has come already or is not part of the push")
        self._missing.remove(number)
        return self._layout.entries[number]

    def end(self) -> None:
        """Raise `TransferFailed` unless every tensor has come in full."""
        if missing := [self._layout.entries[number].spec.name for number in sorted(self._missing)]:
            raise TransferFailed(f"the stream ended without {listed(missing)}")
        if self._rest is not None:
            raise TransferFailed(f"the stream ended within {self._rest[0].spec.name}")
