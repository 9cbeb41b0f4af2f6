"""What ranks keep of the tensors that are pushed, where that is not all of them: they read and verify that alone.

A rank whose load plan is trusted knows the box of every tensor that it reads: rows or columns under tensor parallelism,
whole experts or none under expert parallelism. It names them in its hello, where the table itself crosses once, and the
trainer hashes each part that some rank keeps. First pushes, streams, deep verification, versions that are kept and
whatever needs the engine's own loader take all there is. If the model's memory moves between verifying and loading, the
parts are of no use to that loader, and the push is refused before anything is written.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

import torch

from weightsync.tensors.boxes import Box, is_inside, narrowed
from weightsync.tensors.layout import ALIGN_BYTES, Entry, Layout
from weightsync.tensors.native_copy import Block

#: A transfer takes as much longer, for each piece that it is in, as so many bytes take: 2.6 microseconds over shared
#: memory and 6.8 over TCP, by `make bench-transports ARGS=chunks`.
_RUN_COST_BYTES: Final = 16 << 10

Found = Mapping[tuple[int, Box | None], int]
"""Digests by the number of a tensor and the box of it that was hashed, None for all of it."""

Digests = Mapping[str, tuple[int, ...]]
"""Of the tensors that end in a bucket, by the name of what ranks keep."""


class Subset:
    """What a rank keeps of every tensor of ``layout``: ``boxes`` by the tensor's number, all of those without one.

    A box without elements is for a tensor that it keeps nothing of. Raises `ValueError` for what is no part of it.
    """

    def __init__(self, layout: Layout, boxes: Mapping[int, Box]):
        self.layout, self._boxes = layout, dict[int, Box]()
        for number, box in boxes.items():
            of = layout.entries[number].spec.shape if 0 <= number < len(layout.entries) else None
            if of is None or not is_inside(box, of):
                raise ValueError(f"{list(box.shape)} from {list(box.start)} on is no part of tensor {number}")
            if box.shape != of:
                self._boxes[number] = box
        self._cut: tuple[int, list[list[tuple[int, int]]]] = (0, [])

    @functools.cached_property
    def name(self) -> str:
        """Equal for the same parts of equal layouts; empty where all is kept."""
        said = f"{self.layout.name} {self.table()}".encode()
        return hashlib.blake2b(said, digest_size=16).hexdigest() if self._boxes else ""

    @functools.cached_property
    def nbytes(self) -> int:
        """How much is kept, in bytes."""
        saved = 0
        for number, box in self._boxes.items():
            entry = self.layout.entries[number]
            saved += entry.nbytes - math.prod(box.shape) * entry.dtype.itemsize
        return self.layout.payload_bytes - saved

    def table(self) -> tuple[tuple[int, Box], ...]:
        """The boxes by number, in order."""
        return tuple(sorted(self._boxes.items()))

    def box(self, number: int) -> Box | None:
        """What is kept of a tensor, None for all of it."""
        return self._boxes.get(number)

    def of(self, entry: Entry, raw: torch.Tensor) -> torch.Tensor | None:
        """What is kept of a tensor whose bytes are ``raw``, a view; None if nothing is."""
        box = self._boxes.get(entry.number)
        if box is None:
            return raw
        return None if 0 in box.shape else narrowed(raw.view(entry.dtype).view(entry.spec.shape), *box)

    def runs(self) -> list[tuple[int, int]]:
        """Where in the stream lies what is kept: (offset, bytes) in order, over the padding between tensors."""
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
            yield from ((entry.offset + at, nbytes) for at, nbytes in _runs(entry, box))

    def cut(self, bucket_bytes: int) -> list[list[tuple[int, int]]]:
        """The runs of every bucket: (offset in the stream, bytes), none longer than the bucket."""
        if self._cut[0] != bucket_bytes:
            self._cut = bucket_bytes, self._cut_at(bucket_bytes)
        return self._cut[1]

    def idle(self, bucket_bytes: int) -> set[int]:
        """The buckets of which nothing is kept."""
        return {number for number, runs in enumerate(self.cut(bucket_bytes)) if not runs}

    def _cut_at(self, bucket_bytes: int) -> list[list[tuple[int, int]]]:
        cut: list[list[tuple[int, int]]] = [[] for _ in range(self.layout.buckets(bucket_bytes))]
        for run_at, run_bytes in self.runs():
            at, end = run_at, run_at + run_bytes
            while at < end:
                bucket = at // bucket_bytes
                upto = min(end, (bucket + 1) * bucket_bytes)
                cut[bucket].append((at, upto - at))
                at = upto
        return cut


def widened(entry: Entry, box: Box) -> Box | None:
    """Of the boxes that hold this one, that which costs least to read; None for all of the tensor."""
    shape, itemsize = entry.spec.shape, entry.dtype.itemsize
    if 0 in box.shape:
        return box
    best, least = None, _RUN_COST_BYTES + entry.nbytes
    while box.shape != shape:
        inner = _inner(shape, box)
        cost = math.prod(box.shape[:inner]) * _RUN_COST_BYTES + math.prod(box.shape) * itemsize
        if cost < least:
            best, least = box, cost
        box = Box(_put(box.start, inner, 0), _put(box.shape, inner, shape[inner]))
    return best


def place(entry: Entry, box: Box | None, address: int) -> Block | None:
    """Where a part of a tensor in host memory, all of it without a box, lies; None if that is in several pieces."""
    if box is None:
        return Block(address, entry.nbytes)
    runs = _runs(entry, box)
    (at, nbytes), more = next(runs), next(runs, None)
    return Block(address + at, nbytes) if more is None else None


def _runs(entry: Entry, box: Box) -> Iterator[tuple[int, int]]:
    """The pieces of a box that has elements and is not the whole: (offset in the tensor, bytes), in order."""
    shape = entry.spec.shape
    steps = [math.prod(shape[at + 1 :]) * entry.dtype.itemsize for at in range(len(shape))]
    inner = _inner(shape, box)
    nbytes = box.shape[inner] * steps[inner]
    outer = (range(a, a + n) for a, n in zip(box.start[:inner], box.shape[:inner], strict=True))
    for index in itertools.product(*outer):
        yield sum(map(int.__mul__, (*index, box.start[inner]), steps)), nbytes


def _inner(shape: Sequence[int], box: Box) -> int:
    """The last dimension in which the box is not the whole."""
    return max(at for at, (size, whole) in enumerate(zip(box.shape, shape, strict=True)) if size != whole)


def _put(those: tuple[int, ...], at: int, one: int) -> tuple[int, ...]:
    return (*those[:at], one, *those[at + 1 :])


class Wanted:
    """What the trainer is to hash for ranks of which each keeps one of ``keeps``."""

    def __init__(self, needs: Iterable[Subset]):
        self._needs = {parts.name: parts for parts in needs}

    @property
    def names(self) -> Set[str]:
        """Of what is kept: equal names, equal demand."""
        return self._needs.keys()

    def without(self, names: Set[str]) -> Wanted:
        """For all ranks but those that keep these."""
        return Wanted(parts for name, parts in self._needs.items() if name not in names)

    def boxes(self, number: int) -> set[Box | None]:
        """The parts of a tensor that are to be hashed; None is all of it."""
        found = {parts.box(number) for parts in self._needs.values()}
        return {box for box in found if box is None or 0 not in box.shape}

    def digests(self, numbers: Iterable[int], found: Found) -> Digests:
        """What to announce with a bucket in which the tensors ``numbers`` end."""
        ended = list(numbers)
        return {name: tuple(self._of(parts, ended, found)) for name, parts in self._needs.items()}

    def _of(self, parts: Subset, ended: Sequence[int], found: Found) -> Iterator[int]:
        for number in ended:
            box = parts.box(number)
            if box is None or 0 not in box.shape:
                yield found[number, box]

    def by_bucket(self, layout: Layout, bucket_bytes: int, found: Found) -> list[Digests]:
        """What to announce with every bucket."""
        ended: list[list[int]] = [[] for _ in range(layout.buckets(bucket_bytes))]
        for entry in layout.entries:
            if entry.nbytes:
                ended[(entry.offset + entry.nbytes - 1) // bucket_bytes].append(entry.number)
        return [self.digests(numbers, found) for numbers in ended]
