"""Which rank of a trainer provides which part of which tensor, worked out from what each rank holds. No I/O.

Each tensor is cut at every edge of a box, so that each cell lies either wholly inside a box or wholly outside. Each
cell is assigned to one rank that holds it, so that bytes are balanced. A cell that no rank holds is an error, which
says what each rank holds.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box, is_inside
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import DTYPES

#: The number of gaps that an error lists before "and N more".
_LISTED: Final = 5


class Assignment(NamedTuple):
    """One piece that a rank provides: ``part`` of the manifest's tensor number ``tensor``, which lies in box number
    ``box`` of the rank's entry number ``held``."""

    tensor: int
    held: int
    box: int
    part: Box


class Plan(NamedTuple):
    """``manifest`` has every tensor of the model in sending order, ``pieces`` what each rank provides, and ``copies``
    what each rank holds and another one too."""

    manifest: tuple[TensorSpec, ...]
    pieces: tuple[tuple[Assignment, ...], ...]
    copies: tuple[tuple[Assignment, ...], ...] = ()

    def providers(self) -> list[set[int]]:
        """The ranks that provide each tensor; none for a tensor without elements."""
        found: list[set[int]] = [set() for _ in self.manifest]
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                found[piece.tensor].add(rank)
        return found


def plan(held: Sequence[Sequence[HeldShards]]) -> Plan:
    """Assign every element of every tensor to exactly one rank that holds it. ``held`` has one item for each rank.

    The manifest is that of rank 0, followed by the tensors that only rank 1 adds, and so on. Cells that several ranks
    hold are spread over these ranks by bytes. Raises `SourceError` that names a tensor of which no rank holds some
    part, or whose shape or dtype differs between ranks.
    """
    manifest: dict[str, TensorSpec] = {}
    holders: dict[str, list[tuple[int, int, HeldShards]]] = {}
    for rank, entries in enumerate(held):
        for index, shards in enumerate(entries):
            name = shards.spec.name
            if manifest.setdefault(name, shards.spec) != shards.spec:
                first, _, other = holders[name][0]
                raise SourceError(
                    f"{name} is {_text(other.spec)} at trainer rank {first} and {_text(shards.spec)} at trainer rank "
                    f"{rank}; every rank must hold parts of the same model"
                )
            for box in shards.boxes:
                _check_inside(shards.spec, box, rank)
            holders.setdefault(name, []).append((rank, index, shards))
    units: list[_Unit] = []
    gaps: list[str] = []
    for number, spec in enumerate(manifest.values()):
        try:
            units += _units(number, spec, holders[spec.name])
        except _Gap as gap:
            gaps.append(str(gap))
    if gaps:
        more = f"; and {len(gaps) - _LISTED} more" if len(gaps) > _LISTED else ""
        raise SourceError(f"the trainer's ranks do not hold the whole model: {'; '.join(gaps[:_LISTED])}{more}")
    pieces: list[list[Assignment]] = [[] for _ in held]
    copies: list[list[Assignment]] = [[] for _ in held]
    chosen = spread([(unit.nbytes, list(unit.pieces)) for unit in units], range(len(held)))
    for unit, rank in zip(units, chosen, strict=True):
        pieces[rank].append(unit.pieces[rank])
    for unit in units:
        for rank, copy in unit.copies.items():
            copies[rank].append(copy)
    return Plan(tuple(manifest.values()), tuple(map(tuple, pieces)), tuple(map(tuple, copies)))


def spread(work: Sequence[tuple[int, Sequence[int]]], ranks: Iterable[int]) -> list[int]:
    """Choose a rank for each item of ``work``: its size, and the ranks that can. Largest first, to the least loaded."""
    load = dict.fromkeys(ranks, 0)
    chosen = [-1] * len(work)
    # Items that only one rank can do are assigned first, so that the others can balance them.
    for index in sorted(range(len(work)), key=lambda i: (len(work[i][1]) > 1, -work[i][0], i)):
        size, candidates = work[index]
        chosen[index] = min(candidates, key=lambda rank: (load[rank], rank))
        load[chosen[index]] += size
    return chosen


class _Unit(NamedTuple):
    """A part that one rank will provide; ``pieces`` has it for each rank that could, ``copies`` for each that holds it
    if several do."""

    nbytes: int
    pieces: Mapping[int, Assignment]
    copies: Mapping[int, Assignment]


class _Gap(Exception):
    """No rank holds some part of a tensor."""


def _units(number: int, spec: TensorSpec, holders: Sequence[tuple[int, int, HeldShards]]) -> Iterator[_Unit]:
    """Cut a tensor at every edge of a box; each cell is then wholly inside or wholly outside of every box."""
    if not math.prod(spec.shape):
        return
    boxes = [box for _, _, one in holders for box in one.boxes]
    cuts = [
        sorted({0, size, *(box.start[d] for box in boxes), *(box.start[d] + box.shape[d] for box in boxes)})
        for d, size in enumerate(spec.shape)
    ]
    cells: dict[tuple[int, ...], dict[int, Assignment]] = {}
    for rank, index, one in holders:
        for at, box in enumerate(one.boxes):
            for cell in _cells_of(box, cuts):
                cells.setdefault(cell, {}).setdefault(rank, Assignment(number, index, at, _part(cell, cuts)))
    for cell in itertools.product(*(range(len(ends) - 1) for ends in cuts)):
        if cell not in cells:
            have = ", ".join(f"rank {rank} {' '.join(map(str, one.boxes)) or 'nothing'}" for rank, _, one in holders)
            raise _Gap(f"no rank holds {_part(cell, cuts)} of {spec.name} {list(spec.shape)} (held: {have})")
    replicated = all(one.replicated for _, _, one in holders if one.boxes)
    for pieces in cells.values():
        candidates = pieces if replicated else {min(pieces): pieces[min(pieces)]}
        part = next(iter(pieces.values())).part
        copies = pieces if len(pieces) > 1 else {}
        yield _Unit(math.prod(part.shape) * DTYPES[spec.dtype].itemsize, candidates, copies)


def _cells_of(box: Box, cuts: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    spans = [
        range(bisect.bisect_left(ends, a), bisect.bisect_left(ends, a + n))
        for a, n, ends in zip(box.start, box.shape, cuts, strict=True)
    ]
    return itertools.product(*spans)


def _part(cell: Sequence[int], cuts: Sequence[Sequence[int]]) -> Box:
    start = tuple(ends[i] for i, ends in zip(cell, cuts, strict=True))
    return Box(start, tuple(ends[i + 1] - ends[i] for i, ends in zip(cell, cuts, strict=True)))


def _check_inside(spec: TensorSpec, box: Box, rank: int) -> None:
    if not is_inside(box, spec.shape):
        raise SourceError(f"trainer rank {rank} holds {box} of {spec.name}, which is {list(spec.shape)}")


def _text(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
