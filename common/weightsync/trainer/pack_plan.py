"""Repeats a packing, from the same memory to the same arena, without touching any tensor object.

One pass in C recognises a module that was pushed before by the objects, addresses, shapes, strides and dtypes of its
tensors, and a mapping by names in place of objects. A `PackPlan` holds the copies and hashes of that push as addresses.
Small tensors are handled in groups of 1 MiB, so that hashing finds them in the cache and other threads get to run.
Everything else goes through `packing`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from weightsync.tensors import gpu_copy, native_copy
from weightsync.tensors.boxes import Box
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversions, Making, by_source
from weightsync.tensors.layout import Layout, Piece
from weightsync.tensors.native_copy import Copies, Hashes, Run
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Digests, Wanted, place
from weightsync.trainer.gpu_pack_plan import GpuPackPlan
from weightsync.trainer.packing import Packed


class _Group(NamedTuple):
    """Tensors that are copied, then hashed if wanted; ``number`` is the place among the steps of a bucket."""

    number: int
    copies: Copies
    hashes: Hashes


class _Made(NamedTuple):
    """A part of what a conversion makes: ``target``, 1-D, from element ``first`` on; see `Making.write`."""

    making: Making
    which: int
    first: int
    target: torch.Tensor

    def make(self, start: int, nbytes: int) -> int:
        """Make ``nbytes`` bytes of the target, from byte ``start`` on."""
        size = self.target.itemsize
        part = slice(start // size, (start + nbytes) // size)
        return self.making.write(self.which, self.first + part.start, self.target[part])


class _Part(NamedTuple):
    """The bytes, in one bucket, of a tensor that is large or crosses buckets.

    With a ``hasher`` the whole tensor is hashed while it is copied. ``rest`` hashes boxes of it, after its ``last``
    part was copied. With ``made`` nothing is copied: that is made in its place, and hashed there.
    """

    number: int
    run: Run
    hasher: Any
    first: bool
    last: bool
    rest: Hashes | None
    made: _Made | None


class _Done(NamedTuple):
    """The digests of one step, the seconds it spent copying and hashing, and infinite and NaN elements it converted."""

    number: int
    digests: list[int]
    gather_s: float
    digest_s: float
    not_finite: int = 0


class _Bucket(NamedTuple):
    """The steps of a bucket; threads share the ``large`` ones. ``picks`` selects each subset's digests, by its name."""

    groups: list[_Group]
    large: list[_Part]
    small: list[_Part]
    picks: dict[str, Callable[[Sequence[int]], tuple[int, ...]]]


class PackPlan:
    """Packs contiguous tensors at ``addresses`` in host memory into ``arena``; see `packing.Packer`.

    Holds for one layout, arena and demand, and hashes with XXH3 or not at all. ``conversions``, ``gather_s``,
    ``digest_s`` and ``not_finite`` are as in `packing.Packer`. Use `pack_plan` to make one: it checks what can be
    planned.
    """

    def __init__(
        self,
        layout: Layout,
        addresses: Sequence[int],
        arena: Stream,
        bucket_bytes: int,
        slots: int,
        boxes: Sequence[Sequence[tuple[Box | None, native_copy.Block]]],
        demand: Wanted,
        conversions: Conversions,
    ):
        self._layout, self._bucket_bytes, self._copies = layout, bucket_bytes, isinstance(arena, torch.Tensor)
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0
        self._boxes = boxes
        self._addresses: dict[int, int] = {}
        #: By the number of what they make: conversions, and which of what they make that is.
        self._makings: dict[int, tuple[Making, int]] = {}
        for entries, address in zip(by_source(layout, conversions), addresses, strict=True):
            conversion = conversions.get(entries[0].number)
            if conversion is None:
                self._addresses[entries[0].number] = address
            elif any(entry.nbytes for entry in entries):
                source = _elements(address, math.prod(conversion.source.shape), conversion.dtype)
                making = conversion.begin(source.view(conversion.source.shape))
                self._makings.update((entry.number, (making, which)) for which, entry in enumerate(entries))
        self._hashers: dict[int, Any] = {}
        self._buckets = []
        start = arena.data_ptr() if isinstance(arena, torch.Tensor) else 0
        for bucket in range(layout.buckets(bucket_bytes)):
            base = start + bucket % slots * bucket_bytes
            pieces = [piece for piece in layout.pieces(bucket, bucket_bytes) if piece.nbytes]
            keys = [(p.entry.number, box) for p in pieces if p.last for box, _ in boxes[p.entry.number]]
            steps = list(self._steps(pieces, base))
            groups = [step for step in steps if isinstance(step, _Group)]
            parts = [step for step in steps if isinstance(step, _Part)]
            large = [part for part in parts if _is_large(part)]
            small = [part for part in parts if not _is_large(part)]
            self._buckets.append(_Bucket(groups, large, small, demand.picks(keys)))
        del self._addresses, self._boxes, self._hashers

    def _steps(self, pieces: Sequence[Piece], base: int) -> Iterator[_Group | _Part]:
        """The steps of a bucket: groups of small tensors, and every other piece by itself.

        A group is small enough to be hashed from the cache after it was copied. Without hashing there is one group.
        """
        hashed = any(self._boxes[piece.entry.number] for piece in pieces)
        nbytes = (lambda piece: piece.nbytes) if hashed else (lambda _: 0)
        number = itertools.count()
        for group in native_copy.grouped(pieces, nbytes):
            for small, members in itertools.groupby(group, lambda piece: self._is_grouped(piece, hashed)):
                if small:
                    yield self._group(next(number), list(members), base)
                else:
                    yield from (self._part(next(number), piece, base) for piece in members)

    def _is_grouped(self, piece: Piece, hashed: bool) -> bool:
        whole = piece.nbytes == piece.entry.nbytes and piece.nbytes < native_copy.LARGE_BYTES
        return piece.entry.number not in self._makings and (whole or not hashed)

    def _group(self, number: int, pieces: Sequence[Piece], base: int) -> _Group:
        runs = [self._run(piece, base) for piece in pieces] if self._copies else []
        hashed = [at for piece in pieces for _, at in self._boxes[piece.entry.number]]
        return _Group(number, Copies(runs), Hashes(hashed))

    def _part(self, number: int, piece: Piece, base: int) -> _Part:
        boxes, which = self._boxes[piece.entry.number], piece.entry.number
        wanted = any(box is None for box, _ in boxes)
        hasher = self._hashers.setdefault(which, xxhash.xxh3_64()) if wanted else None
        rest = [at for box, at in boxes if box is not None] if piece.last else []
        hashes, first = Hashes(rest) if rest else None, piece.start == 0
        if which not in self._makings:
            return _Part(number, self._run(piece, base), hasher, first, piece.last, hashes, None)
        at, size = base + piece.at, piece.entry.dtype.itemsize
        target = _elements(at, piece.nbytes // size, piece.entry.dtype)
        made = _Made(*self._makings[which], piece.start // size, target)
        return _Part(number, Run(at, at, piece.nbytes), hasher, first, piece.last, hashes, made)

    def _run(self, piece: Piece, base: int) -> Run:
        return Run(self._addresses[piece.entry.number] + piece.start, base + piece.at, piece.nbytes)

    def fill(self, acquire: Callable[[int], None]) -> Iterator[Packed]:
        """See `packing.Packer.fill`."""
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0
        for making, _ in self._makings.values():
            making.restart()
        for number, bucket in enumerate(self._buckets):
            acquire(number)
            start = time.perf_counter()
            large = native_copy.each(self._run_part, bucket.large)
            done = sorted([*large, *map(_run_group, bucket.groups), *map(self._run_part, bucket.small)])
            self._add_seconds(time.perf_counter() - start, done)
            self.not_finite += sum(step.not_finite for step in done)
            found = [digest for step in done for digest in step.digests]
            digests: Digests = {name: pick(found) for name, pick in bucket.picks.items()}
            yield Packed(number, digests, min((number + 1) * self._bucket_bytes, self._layout.nbytes))

    def _add_seconds(self, seconds: float, done: Sequence[_Done]) -> None:
        """Add to the totals; steps that ran in parallel share the elapsed ``seconds`` in proportion."""
        gather_s, digest_s = sum(step.gather_s for step in done), sum(step.digest_s for step in done)
        share = seconds / max(gather_s + digest_s, seconds, 1e-9)
        self.gather_s += share * gather_s
        self.digest_s += share * digest_s

    def _run_part(self, part: _Part) -> _Done:
        gather_s = digest_s = 0.0
        not_finite = 0
        if part.first and part.hasher is not None:
            part.hasher.reset()  # a cancelled push may have left something in it
        # In chunks, so that hashing finds the bytes in the cache.
        for run in native_copy.chunks(
            part.run, native_copy.SHARE_BYTES if part.hasher is None else native_copy.LARGE_BYTES
        ):
            start = time.perf_counter()
            if part.made is not None:
                not_finite += part.made.make(run.target - part.run.target, run.nbytes)
            elif self._copies:
                native_copy.copy(run)
            copied = time.perf_counter()
            if part.hasher is not None:
                part.hasher.update(native_copy.view(native_copy.Block(run.source, run.nbytes)))
            gather_s += copied - start
            digest_s += time.perf_counter() - copied
        start = time.perf_counter()
        found = [part.hasher.intdigest()] if part.last and part.hasher is not None else []
        found += part.rest.make() if part.rest is not None else []
        return _Done(part.number, found, gather_s, digest_s + time.perf_counter() - start, not_finite)


def _is_large(part: _Part) -> bool:
    """Whether threads share it with others. What follows from values is made in order, after all that are large."""
    return part.run.nbytes >= native_copy.LARGE_BYTES and (part.made is None or part.made.which == 0)


def _run_group(group: _Group) -> _Done:
    start = time.perf_counter()
    group.copies.make()
    copied = time.perf_counter()
    return _Done(group.number, group.hashes.make(), copied - start, time.perf_counter() - copied)


def pack_plan(
    layout: Layout,
    arena: Stream,
    bucket_bytes: int,
    slots: int,
    algorithm: str,
    demand: Wanted,
    addresses: Sequence[int],
    conversions: Conversions = NO_CONVERSIONS,
) -> PackPlan | GpuPackPlan | None:
    """A plan; None if the arena or the algorithm rules it out, or a box to be hashed is not contiguous."""
    on_gpu = gpu_copy.available(arena.device)
    if not (on_gpu or arena.device.type == "cpu") or algorithm not in ("", "mix64" if on_gpu else "xxh3_64"):
        return None
    if conversions and on_gpu:
        return None
    if conversions and (not isinstance(arena, torch.Tensor) or layout.nbytes > slots * bucket_bytes):
        return None  # the result of a conversion is hashed, and has to lie in one piece
    boxes: list[list[tuple[Box | None, native_copy.Block]]] = []
    for entries, read_at in zip(by_source(layout, conversions), addresses, strict=True):
        for entry in entries:
            address = entry.raw(arena).data_ptr() if entries[0].number in conversions else read_at
            wanted = sorted(demand.boxes(entry.number), key=lambda box: box or ()) if algorithm and entry.nbytes else []
            found = [(box, place(entry, box, address)) for box in wanted]
            there = [(box, at) for box, at in found if at is not None]
            if len(there) < len(found) or (on_gpu and not gpu_copy.aligned(at for _, at in there)):
                return None
            boxes.append(there)
    if on_gpu:
        return GpuPackPlan(layout, addresses, arena, bucket_bytes, slots, boxes, demand)
    return PackPlan(layout, addresses, arena, bucket_bytes, slots, boxes, demand, conversions)


def _elements(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory as a 1-D tensor, which does not keep it alive."""
    return torch.frombuffer(native_copy.view(native_copy.Block(address, count * dtype.itemsize)), dtype=dtype)
