"""Packing again what was packed before, from the same memory to the same arena, without looking at any tensor."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from weightsync import bulk
from weightsync.boxes import Box
from weightsync.bulk import Copies, Hashes, Run
from weightsync.layout import Layout, Piece
from weightsync.parts import Demand, Digests, place
from weightsync.scattered import Stream
from weightsync.transports.packing import Packed


class _Group(NamedTuple):
    """Small tensors that lie in one bucket."""

    copies: Copies
    hashes: Hashes


class _Part(NamedTuple):
    """What a bucket holds of a larger tensor. All of it is hashed while it is copied, if that is ``wanted``; ``rest``
    are parts of it, that follow once the ``last`` of it was copied."""

    run: Run
    wanted: bool
    last: bool
    rest: Hashes


class _Bucket(NamedTuple):
    """Steps, and which of the digests that they yield are announced to whom."""

    steps: list[_Group | _Part]
    picks: dict[str, Callable[[Sequence[int]], tuple[int, ...]]]


class PackPlan:
    """How to pack tensors at ``addresses`` in host memory, each in one piece, into ``arena``; see `packing.Packer`.

    Made for one layout, arena, demand, and hashes by XXH3 or not at all. Afterwards ``gather_s`` and ``digest_s`` are
    as there. Use `pack_plan`, which knows what cannot be planned.
    """

    def __init__(
        self, layout: Layout, addresses: Sequence[int], arena: Stream, bucket_bytes: int, slots: int,
        boxes: Sequence[Sequence[tuple[Box | None, bulk.Piece]]], demand: Demand,
    ):  # fmt: skip
        self._layout, self._bucket_bytes, self._copies = layout, bucket_bytes, isinstance(arena, torch.Tensor)
        self.gather_s = self.digest_s = 0.0
        self._addresses, self._boxes = addresses, boxes
        self._buckets = []
        start = arena.data_ptr() if isinstance(arena, torch.Tensor) else 0
        for bucket in range(layout.buckets(bucket_bytes)):
            base = start + bucket % slots * bucket_bytes
            pieces = [piece for piece in layout.pieces(bucket, bucket_bytes) if piece.nbytes]
            keys = [(p.entry.number, box) for p in pieces if p.last for box, _ in boxes[p.entry.number]]
            self._buckets.append(_Bucket(list(self._steps(pieces, base)), _picks(demand, keys)))
        del self._addresses, self._boxes

    def _steps(self, pieces: Sequence[Piece], base: int) -> Iterator[_Group | _Part]:
        """Groups of what is small and here as a whole, each a few pieces; all else piece by piece."""
        for group in bulk.grouped(pieces, lambda piece: piece.nbytes):
            alone = len(group) == 1 and (group[0].nbytes >= bulk.LARGE_BYTES or not _is_whole(group[0]))
            if alone or not all(map(_is_whole, group)):
                yield from (self._part(piece, base) for piece in group)
            else:
                runs = [self._run(piece, base) for piece in group] if self._copies else []
                yield _Group(Copies(runs), Hashes([at for p in group for _, at in self._boxes[p.entry.number]]))

    def _part(self, piece: Piece, base: int) -> _Part:
        boxes = self._boxes[piece.entry.number]
        rest = [at for box, at in boxes if box is not None] if piece.last else []
        return _Part(self._run(piece, base), any(box is None for box, _ in boxes), piece.last, Hashes(rest))

    def _run(self, piece: Piece, base: int) -> Run:
        return Run(self._addresses[piece.entry.number] + piece.start, base + piece.at, piece.nbytes)

    def fill(self, acquire: Callable[[int], None]) -> Iterator[Packed]:
        """See `packing.Packer.fill`."""
        self.gather_s = self.digest_s = 0.0
        size, hasher = self._bucket_bytes, xxhash.xxh3_64()
        for number, (steps, picks) in enumerate(self._buckets):
            acquire(number)
            found: list[int] = []
            for step in steps:
                if isinstance(step, _Group):
                    start = time.perf_counter()
                    step.copies.make()
                    copied = time.perf_counter()
                    found += step.hashes.make()
                    self.gather_s += copied - start
                    self.digest_s += time.perf_counter() - copied
                else:
                    self._take(step, hasher)
                    if step.last and step.wanted:
                        found.append(hasher.intdigest())
                        hasher.reset()
                    if step.last:
                        found += step.rest.make()
            digests: Digests = {name: pick(found) for name, pick in picks.items()}
            yield Packed(number, digests, min((number + 1) * size, self._layout.nbytes))

    def _take(self, part: _Part, hasher: Any) -> None:
        for run in bulk.chunks(part.run):
            start = time.perf_counter()
            if self._copies:
                bulk.copy(run)
            copied = time.perf_counter()
            if part.wanted:
                hasher.update(bulk.view(bulk.Piece(run.source, run.nbytes)))
            self.gather_s += copied - start
            self.digest_s += time.perf_counter() - copied


def pack_plan(
    layout: Layout, arena: Stream, bucket_bytes: int, slots: int, algorithm: str, demand: Demand,
    addresses: Sequence[int],
) -> PackPlan | None:  # fmt: skip
    """A plan, where all that is to be hashed lies in one piece each."""
    if arena.device.type != "cpu" or algorithm not in ("", "xxh3_64"):
        return None
    boxes: list[list[tuple[Box | None, bulk.Piece]]] = []
    for entry, address in zip(layout.entries, addresses, strict=True):
        wanted = sorted(demand.boxes(entry.number), key=lambda box: box or ()) if algorithm and entry.nbytes else []
        found = [(box, place(entry, box, address)) for box in wanted]
        if any(at is None for _, at in found):
            return None
        boxes.append([(box, at) for box, at in found if at is not None])
    return PackPlan(layout, addresses, arena, bucket_bytes, slots, boxes, demand)


def _is_whole(piece: Piece) -> bool:
    return piece.nbytes == piece.entry.nbytes


def _picks(
    demand: Demand, keys: Sequence[tuple[int, Box | None]]
) -> dict[str, Callable[[Sequence[int]], tuple[int, ...]]]:
    """For every name in ``demand``, which of the digests found for ``keys`` are announced."""
    at = {key: index for index, key in enumerate(keys)}
    numbers = dict.fromkeys(number for number, _ in keys)
    return {name: _picker(those) for name, those in demand.digests(numbers, at).items()}


def _picker(indices: Sequence[int]) -> Callable[[Sequence[int]], tuple[int, ...]]:
    if len(indices) < 2:
        return lambda found: tuple(found[index] for index in indices)
    pick: Callable[[Sequence[int]], tuple[int, ...]] = operator.itemgetter(*indices)
    return pick
