"""Trainer side: what carries the bytes of a sender's pushes. One arena is packed, whatever carries it to whom."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol import http
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors import native_copy
from weightsync.tensors.layout import Layout
from weightsync.trainer.outgoing import Outgoing, Packed
from weightsync.transports import registry
from weightsync.transports.base import PeerRanks, TrainerEnd

Post = Callable[[Mapping[str, Handshake]], Mapping[str, http.JoinReply]]
"""Tells engines, by URL, what a transport has to say before a push; returns their replies."""


class Transfer:
    """The arenas of one sender and a trainer end for every transport in use. ``device`` is where the arenas are.

    ``helpers`` are the other ranks of the trainer, if it has any; ``address`` is what ranks dial, see `TransportSpec`.
    """

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self.device, self._helpers, self._address = device, helpers, address
        self._ends: dict[str, TrainerEnd] = {}
        #: The next push goes into the first; a second holds what is served, where engines keep that.
        self._arenas: list[Arena] = []
        self._current: Outgoing | None = None
        #: What is served, where an arena holds all of it.
        self._served: Outgoing | None = None
        self._packed: Packed = {}
        self.closed = False

    def free_bytes(self) -> int:
        """Memory that an arena could take, in bytes."""
        free = arenas.free_bytes(self.device) if self.device.type == "cuda" else arenas.free_shared_bytes()
        return free + sum(arena.bytes.numel() for arena in self._arenas if not isinstance(arena, SharedParameters))

    def connect(self, engines: Mapping[str, tuple[str, http.OpenReply]], post: Post, deadline: Deadline) -> None:
        """Make every engine ready to be pushed to; ``engines`` says by URL over what. Those that are, hear nothing.

        Raises `UnsupportedOption`, `TransferFailed`, `PushTimeout`, and what ``post`` raises.
        """
        for name in sorted({transport for transport, _ in engines.values()}):
            if name not in self._ends:
                self._ends[name] = registry.spec(name).trainer_end(self.device, self._helpers, self._address)
            those = {url: hello for url, (transport, hello) in engines.items() if transport == name}
            if asked := self._ends[name].connect(those, max(deadline.left(), 0.1)):
                self._ends[name].connected(post(asked), deadline)

    def begin(self, plan: UpdateRequest, layout: Layout, shared: list[torch.Tensor] | None = None) -> Outgoing:
        """A push, in the arenas of the push before where those have its size.

        ``lent`` are all tensors, if they are to be read where they are.
        """
        self._served = None
        if shared is not None:
            self._share(layout, shared)
        else:
            self._provide(plan, layout)
        self._current = Outgoing(self._ends, self._packed, plan, layout, self._arenas[0], self._arenas[1:])
        return self._current

    def again(self) -> Outgoing | None:
        """What is served, as a push anew that `Outgoing.resend` sends; None where no arena holds it."""
        if self._served is None or not arenas.reachable(self._served.arena):
            return None
        was = self._served
        plan, others = msgspec.structs.replace(was.plan, push=secrets.token_hex(8)), list(self._arenas)
        others.remove(was.arena)
        self._current = Outgoing(self._ends, self._packed, plan, was.layout, was.arena, others, was.announced)
        return self._current

    def _share(self, layout: Layout, shared: list[torch.Tensor]) -> None:
        arena = self.shared
        if arena is not None and arena.holds(layout, shared):
            arena.tensors = shared
        else:
            self._free()
            self._arenas.append(SharedParameters(layout, shared))

    def _provide(self, plan: UpdateRequest, layout: Layout) -> None:
        nbytes = plan.slots * plan.bucket_bytes
        count = 2 if plan.keep and layout.nbytes <= nbytes else 1
        same = len(self._arenas) == count and self._arenas[0].bytes.numel() == nbytes and self.shared is None
        if same and all(map(arenas.reachable, self._arenas)):
            return
        self._free()
        for _ in range(count):
            cuda = self.device.type == "cuda"
            self._arenas.append(arenas.CudaArena(nbytes, self.device) if cuda else arenas.ShmArena(nbytes))

    @property
    def shared(self) -> SharedParameters | None:
        """The tensors that were read where they are in the push before."""
        arena = self._arenas[0] if self._arenas else None
        return arena if isinstance(arena, SharedParameters) else None

    def _free(self) -> None:
        self._served = None
        self._packed.clear()
        for end in self._ends.values():
            end.forget()
        while self._arenas:
            self._arenas.pop().close()

    def disconnect(self, engine: str, transport: str) -> None:
        """An engine was told to forget this sender."""
        if transport in self._ends:
            self._ends[transport].disconnect(engine)

    def address(self, engine: str, transport: str) -> str:
        """What the engine knows this sender by; empty if it was never told."""
        return self._ends[transport].address(engine) if transport in self._ends else ""

    def revoke(self) -> None:
        """The trainer may write to its parameters again: ranks that still read them where they are find out."""
        if self.shared is not None:
            self.shared.revoke()

    def cancel(self, error: BaseException) -> None:
        """Tell the ranks that no more will come of the push that is under way."""
        if self._current is not None:
            self._current.cancel(error)
            self._current = None
        if self.shared is not None:
            self._free()

    def served(self, push: Outgoing) -> None:
        """A push is served: where engines keep the version before, the next push must leave it intact."""
        again, self._current = self._served is not None, None
        if push.is_whole and self.shared is None:  # what is the trainer's own it changes
            self._served = push
        if not again:
            self._arenas.reverse()

    def rolled_back(self) -> None:
        """The version before is what is served."""
        self._served = None
        self._arenas.reverse()

    def close(self) -> None:
        """Release everything; idempotent."""
        self.closed = True
        self._free()
        while self._ends:
            self._ends.popitem()[1].close()
        native_copy.release()
