"""Who of a trainer's ranks provides which part of which tensor: worked out from what each of them holds. Pure.

Each tensor is cut wherever a box begins or ends, so that each cell lies in a box as a whole or not at all. Each cell is
given to one rank that holds it, by bytes; one that nobody holds is an error that says who holds what.
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

#: How much of what is wrong an error lists before it says "and N more".
_LISTED: Final = 5


class Assignment(NamedTuple):
    """What one rank is to provide: ``part`` of the manifest's tensor ``tensor``, which lies in its ``held`` entry's box
    number ``box``."""

    tensor: int
    held: int
    box: int
    part: Box


class Plan(NamedTuple):
    """``manifest`` is every tensor of the model in sending order, ``pieces`` are those of each rank, in that order."""

    manifest: tuple[TensorSpec, ...]
    pieces: tuple[tuple[Assignment, ...], ...]

    def providers(self) -> list[set[int]]:
        """The ranks that provide each tensor; none for one without elements."""
        found: list[set[int]] = [set() for _ in self.manifest]
        for rank, pieces in enumerate(self.pieces):
            for piece in pieces:
                found[piece.tensor].add(rank)
        return found


def plan(held: Sequence[Sequence[HeldShards]]) -> Plan:
    """Assign every element of every tensor to exactly one rank that holds it; ``held`` is that of each rank, in order.

    The manifest is rank 0's, then what rank 1 has beside it, and so on. What several ranks hold is spread over them by
    bytes. Raises `SourceError`, by name, for what is held by nobody, and for tensors that ranks do not agree on.
    """
    manifest: dict[str, TensorSpec] = {}
    holders: dict[str, list[tuple[int, int, HeldShards]]] = {}
    for rank, entries in enumerate(held):
        for index, one in enumerate(entries):
            name = one.spec.name
            if manifest.setdefault(name, one.spec) != one.spec:
                first, _, other = holders[name][0]
                raise SourceError(
                    f"{name} is {_text(other.spec)} at trainer rank {first} and {_text(one.spec)} at trainer rank "
                    f"{rank}; every rank must hold parts of the same model"
                )
            for box in one.boxes:
                _check_inside(one.spec, box, rank)
            holders.setdefault(name, []).append((rank, index, one))
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
    chosen = spread([(unit.nbytes, list(unit.pieces)) for unit in units], range(len(held)))
    for unit, rank in zip(units, chosen, strict=True):
        pieces[rank].append(unit.pieces[rank])
    return Plan(tuple(manifest.values()), tuple(map(tuple, pieces)))


def spread(work: Sequence[tuple[int, Sequence[int]]], ranks: Iterable[int]) -> list[int]:
    """Which rank does each piece of ``work``: its size, and the ranks that can. Largest first, to whom has least."""
    load = dict.fromkeys(ranks, 0)
    chosen = [-1] * len(work)
    # What only one can do counts before anything is dealt out.
    for index in sorted(range(len(work)), key=lambda i: (len(work[i][1]) > 1, -work[i][0], i)):
        size, able = work[index]
        chosen[index] = min(able, key=lambda rank: (load[rank], rank))
        load[chosen[index]] += size
    return chosen


class _Unit(NamedTuple):
    """A part that is provided by one rank; ``pieces`` by rank that could."""

    nbytes: int
    pieces: Mapping[int, Assignment]


class _Gap(Exception):
    """Part of a tensor is held by nobody."""


def _units(number: int, spec: TensorSpec, holders: Sequence[tuple[int, int, HeldShards]]) -> Iterator[_Unit]:
    """Cut a tensor wherever a box begins or ends: each cell then lies in a box, or beside it, as a whole."""
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
        able = pieces if replicated else {min(pieces): pieces[min(pieces)]}
        part = next(iter(pieces.values())).part
        yield _Unit(math.prod(part.shape) * DTYPES[spec.dtype].itemsize, able)


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
