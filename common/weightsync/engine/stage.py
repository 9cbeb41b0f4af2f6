"""Stages: memory of a rank for one version, filled bucket by bucket from a transport and verified on arrival."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from msgspec import UNSET

from weightsync.engine.changed import ChangedIncoming
from weightsync.engine.verifying import Check, Prepared, Taking
from weightsync.errors import BaseUnknown, TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol.http import UpdateRequest
from weightsync.python_lock import passed_soon
from weightsync.tensors import native_copy
from weightsync.tensors.any_order import Arrival
from weightsync.tensors.divided import part
from weightsync.tensors.layout import Entry, Layout
from weightsync.tensors.native_copy import Run
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


class Held(NamedTuple):
    """The bytes that a stage has of a version: their name, see `UpdateRequest.content`, and that of the subset."""

    content: str
    subset: str


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
    #: What this rank's own stages hold, in full and verified, by address.
    _held: dict[int, Held] = field(default_factory=dict)
    #: The memory for what has changed.
    _changes: torch.Tensor | None = None

    @passed_soon()
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
        changed = incoming if isinstance(incoming, ChangedIncoming) else None
        if changed is not None:
            changed.memory = self._for_changes(changed.layout.nbytes)
        own = self._provide(layout.nbytes, kept, request) if incoming.whole is None or request.any_order else None
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
            self._changes = None
            raise
        if changed is None and incoming.lingers:
            self._give_up(stage)
        elif own is not None and check.algorithm and not request.any_order:
            self._held[own.data_ptr()] = Held(request.content or request.push, subset.name)
        if changed is not None and incoming.lingers:
            self._changes = None
        arena = incoming.arena if own is None else ""
        return Staged(request.push, subset, stage, arena, owner=request.owner), check.seconds

    def subset(self, request: UpdateRequest, needed: Subset) -> Subset:
        """What this rank has of a version once it has received a push, given what it needs.

        Raises `BaseUnknown` for changes of bytes that it does not have, or not as much of as it needs.
        """
        if request.delta is UNSET:
            return needed
        base = request.delta.base
        held = next((held for held in self._held.values() if held.content == base), None)
        if held is None or held.subset not in ("", needed.name):
            has = "does not have" if held is None else "needs more than it has of"
            raise BaseUnknown(f"rank {self.rank} {has} the bytes of push {base}, to which changes were sent")
        return needed if held.subset else Subset(needed.layout, {})

    def _give_up(self, stage: Stream) -> None:
        self._held.pop(key(stage), None)
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

    def _provide(self, nbytes: int, kept: Staged | None, request: UpdateRequest) -> torch.Tensor:
        """Memory to receive a push in; for changes it has the bytes that these refer to."""
        base = None
        if request.delta is not UNSET:
            bases = (own for own in self._own if self._content(own) == request.delta.base and own.numel() >= nbytes)
            base = next(bases, None)
            if base is None:
                raise TransferFailed(f"rank {self.rank} no longer has the bytes that changes were sent to; push again")
            if kept is None or base.data_ptr() != key(kept.data):
                self._held.pop(base.data_ptr())
                return base[:nbytes]
        found = self._room(nbytes, kept)
        self._held.pop(found.data_ptr(), None)
        if base is not None:
            native_copy.Copies([Run(base.data_ptr(), found.data_ptr(), nbytes)]).make()
        return found

    def _for_changes(self, nbytes: int) -> torch.Tensor:
        if self._changes is None or self._changes.numel() < nbytes:
            self._changes = None
            self._changes = self._allocate(nbytes, "what has changed")
        return self._changes[:nbytes]

    def _content(self, own: torch.Tensor) -> str:
        return self._held[own.data_ptr()].content if own.data_ptr() in self._held else ""

    def _room(self, nbytes: int, kept: Staged | None) -> torch.Tensor:
        busy, large = self._split(nbytes, kept)
        if large:
            return large[0][:nbytes]
        self._own = busy  # free memory that is too small before allocating more
        self._held = {own.data_ptr(): self._held[own.data_ptr()] for own in busy if own.data_ptr() in self._held}
        self._own.append(self._allocate(nbytes, "the stage"))
        return self._own[-1]

    def _allocate(self, nbytes: int, what: str) -> torch.Tensor:
        available = arenas.free_bytes(self.device)
        if nbytes > available:
            raise TransferFailed(
                f"rank {self.rank}: {what} takes {nbytes} bytes, but {available} are free on {self.device}; "
                'pass staging="none", a bucket_bytes of at least half the model, or free memory'
            )
        return arenas.plain(nbytes, self.device)

    @property
    def nbytes(self) -> int:
        """The memory that is kept from push to push, in bytes."""
        return sum(own.numel() for own in self._own) + (0 if self._changes is None else self._changes.numel())

    def release(self) -> None:
        """Free this rank's own memory."""
        self._own.clear()
        self._prepared.clear()
        self._held.clear()
        self._changes = None
        native_copy.release()


def check_several_hosts(layout: Layout, request: UpdateRequest, transport: str) -> None:
    """Raise `UnsupportedOption` for a push whose bytes lie in several domains, if it cannot be received so."""
    spec = registry.spec(transport)
    if layout.table and (request.stream or request.any_order or not (spec.several_hosts or spec.local)):
        raise UnsupportedOption(
            f"{len(layout.table)} of the trainer's hosts or processes hold this push, which takes a transport in which "
            "each of them sends, tensors in order, and a stage"
        )
