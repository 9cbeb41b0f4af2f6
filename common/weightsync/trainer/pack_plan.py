"""Repeats a packing, from the same memory to the same arena, without touching any tensor object.

One pass in C recognises a module that was pushed before by the objects, addresses, shapes, strides and dtypes of its
tensors, and a mapping by names in place of objects. A `PackPlan` holds the copies and hashes of that push as addresses.
What it does with each bucket is a `one_pass.OnePass`. Everything else goes through `packing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from weightsync.tensors import gpu_copy, native_copy
from weightsync.tensors.boxes import Box
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversions, Making, by_source
from weightsync.tensors.layout import Layout, Piece
from weightsync.tensors.native_copy import Block, Run
from weightsync.tensors.one_pass import OnePass, Span
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Digests, Wanted, place
from weightsync.trainer.gpu_pack_plan import GpuPackPlan
from weightsync.trainer.packing import Packed


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


class _Bucket(NamedTuple):
    """What is done for a bucket; ``picks`` selects each subset's digests, by its name."""

    work: OnePass
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
        boxes: Sequence[Sequence[tuple[Box | None, Block]]],
        demand: Wanted,
        conversions: Conversions,
    ):
        self._layout, self._bucket_bytes, self._copies = layout, bucket_bytes, isinstance(arena, torch.Tensor)
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0
        self._boxes, self._addresses = boxes, dict[int, int]()
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
        self._buckets = []
        start, hashers = arena.data_ptr() if isinstance(arena, torch.Tensor) else 0, dict[int, Any]()
        for bucket in range(layout.buckets(bucket_bytes)):
            base = start + bucket % slots * bucket_bytes
            pieces = [piece for piece in layout.pieces(bucket, bucket_bytes) if piece.nbytes]
            keys = [(p.entry.number, box) for p in pieces if p.last for box, _ in boxes[p.entry.number]]
            work = OnePass([self._span(piece, base) for piece in pieces], hashers)
            self._buckets.append(_Bucket(work, demand.picks(keys)))
        del self._addresses, self._boxes

    def _span(self, piece: Piece, base: int) -> Span:
        """What is done with a piece of a bucket at address ``base``. The trainer's own tensor is hashed, or the result
        of a conversion."""
        number, at = piece.entry.number, base + piece.at
        made = self._made(piece, at) if number in self._makings else None
        address = at if made is not None else self._addresses[number] + piece.start
        runs = [Run(address, at, piece.nbytes)] if self._copies and made is None else []
        boxes = self._boxes[number]
        whole = number if any(box is None for box, _ in boxes) else None
        rest = [at for box, at in boxes if box is not None] if piece.last else []
        made_by, follows = (None, False) if made is None else (made.make, made.which > 0)
        return Span(Block(address, piece.nbytes), runs, whole, piece.start == 0, piece.last, rest, made_by, follows)

    def _made(self, piece: Piece, at: int) -> _Made:
        dtype = piece.entry.dtype
        target = _elements(at, piece.nbytes // dtype.itemsize, dtype)
        return _Made(*self._makings[piece.entry.number], piece.start // dtype.itemsize, target)

    def fill(self, acquire: Callable[[int], None]) -> Iterator[Packed]:
        """See `packing.Packer.fill`."""
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0
        for making, _ in self._makings.values():
            making.restart()
        for number, bucket in enumerate(self._buckets):
            acquire(number)
            found = bucket.work.make()
            self.gather_s += bucket.work.gather_s
            self.digest_s += bucket.work.digest_s
            self.not_finite += bucket.work.not_finite
            digests: Digests = {name: pick(found) for name, pick in bucket.picks.items()}
            yield Packed(number, digests, min((number + 1) * self._bucket_bytes, self._layout.nbytes))


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
    boxes: list[list[tuple[Box | None, Block]]] = []
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
    return torch.frombuffer(native_copy.view(Block(address, count * dtype.itemsize)), dtype=dtype)
