"""An iterator of names and tensors, as trainers yield them that gather one tensor at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch

from weightsync.errors import ManifestMismatch, SourceError
from weightsync.memory import arenas
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import describe, text
from weightsync.sources.dtensor import is_dtensor
from weightsync.tensors.any_order import Order
from weightsync.tensors.casting import cast
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import CASTABLE, Entry, Layout, listed


class Placed(NamedTuple):
    """What an iterator has yielded: the tensors' ``specs`` as they lie in the arena, in the layout's order, and the
    trainer's dtypes of those that were cast. ``not_finite``: infinite and NaN elements in these."""

    specs: tuple[TensorSpec, ...]
    sources: dict[str, torch.dtype]
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
    def place(self, layout: Layout, arena: torch.Tensor) -> Placed:
        """Copy every tensor to its place in ``arena``, which holds all of ``layout``, as it comes; cast it if needed.

        What did not come leaves no gap. At most one tensor is held. Raises `SourceError` for what is no tensor, or
        comes twice, and `ManifestMismatch` for a tensor that is not in the layout, or does not fit.
        """
        start, not_finite = time.perf_counter(), 0
        came: set[int] = set()
        sources: dict[str, torch.dtype] = {}
        for entry, tensor in self._come(layout):
            target = entry.view(arena)
            if tensor.dtype != entry.dtype:
                sources[entry.spec.name] = tensor.dtype
                not_finite += cast(entry.spec.name, target, tensor)
            else:
                arenas.copy(target, tensor)
            came.add(entry.number)
            del tensor  # before the next is made
        arenas.synchronize(arena.device)
        there = [entry for entry in layout.entries if entry.number in came]
        specs = tuple(entry.spec for entry in there)
        if len(there) < len(layout.entries):
            for old, new in zip(there, Layout(specs).entries, strict=True):
                new.raw(arena).copy_(old.raw(arena).clone())
        return Placed(specs, sources, not_finite, time.perf_counter() - start)

    def in_turn(
        self, layout: Layout, sources: dict[int, torch.dtype], dropped: Set[str]
    ) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Every tensor as it comes, and its place in a stream of this order; none is held when the next is made.

        The dtypes of those to be cast are added to ``sources``, by their number; those in ``dropped`` are passed over.
        Raises as `place`, and `ManifestMismatch` if the iterator ends without a tensor of ``layout``.
        """
        order, missing = Order(), {entry.number for entry in layout.entries}
        for entry, tensor in self._come(layout, dropped):
            missing.remove(entry.number)
            if tensor.dtype != entry.dtype:
                sources[entry.number] = tensor.dtype
            yield order.placed(entry), tensor
            del tensor
        if missing:
            names = [layout.entries[number].spec.name for number in sorted(missing)]
            raise ManifestMismatch(f"the iterator ended without {listed(names)}")

    def _come(self, layout: Layout, dropped: Set[str] = frozenset()) -> Iterator[tuple[Entry, torch.Tensor]]:
        entries = {entry.spec.name: entry for entry in layout.entries}
        came: set[str] = set()
        self.begun = True
        while (pair := next(self._pairs, None)) is not None:
            found, tensor = _read(pair)
            del pair
            if found.name in came:
                raise SourceError(f"the iterator yielded {found.name} twice; every tensor needs a unique name")
            came.add(found.name)
            if found.name not in dropped:
                yield _entry(found, entries), tensor
            del tensor


def _read(pair: Any) -> tuple[TensorSpec, torch.Tensor]:
    if not (isinstance(pair, tuple) and len(pair) == 2):
        raise SourceError(f"the iterator yielded {type(pair).__name__}, not a pair of a name and a tensor")
    name, tensor = pair
    if is_dtensor(tensor):
        raise SourceError(f"{name}: the iterator yielded a DTensor; yield its full_tensor(), or push the module itself")
    return describe(name, tensor), tensor.detach()


def _entry(found: TensorSpec, entries: dict[str, Entry]) -> Entry:
    if found.name not in entries:
        raise ManifestMismatch(f"{found.name}: the iterator yielded it, and the engines expect no such tensor")
    entry = entries[found.name]
    castable = CASTABLE.issuperset((found.dtype, entry.spec.dtype)) or found.dtype == entry.spec.dtype
    if found.shape != entry.spec.shape or not castable:
        raise ManifestMismatch(f"the iterator yielded {text(found)}, and the engines expect {text(entry.spec)}")
    return entry
