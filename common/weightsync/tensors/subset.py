"""Subsets: what a rank needs of the pushed tensors. It reads and verifies nothing else.

A rank with a trusted load plan knows which box of every tensor it reads: rows or columns under tensor parallelism,
whole experts or none under expert parallelism. It registers with the name of its subset and sends the table of boxes
once; the trainer hashes every box that some rank needs. A rank needs all tensors in full for a first push, a streamed
push, deep verification, kept versions, and whenever the engine's own loader loads. If the model's memory moves between
verifying and loading, that loader would need more than the subset, and the push is refused before anything is written.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from weightsync.tensors.boxes import Box, innermost, is_inside, overlap, runs, whole
from weightsync.tensors.layout import ALIGN_BYTES, Entry, Layout, cut_run
from weightsync.tensors.native_copy import Block

#: Every separate piece of a transfer costs as much time as this many bytes: 2.6 microseconds over shared memory and 6.8
#: over TCP, by `make bench-transports ARGS=chunks`. Over a slow link, of so many bytes a second, it costs less. There
#: are only two costs, because ranks pass on to each other only if they need the same.
_RUN_COST_BYTES: Final = 16 << 10
_SLOW: Final = 200e6
_SLOW_COST_BYTES: Final = 1 << 10

Found = Mapping[tuple[int, Box | None], int]
"""Digests by (number of the tensor, box of it that was hashed or None for the whole tensor)."""

Digests = Mapping[str, tuple[int, ...]]
"""Digests of the tensors that end in a bucket, by the name of a subset."""


class Subset:
    """What a rank needs of the tensors of ``layout``: ``boxes`` by the number of the tensor.

    The rank needs all of a tensor that has no box, and nothing of one whose box is empty. Raises `ValueError` for a box
    that does not lie in its tensor.
    """

    def __init__(self, layout: Layout, boxes: Mapping[int, Box]):
        self.layout, self._boxes = layout, dict[int, Box]()
        for number, box in boxes.items():
            shape = layout.entries[number].spec.shape if 0 <= number < len(layout.entries) else None
            if shape is None or not is_inside(box, shape):
                raise ValueError(f"box of {list(box.shape)} at {list(box.start)} does not lie in tensor {number}")
            if box.shape != shape:
                self._boxes[number] = box
        self._cut: tuple[int, list[list[tuple[int, int]]]] = (0, [])

    @functools.cached_property
    def name(self) -> str:
        """A hash, equal for equal boxes of equal layouts; empty if all tensors are needed in full."""
        content = f"{self.layout.name} {self.table()}".encode()
        return hashlib.blake2b(content, digest_size=16).hexdigest() if self._boxes else ""

    @functools.cached_property
    def nbytes(self) -> int:
        """Size of the subset in bytes."""
        saved = 0
        for number, box in self._boxes.items():
            entry = self.layout.entries[number]
            saved += entry.nbytes - math.prod(box.shape) * entry.dtype.itemsize
        return self.layout.payload_bytes - saved

    def table(self) -> tuple[tuple[int, Box], ...]:
        """The boxes, as (number of the tensor, box), in order."""
        return tuple(sorted(self._boxes.items()))

    def box(self, number: int) -> Box | None:
        """The box that is needed of a tensor, None for all of it."""
        return self._boxes.get(number)

    def hashed(self, number: int) -> tuple[Box | None, ...]:
        """What is hashed of a tensor, each box by itself; None is the whole tensor. Nothing if nothing is needed.

        That is what is needed of it, or, if several memory domains hold it, what is needed from each, in order.
        """
        entry, box = self.layout.entries[number], self._boxes.get(number)
        if not entry.nbytes or (box is not None and 0 in box.shape):
            return ()
        cells = self.layout.cells(number)
        if not cells:
            return (box,)
        needed = whole(entry.spec) if box is None else box
        parts = (overlap(needed, cell.box) for cell in cells)
        return tuple(None if part.shape == entry.spec.shape else part for part in parts if part is not None)

    def runs(self) -> list[tuple[int, int]]:
        """Where the subset lies in the stream: (offset, bytes) in order; a run may include padding between tensors."""
        if not self._boxes:
            return [(0, self.layout.nbytes)] if self.layout.nbytes else []
        found: list[tuple[int, int]] = []
        for at, nbytes in itertools.chain.from_iterable(map(self._runs_of, self.layout.entries)):
            if found and at - sum(found[-1]) < ALIGN_BYTES:
                found[-1] = found[-1][0], at + nbytes - found[-1][0]
            else:
                found.append((at, nbytes))
        return found

    def _runs_of(self, entry: Entry) -> Iterator[tuple[int, int]]:
        box = self._boxes.get(entry.number)
        if box is None:
            yield from [(entry.offset, entry.nbytes)] if entry.nbytes else []
        elif 0 not in box.shape:
            yield from ((entry.offset + at, nbytes) for at, nbytes in runs(entry.spec.shape, entry.dtype.itemsize, box))

    def cut(self, bucket_bytes: int) -> list[list[tuple[int, int]]]:
        """The runs of every bucket: (offset in the stream, bytes), cut at the bounds of buckets."""
        if self._cut[0] != bucket_bytes:
            self._cut = bucket_bytes, self._cut_at(bucket_bytes)
        return self._cut[1]

    def idle(self, bucket_bytes: int) -> set[int]:
        """The buckets of which nothing is needed."""
        return {number for number, runs in enumerate(self.cut(bucket_bytes)) if not runs}

    def _cut_at(self, bucket_bytes: int) -> list[list[tuple[int, int]]]:
        cut: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.buckets(bucket_bytes))]
        for run_at, run_bytes in self.runs():
            for bucket, at, nbytes in cut_run(run_at, run_bytes, bucket_bytes):
                cut[bucket].append((at, nbytes))
        return cut


def run_cost(bytes_per_s: float) -> int:
    """What a piece of a transfer costs over a link of this speed, in bytes."""
    return _SLOW_COST_BYTES if bytes_per_s < _SLOW else _RUN_COST_BYTES


def widened(entry: Entry, box: Box, run_bytes: int = _RUN_COST_BYTES) -> Box | None:
    """The box around ``box`` that is cheapest to transfer; None for the whole tensor. A piece costs ``run_bytes``."""
    shape, itemsize = entry.spec.shape, entry.dtype.itemsize
    if 0 in box.shape:
        return box
    best, least = None, run_bytes + entry.nbytes
    while box.shape != shape:
        inner = innermost(shape, box)
        cost = math.prod(box.shape[:inner]) * run_bytes + math.prod(box.shape) * itemsize
        if cost < least:
            best, least = box, cost
        box = Box(_replaced(box.start, inner, 0), _replaced(box.shape, inner, shape[inner]))
    return best


def place(entry: Entry, box: Box | None, address: int) -> Block | None:
    """Where a box of a tensor at ``address`` lies in memory, or the whole tensor; None if it is not contiguous."""
    if box is None:
        return Block(address, entry.nbytes)
    found = runs(entry.spec.shape, entry.dtype.itemsize, box)
    (at, nbytes), more = next(found), next(found, None)
    return Block(address + at, nbytes) if more is None else None


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


class Wanted:
    """The digests that the trainer has to compute for ranks with the subsets ``needs``."""

    def __init__(self, needs: Iterable[Subset]):
        self._needs = {subset.name: subset for subset in needs}

    @property
    def names(self) -> Set[str]:
        """Names of the subsets; equal names mean equal digests."""
        return self._needs.keys()

    def also(self, needs: Iterable[Subset]) -> Wanted:
        """The digests wanted for these subsets as well."""
        return Wanted((*self._needs.values(), *needs))

    def without(self, names: Set[str]) -> Wanted:
        """The digests wanted for all subsets except those with these ``names``."""
        return Wanted(subset for name, subset in self._needs.items() if name not in names)

    def boxes(self, number: int) -> set[Box | None]:
        """The boxes of a tensor that have to be hashed; None is the whole tensor."""
        return {box for subset in self._needs.values() for box in subset.hashed(number)}

    def digests(self, numbers: Iterable[int], found: Found) -> Digests:
        """The digests to announce with a bucket in which the tensors ``numbers`` end; ``found`` has all digests."""
        ended = list(numbers)
        return {name: tuple(self._of(subset, ended, found)) for name, subset in self._needs.items()}

    def _of(self, subset: Subset, ended: Sequence[int], found: Found) -> Iterator[int]:
        if subset.layout.table:
            for number in ended:
                for box in subset.hashed(number):
                    yield found[number, box]
            return
        for number in ended:  # the same for one domain, at half the time for each tensor
            box = subset.box(number)
            if box is None or 0 not in box.shape:
                yield found[number, box]

    def picks(self, keys: Sequence[tuple[int, Box | None]]) -> dict[str, Callable[[Sequence[int]], tuple[int, ...]]]:
        """For every name, a function that selects its digests from all that were found for ``keys``."""
        at = {key: index for index, key in enumerate(keys)}
        numbers = dict.fromkeys(number for number, _ in keys)
        return {name: _picker(indices) for name, indices in self.digests(numbers, at).items()}

    def by_bucket(self, layout: Layout, bucket_bytes: int, found: Found) -> list[Digests]:
        """The digests to announce with each bucket, in order."""
        ended: list[list[int]] = [[] for _ in range(layout.buckets(bucket_bytes))]
        for entry in layout.entries:
            if entry.nbytes:
                ended[(entry.offset + entry.nbytes - 1) // bucket_bytes].append(entry.number)
        return [self.digests(numbers, found) for numbers in ended]


def _picker(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if len(indices) < 2:
        return lambda found: tuple(found[index] for index in indices)
    pick: Callable[[Sequence[int]], tuple[int, ...]] = operator.itemgetter(*indices)
    return pick
