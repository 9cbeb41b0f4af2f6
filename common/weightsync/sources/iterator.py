"""An iterator of names and tensors, as trainers yield them that gather one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from weightsync.errors import ManifestMismatch, SourceError
from weightsync.memory import arenas
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import describe, text
from weightsync.sources.dtensor import is_dtensor
from weightsync.tensors.any_order import Order
from weightsync.tensors.conversion import Conversion
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import Entry, Layout, listed

Fitting = Callable[[TensorSpec], tuple[Sequence[TensorSpec], Conversion | None]]
"""What crosses of a tensor as a trainer yields it, and how that is made, if not by copying it."""


class Placed(NamedTuple):
    """What an iterator has yielded: ``specs`` of what lies in the arena, in the layout's order, and the conversions of
    the trainer's tensors. ``not_finite``: infinite and NaN elements in these."""

    specs: tuple[TensorSpec, ...]
    conversions: Mapping[int, Conversion]
    not_finite: int
    seconds: float


class IteratorSource:
    """Pairs of a name and a tensor, in any order. They can be read once, so what they are is known only afterwards."""

    specs: tuple[TensorSpec, ...] = ()
    held: tuple[HeldShards, ...] = ()
    device = torch.device("cpu")

    def __init__(self, pairs: Iterator[Any]):
        self._pairs = pairs
        #: Whether anything was asked of it, so that it cannot be read from its start any more.
        self.begun = False

    def identity(self) -> None:
        """See `Source.identity`."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`: none is known."""
        return iter(())

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        return iter(())

    def drain(self) -> None:
        """Read everything and drop it: making a tensor may be a collective operation of several processes."""
        for _ in self._pairs:
            pass

    @torch.no_grad()
    def place(self, layout: Layout, arena: torch.Tensor, fitting: Fitting) -> Placed:
        """Put every tensor in its place in ``arena``, which holds all of ``layout``, as it comes, converted if needed.

        What did not come leaves no gap. At most one tensor is held. Raises `SourceError` for what is no tensor, or
        comes twice, and `ManifestMismatch` for a tensor that is not in the layout, or does not fit.
        """
        start, not_finite = time.perf_counter(), 0
        came: set[int] = set()
        conversions: dict[int, Conversion] = {}
        for entries, conversion, tensor in self._come(layout, fitting):
            if conversion is None:
                arenas.copy(entries[0].view(arena), tensor)
            else:
                conversions[entries[0].number] = conversion
                making = conversion.begin(tensor)
                for which, entry in enumerate(entries):
                    not_finite += making.write(which, 0, entry.view(arena).view(-1))
                del making
            came.update(entry.number for entry in entries)
            del tensor  # before the next is made
        arenas.synchronize(arena.device)
        there = [entry for entry in layout.entries if entry.number in came]
        specs = tuple(entry.spec for entry in there)
        if len(there) < len(layout.entries):
            for old, new in zip(there, Layout(specs).entries, strict=True):
                new.raw(arena).copy_(old.raw(arena).clone())
        return Placed(specs, conversions, not_finite, time.perf_counter() - start)

    def in_turn(
        self, layout: Layout, fitting: Fitting, conversions: dict[int, Conversion], dropped: Set[str]
    ) -> Iterator[tuple[tuple[Entry, ...], torch.Tensor]]:
        """Every tensor as it comes, and the places of what it becomes in a stream of this order; none is held when the
        next is made.

        Those to be converted are added to ``conversions``; those in ``dropped`` are passed over. Raises as `place`, and
        `ManifestMismatch` if the iterator ends without a tensor of ``layout``.
        """
        order, missing = Order(), {entry.number for entry in layout.entries}
        for entries, conversion, tensor in self._come(layout, fitting, dropped):
            missing.difference_update(entry.number for entry in entries)
            if conversion is not None:
                conversions[entries[0].number] = conversion
            yield tuple(map(order.placed, entries)), tensor
            del tensor
        if missing:
            names = [layout.entries[number].spec.name for number in sorted(missing)]
            raise ManifestMismatch(f"the iterator ended without {listed(names)}")

    def _come(
        self, layout: Layout, fitting: Fitting, dropped: Set[str] = frozenset()
    ) -> Iterator[tuple[tuple[Entry, ...], Conversion | None, torch.Tensor]]:
        entries = {entry.spec.name: entry for entry in layout.entries}
        came: set[str] = set()
        self.begun = True
        while (pair := next(self._pairs, None)) is not None:
            found, tensor = read_pair(pair)
            del pair
            crossing, conversion = fitting(found) if found.name not in dropped else ((found,), None)
            for spec in crossing:
                if spec.name in came:
                    raise SourceError(f"the iterator yielded {spec.name} twice; every tensor needs a unique name")
                came.add(spec.name)
            if found.name not in dropped:
                yield tuple(_entry(spec, found, entries) for spec in crossing), conversion, tensor
            del tensor


def read_pair(pair: Any) -> tuple[TensorSpec, torch.Tensor]:
    """What an iterator has yielded, described. Raises `SourceError` unless it is a name and a whole tensor."""
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise SourceError(f"the iterator yielded {type(pair).__name__}, not a pair of a name and a tensor")
    name, tensor = pair
    if is_dtensor(tensor):
        raise SourceError(f"{name}: the iterator yielded a DTensor; yield its full_tensor(), or push the module itself")
    return describe(name, tensor), tensor.detach()


def _entry(crossing: TensorSpec, found: TensorSpec, entries: dict[str, Entry]) -> Entry:
    if crossing.name not in entries:
        raise ManifestMismatch(f"{found.name}: the iterator yielded it, and the engines expect no such tensor")
    entry = entries[crossing.name]
    if crossing != entry.spec:
        raise ManifestMismatch(f"the iterator yielded {text(found)}, and the engines expect {text(entry.spec)}")
    return entry
