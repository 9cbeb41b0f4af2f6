"""What the recording of a loader holds: which slice of which tensor goes where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from weightsync.engine.loading.model_memory import Memory, Owner
from weightsync.tensors.boxes import Cut, cut_of, narrowed
from weightsync.tensors.divided import Divided
from weightsync.tensors.layout import Entry
from weightsync.tensors.scattered import Stream


class Copy(NamedTuple):
    """``target`` gets a slice of the tensor ``name``, cast to its dtype as `torch.Tensor.copy_` does.

    The slice has the shape of ``target``; it starts ``offset_bytes`` into the tensor's bytes, which are read as
    ``dtype``, and has ``strides`` in elements.
    """

    name: str
    dtype: torch.dtype
    offset_bytes: int
    strides: tuple[int, ...]
    target: torch.Tensor

    def key(self) -> tuple[Any, ...]:
        """Equal for copies of the same slice to the same place."""
        return (self.name, self.dtype, self.offset_bytes, self.strides, *_place(self.target))

    def cut(self, entry: Entry) -> Cut | None:
        """The slice as a box of the tensor, which is that of ``entry``; None if it is no box."""
        size = entry.dtype.itemsize
        if self.dtype.itemsize != size or self.offset_bytes % size:
            return None
        return cut_of(entry.spec.shape, self.target.shape, self.strides, self.offset_bytes // size)

    def part(self, stage: Stream, entry: Entry) -> torch.Tensor:
        """The slice: a view of the stage if the tensor lies in one part of it, otherwise a copy."""
        raw = entry.raw(stage).view(self.dtype)
        offset = raw.storage_offset() + self.offset_bytes // self.dtype.itemsize
        return raw.as_strided(self.target.shape, self.strides, offset)

    def parts(self, stage: Stream, entry: Entry) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Targets, and views of the stage to copy there: one pair, or if several memory domains have parts of the
        tensor, one for each that has a part of the slice; None if it is no box of the tensor then."""
        if not isinstance(stage, Divided) or stage.seen(entry, None) is not None:
            return [(self.target, self.part(stage, entry))]
        if (cut := self.cut(entry)) is None:
            return None
        found = stage.parts(entry, cut.box)
        return [(narrowed(self.target, *cut.seen(box)), cut.turned(source).view(self.dtype)) for box, source in found]


class Constant(NamedTuple):
    """``target`` gets ``value``, expanded to its shape, whatever is pushed."""

    value: torch.Tensor
    target: torch.Tensor

    def key(self) -> tuple[Any, ...]:
        """Equal for the same value at the same place."""
        return (self.value.reshape(1).view(torch.uint8).cpu().numpy().tobytes(), *_place(self.target))


@dataclass
class Recording:
    """What the loader does with one checkpoint."""

    memory: Memory
    copies: list[Copy] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    fallen: dict[Owner, str] = field(default_factory=dict)
    """Parameters whose loading takes more than views, casts and copies, each with the reason."""
    touched: dict[Owner, set[str]] = field(default_factory=dict)
    """By parameter, the names of the tensors that it is loaded from."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tensors that could not be followed at all, each with the reason."""
    written: dict[Owner, list[torch.Tensor]] = field(default_factory=dict)
    """By parameter, the parts that are written."""

    def moved(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Recording:
        """As it will be once the data of every tensor lies where ``place`` says."""
        memory = self.memory.moved(place)
        owners = {owner.name: owner for owner in memory.owners}
        return Recording(
            memory,
            [each._replace(target=place(each.target)) for each in self.copies],
            [each._replace(target=place(each.target)) for each in self.constants],
            {owners[owner.name]: why for owner, why in self.fallen.items()},
            {owners[owner.name]: names for owner, names in self.touched.items()},
            self.unfollowed,
            {owners[owner.name]: list(map(place, written)) for owner, written in self.written.items()},
        )

    def read(self) -> set[str]:
        """Names of the tensors that are loaded from."""
        return set(self.unfollowed).union(*self.touched.values())

    def by_owner(self) -> dict[Owner, list[Copy]]:
        """The copies by parameter, without duplicates; notes by which tensors it is `touched`."""
        groups: dict[Owner, dict[Any, Copy]] = {}
        for copy in self.copies:
            owner = self.memory.owner(copy.target)
            assert owner is not None
            self.touched.setdefault(owner, set()).add(copy.name)
            groups.setdefault(owner, {})[(*copy[:4], *_place(copy.target))] = copy
        return {owner: list(group.values()) for owner, group in groups.items()}

    def places(self, owner: Owner) -> list[Any]:
        """Which parts of a parameter are written."""
        return sorted(
            (part.data_ptr(), tuple(part.shape), part.stride(), str(part.dtype)) for part in self.written.get(owner, ())
        )

    @functools.cached_property
    def _keys(self) -> dict[str, list[tuple[Any, ...]]]:
        """The keys of all copies, by the names of the tensors that they copy. For a recording that has ended."""
        found: dict[str, list[tuple[Any, ...]]] = {}
        for copy in self.copies:
            found.setdefault(copy.name, []).append(copy.key())
        return found

    def differs(self, again: Recording, names: Collection[str] | None = None) -> str:
        """Name of something that the loader does differently in ``again``, recorded with the same memory; else empty.

        ``names`` are the tensors that it was given for ``again``; None for all.
        """
        mine = {key: name for name in (self._keys if names is None else names) for key in self._keys.get(name, ())}
        theirs = {copy.key(): copy.name for copy in again.copies}
        for key in mine.keys() ^ theirs.keys():
            return mine.get(key) or theirs[key]
        before, after = ({each.key(): each.target for each in found.constants} for found in (self, again))
        for key in (before.keys() ^ after.keys()) if names is None else ():
            owner = self.memory.owner(before[key] if key in before else after[key])
            return owner.name if owner is not None else ""
        fallen = (owner.name for owner in again.fallen if owner not in self.fallen)
        return next(fallen, "") or next(iter(again.unfollowed.keys() - self.unfollowed.keys()), "")


def _place(target: torch.Tensor) -> tuple[Any, ...]:
    return target.data_ptr(), target.shape, target.stride(), target.dtype


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this shape with these strides is one run."""
    run = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != run:
                return False
            run *= size
    return True
