"""Stages: memory of a rank for one version, filled bucket by bucket from a transport and verified on arrival."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from weightsync.engine.verifying import Check, Prepared, Taking
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors import native_copy
from weightsync.tensors.any_order import Arrival
from weightsync.tensors.divided import part
from weightsync.tensors.layout import Entry, Layout
from weightsync.tensors.scattered import Scattered, Stream, key
from weightsync.tensors.subset import Subset
from weightsync.transports import registry
from weightsync.transports.base import Incoming


@dataclass
class Staged:
    """A version in memory, in full or only the ``subset`` that this rank needs.

    ``arena`` is the name of the memory of the sender ``owner``; empty if the memory is this rank's own.
    """

    push: str
    subset: Subset
    data: Stream
    arena: str = ""
    version: str = ""
    owner: str = ""

    @property
    def layout(self) -> Layout:
        """The layout of the stream."""
        return self.subset.layout

    def check(self) -> None:
        """Raise `TransferFailed` if this lies in memory that its owner may have written to since it was verified."""
        if isinstance(self.data, Scattered):
            self.data.check()

    def tensors(self, *, cloned: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that is held in full, by name, as a view of the stage; or each cloned when it is requested."""
        return (
            (entry.spec.name, entry.view(self.data).clone() if cloned else entry.view(self.data))
            for entry in self.layout.entries
            if self.subset.box(entry.number) is None
        )


#: How many stages keep what is hashed of them: two of this rank's own, or two arenas of a sender.
_PREPARED: Final = 2


@dataclass
class Stages:
    """One rank's memory for stages, allocated once and used by one push after another."""

    rank: int
    device: torch.device
    _own: list[torch.Tensor] = field(default_factory=list)
    #: By stage, see `scattered.key`.
    _prepared: dict[int, Prepared] = field(default_factory=dict)

    def fill(
        self,
        incoming: Incoming,
        request: UpdateRequest,
        subset: Subset,
        kept: Staged | None,
        taking: Taking | None = None,
    ) -> tuple[Staged, float]:
        """Receive and verify every bucket; return the stage, and the seconds that verifying took.

        ``kept`` is a stage that must not be overwritten; ``taking`` takes every bucket. Raises `TransferFailed`,
        `DigestMismatch` or `PushTimeout`.
        """
        layout = subset.layout
        own = self._provide(layout.nbytes, kept) if incoming.whole is None or request.any_order else None
        stage = incoming.whole if own is None else own
        assert stage is not None, "own memory or the sender's"
        check, of_stage = Check(self.rank, request, subset), functools.partial(part, stage)
        try:
            if request.any_order and own is not None:
                self._fill_in_any_order(incoming, layout, own, check)
                return Staged(request.push, subset, own, owner=request.owner), check.seconds
            prepared = self._prepare(stage, subset, request) if check.algorithm else None
            for bucket in incoming.buckets(own):
                if bucket.digest is not None and check.algorithm:
                    check.whole(bucket, stage, request.bucket_bytes)
                if prepared is not None:
                    pieces = layout.pieces(bucket.number, request.bucket_bytes)
                    ended = (piece.entry for piece in pieces if piece.last)
                    check.bucket(bucket, prepared.hashes(stage, bucket.number, taking), ended, of_stage)
                if taking is not None:
                    taking.take(stage, bucket.number)
        except BaseException:
            # An interrupted transport may still write there, so the next push gets other memory.
            self._give_up(stage)
            raise
        if incoming.lingers:
            self._give_up(stage)
        arena = incoming.arena if own is None else ""
        return Staged(request.push, subset, stage, arena, owner=request.owner), check.seconds

    def _give_up(self, stage: Stream) -> None:
        self._own = [memory for memory in self._own if memory.data_ptr() != key(stage)]

    def _fill_in_any_order(self, incoming: Incoming, layout: Layout, stage: torch.Tensor, check: Check) -> None:
        arrival = Arrival(layout)
        for bucket in incoming.buckets(None):
            ended = []
            for piece in arrival.pieces(bucket.begins, bucket.data.numel()):
                target = piece.entry.raw(stage)[piece.start : piece.start + piece.nbytes]
                arenas.copy(target, bucket.data[piece.at : piece.at + piece.nbytes])
                if piece.last:
                    ended.append(piece.entry)
            arenas.synchronize(self.device)
            check.compare(bucket, ended, functools.partial(part, stage))
        arrival.end()

    def _prepare(self, stage: Stream, subset: Subset, request: UpdateRequest) -> Prepared:
        """What is hashed of this stage, kept from an earlier push if it fits."""
        found = self._prepared.get(key(stage))
        if found is None or not found.fits(stage, subset, request):
            if len(self._prepared) >= _PREPARED:
                self._prepared.clear()
            found = self._prepared[key(stage)] = Prepared(stage, subset, request)
        return found

    def stream(self, incoming: Incoming, request: UpdateRequest, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by name, in memory of its own, once it has arrived and is verified. Raises as `fill`."""
        check = Check(self.rank, request, Subset(layout, {}))
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        for bucket in incoming.buckets(None):
            done: dict[int, tuple[Entry, torch.Tensor]] = {}
            for piece in layout.pieces(bucket.number, request.bucket_bytes):
                if piece.start == 0:
                    memory = torch.empty(piece.entry.nbytes, dtype=torch.uint8, device=self.device)
                place = memory[piece.start : piece.start + piece.nbytes]
                arenas.copy(place, bucket.data[piece.at : piece.at + piece.nbytes])
                if piece.last:
                    done[piece.entry.number] = piece.entry, memory
            arenas.synchronize(self.device)
            ended = [entry for entry, _ in done.values()]
            check.compare(bucket, ended, lambda entry, _: done[entry.number][1])  # noqa: B023 - called here
            for entry in ended:  # the loader may keep a reference, but this does not
                yield entry.spec.name, done.pop(entry.number)[1].view(entry.dtype).view(entry.spec.shape)

    def _split(self, nbytes: int, kept: Staged | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's stages that must not be overwritten, and of the others those that are large enough."""
        busy = [memory for memory in self._own if kept is not None and memory.data_ptr() == key(kept.data)]
        others = (memory for memory in self._own if all(memory is not other for other in busy))
        return busy, [memory for memory in others if memory.numel() >= nbytes]

    def have_room(self, nbytes: int, kept: Staged | None) -> bool:
        """Whether `fill` will find a stage, or memory for one."""
        busy, large = self._split(nbytes, kept)
        given_up = sum(memory.numel() for memory in self._own) - sum(memory.numel() for memory in busy)
        return bool(large) or nbytes <= arenas.free_bytes(self.device) + given_up

    def _provide(self, nbytes: int, kept: Staged | None) -> torch.Tensor:
        busy, large = self._split(nbytes, kept)
        if large:
            return large[0][:nbytes]
        self._own = busy  # free memory that is too small before allocating more
        available = arenas.free_bytes(self.device)
        if nbytes > available:
            raise TransferFailed(
                f"rank {self.rank}: the stage takes {nbytes} bytes, but {available} are free on {self.device}; "
                'pass staging="none", a bucket_bytes of at least half the model, or free memory'
            )
        self._own.append(arenas.plain(nbytes, self.device))
        return self._own[-1]

    def release(self) -> None:
        """Free this rank's own memory."""
        self._own.clear()
        self._prepared.clear()
        native_copy.release()


def check_several_hosts(layout: Layout, request: UpdateRequest, transport: str) -> None:
    """Raise `UnsupportedOption` for a push whose bytes lie in several domains, if it cannot be received so."""
    spec = registry.spec(transport)
    if layout.table and (request.stream or request.any_order or not (spec.several_hosts or spec.local)):
        raise UnsupportedOption(
            f"{len(layout.table)} of the trainer's hosts or processes hold this push, which takes a transport in which "
            "each of them sends, tensors in order, and a stage"
        )
