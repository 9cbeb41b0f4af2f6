"""A trainer's tensors as its ranks put them together in memory of one host, for what has to be made of whole ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption
from weightsync.memory.arenas import ShmArena
from weightsync.protocol.http import TensorSpec
from weightsync.sources import Source
from weightsync.sources.base import Whole
from weightsync.tensors.layout import Layout, listed
from weightsync.tensors.subset import Wanted
from weightsync.trainer.ranks.coordinator import Coordinator


class Place(NamedTuple):
    """Memory that the ranks of a host map, for the tensors of ``layout``."""

    layout: Layout
    arena: ShmArena


class Gathered(Whole):
    """What the ranks hold of ``source``: they write it into a `Place`, each its part, when it is read."""

    def __init__(self, ranks: Coordinator, source: Source, place: Place, deadline: Deadline):
        self._ranks, self._source, self._place, self._deadline = ranks, source, place, deadline
        self.specs, self.device = place.layout.specs, place.arena.bytes.device

    def identity(self) -> Place:  # type: ignore[override]
        """See `Source.identity`."""
        return self._place

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`. Raises as `Coordinator.fill`."""
        layout, arena = self._place
        self._ranks.fill(self._source, self._deadline, layout, arena, (arena.name,), "", Wanted(()))
        self._ranks.filled = False  # it is not what is sent
        return (entry.view(arena.bytes) for entry in layout.entries)


class Gathering:
    """Makes the place, and keeps it from push to push."""

    def __init__(self) -> None:
        self._place: Place | None = None

    def of(
        self,
        ranks: Coordinator,
        source: Source,
        manifest: tuple[TensorSpec, ...],
        quantised: Sequence[str],
        deadline: Deadline,
    ) -> Gathered:
        """The tensors of ``manifest``, of which those that are ``quantised`` have to be whole.

        Raises `UnsupportedOption` if the ranks share no memory, and `TransferFailed` if there is too little.
        """
        if not ranks.in_one_domain:
            raise UnsupportedOption(
                f"the engines' checkpoint is quantised ({listed(quantised)}), and processes on several hosts, or on "
                "GPUs of their own, cannot put tensors together: push an iterator of names and full tensors, or start "
                "the engines from a checkpoint in bfloat16"
            )
        if self._place is None or self._place.layout.specs != manifest:
            self.close()
            layout = Layout(manifest)
            self._place = Place(layout, ShmArena(layout.nbytes, in_part=True))
        return Gathered(ranks, source, self._place, deadline)

    def close(self) -> None:
        """Give the memory back; idempotent."""
        if self._place is not None:
            self._place.arena.close()
            self._place = None
