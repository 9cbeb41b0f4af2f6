"""The stream of several memory domains in a process that has mapped the memory of all."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import TransferFailed
from weightsync.tensors.boxes import Box, is_within, narrowed, overlap, relative, whole
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Entry
from weightsync.tensors.native_copy import Block
from weightsync.tensors.scattered import Scattered, Stream, pieces
from weightsync.tensors.scattered import spans as spans_of
from weightsync.tensors.subset import place


class Divided(Scattered):
    """The stream of ``layout``. ``memories`` has what each domain holds; None for a domain that holds nothing."""

    def __init__(self, layout: DividedLayout, memories: Sequence[Stream | None]):
        held = [memory for memory in memories if memory is not None]
        super().__init__(held[0].device, layout.nbytes)
        self._layout, self._memories = layout, memories
        self._runs = sorted((*run, domain) for domain, runs in enumerate(layout.runs) for run in runs)
        self._starts = [at for at, *_ in self._runs]

    def pieces(self, start: int, end: int) -> list[torch.Tensor]:
        """See `Scattered`."""
        found, number, upto = [], bisect.bisect_right(self._starts, start) - 1, start
        while upto < end and 0 <= number < len(self._runs):
            at, there, nbytes, domain = self._runs[number]
            first, last = there + upto - at, there + min(end - at, nbytes)
            if not at <= upto < at + nbytes:
                break
            found += pieces(self._in(domain), first, last - first)
            upto, number = upto + last - first, number + 1
        if upto < end:
            raise TransferFailed(f"bytes {start} to {end} of the stream do not lie in any rank's memory")
        return found

    def held(self, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """What arenas hold of bytes ``start`` to ``end`` of the stream: first byte, and a view."""
        for at, there, nbytes, domain in self._runs[max(0, bisect.bisect_right(self._starts, start) - 1) :]:
            if at >= end:
                break
            first, last = max(at, start), min(at + nbytes, end)
            upto = first
            for piece in pieces(self._in(domain), there + first - at, last - first) if first < last else ():
                yield upto, piece
                upto += piece.numel()

    def part(self, entry: Entry, box: Box | None) -> torch.Tensor:
        """A box of a tensor, None for all of it: a view if it lies in one domain, otherwise a copy."""
        found = self.seen(entry, box)
        return narrowed(entry.view(self), *(box or whole(entry.spec))) if found is None else found

    def seen(self, entry: Entry, box: Box | None) -> torch.Tensor | None:
        """As `part`; None if it would be a copy."""
        box = whole(entry.spec) if box is None else box
        for cell in self._layout.cells(entry.number):
            if is_within(box, cell.box):
                nbytes = math.prod(cell.box.shape) * entry.dtype.itemsize
                memory = self._in(cell.domain)[cell.at : cell.at + nbytes]
                return narrowed(memory.view(entry.dtype).view(cell.box.shape), *relative(box, cell.box))
        return None

    def parts(self, entry: Entry, box: Box) -> list[tuple[Box, torch.Tensor]]:
        """What each domain holds of a box of a tensor, as views."""
        found = [overlap(box, cell.box) for cell in self._layout.cells(entry.number)]
        return [(common, self.part(entry, common)) for common in found if common is not None]

    def _in(self, domain: int) -> Stream:
        memory = self._memories[domain]
        assert memory is not None, "a domain with cells has memory"
        return memory

    def spans(self) -> list[tuple[int, int]]:
        """See `Scattered`."""
        return [span for memory in self._memories if memory is not None for span in spans_of(memory)]

    def check(self) -> None:
        """See `Scattered`."""
        for memory in self._memories:
            if isinstance(memory, Scattered):
                memory.check()


def part(stream: Stream, entry: Entry, box: Box | None) -> torch.Tensor:
    """A box of a tensor of the stream, None for all of it; a view if it lies in one part of memory."""
    if isinstance(stream, Divided):
        return stream.part(entry, box)
    return entry.raw(stream) if box is None else narrowed(entry.view(stream), *box)


def block(stream: Stream, entry: Entry, box: Box | None) -> Block | None:
    """Where a box of a tensor lies in memory, None for all of it; no block if it is not contiguous there."""
    if not isinstance(stream, Divided):
        return place(entry, box, entry.raw(stream).data_ptr())
    found = stream.seen(entry, box)
    return Block(found.data_ptr(), found.nbytes) if found is not None and found.is_contiguous() else None
