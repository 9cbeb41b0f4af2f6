"""Moves the bytes of a sender's pushes: one arena is packed, and every transport in use sends it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena, CudaArena, ShmArena
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol import http
from weightsync.protocol.expected import Lent
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors import native_copy
from weightsync.tensors.layout import ALIGN_BYTES, Layout
from weightsync.trainer import buckets
from weightsync.trainer.outgoing import Outgoing, Packed
from weightsync.transports import registry
from weightsync.transports.base import PeerRanks, TrainerEnd

#: The first arena for changes has one part in so many of the bytes of a version.
_CHANGES_SHARE: Final = 16

Post = Callable[[Mapping[str, Handshake]], Mapping[str, http.JoinReply]]
"""Sends engines, by URL, the handshake of a transport; returns their replies."""


class Transfer:
    """The arenas of one sender, on ``device``, and a trainer end for every transport in use.

    ``helpers`` are the other ranks of the trainer, if any; ``address`` is where engine ranks find this host, see
    `TransportSpec`.
    """

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self.device, self._helpers, self._address = device, helpers, address
        self._ends: dict[str, TrainerEnd] = {}
        #: The next push goes into the first. With ``keep_previous`` a second one holds the served version.
        self._arenas: list[Arena] = []
        #: Those of adapters, by name, so that those above go on holding the weights; and that of what has changed.
        self._apart: dict[str, Arena] = {}
        self._of_changes: ShmArena | CudaArena | None = None
        #: The pushes of the adapters that are served, by name, each still in its arena.
        self._adapters: dict[str, Outgoing] = {}
        #: The sizes of other memory domains' arenas, which have the name of the first and are made anew with it.
        self._sizes: list[int] = []
        self._current: Outgoing | None = None
        #: The push of the served version, if an arena holds all of it.
        self._served: Outgoing | None = None
        self._packed: Packed = {}
        #: What the trainer's other ranks offered with the parameters that ranks read in place.
        self._offered: tuple[str, ...] = ()
        #: The seconds that arenas took since this was last set.
        self.arena_s = 0.0
        self.closed = False

    def free_bytes(self) -> int:
        """Bytes that arenas can take, including those that this sender's arenas already have."""
        free = arenas.free_bytes(self.device) if self.device.type == "cuda" else arenas.free_shared_bytes()
        return free + sum(arena.bytes.numel() for arena in self._arenas if not isinstance(arena, SharedParameters))

    def connect(self, engines: Mapping[str, tuple[str, http.OpenReply]], post: Post, deadline: Deadline) -> None:
        """Set up every engine that is not set up yet. ``engines``: transport and open reply of each engine, by URL.

        Raises `UnsupportedOption`, `TransferFailed`, `PushTimeout`, and what ``post`` raises.
        """
        for name in sorted({transport for transport, _ in engines.values()}):
            hellos = {url: hello for url, (transport, hello) in engines.items() if transport == name}
            if handshakes := self._end(name).connect(hellos, max(deadline.left(), 0.1)):
                self._ends[name].connected(post(handshakes), deadline)

    def _end(self, transport: str) -> TrainerEnd:
        if transport not in self._ends:
            self._ends[transport] = registry.spec(transport).trainer_end(self.device, self._helpers, self._address)
        return self._ends[transport]

    def lent(self, engine: str, transport: str) -> Lent | None:
        """What ranks of an engine can map before the first push; None if that is nothing."""
        handles = tuple(arena.handle() for arena in self._arenas if isinstance(arena, ShmArena))
        if not handles or not registry.spec(transport).local:
            return None
        return Lent(transport, self._end(transport).address(engine), handles)

    def begin(
        self, plan: UpdateRequest, layout: Layout, shared: list[torch.Tensor] | None = None, *, spare: bool = False
    ) -> Outgoing:
        """Start a push, in the arenas of the push before if they have the right size.

        ``shared`` are all tensors, if the ranks read them in place. ``spare``: a second arena keeps the version before.
        """
        start, base = time.perf_counter(), None
        if plan.adapter is not msgspec.UNSET:
            nbytes = _of_host(layout) if layout.table else plan.slots * plan.bucket_bytes
            arena = self._make_apart(plan.adapter.name, nbytes)
        else:
            served, self._served = self._served, None
            if shared is not None:
                self._share(layout, shared)
            else:
                self._make_arenas(plan, layout, spare)
            arena = self._arenas[0]
            base = served if served is not None and served.arena in self._arenas[1:] else None
        self.arena_s += time.perf_counter() - start
        self._current = Outgoing(self._ends, self._packed, plan, layout, arena, self._but(arena))
        self._current.follow(base)
        return self._current

    def _make_apart(self, name: str, nbytes: int) -> Arena:
        self._adapters.pop(name, None)
        arena = self._apart.get(name)
        if arena is None or arena.bytes.numel() != nbytes or not arenas.reachable(arena):
            if arena is not None:
                self._packed.clear()
                for end in self._ends.values():
                    end.forget()
                arena.close()
            arena = self._apart[name] = arenas.make(nbytes, self.device, in_part=self._helpers is not None)
        return arena

    def arena_of_changes(self, nbytes: int, most: int) -> ShmArena | CudaArena:
        """An arena of at least ``nbytes`` for what has changed of a version of ``most`` bytes."""
        arena = self._of_changes
        if arena is None or arena.bytes.numel() < nbytes or not arenas.reachable(arena):
            if arena is not None:
                for end in self._ends.values():
                    end.forget()
                arena.close()
            # Connections are made anew with a new arena, so there are few sizes.
            room = ALIGN_BYTES * max(1, most // _CHANGES_SHARE // ALIGN_BYTES)
            while room < nbytes:
                room *= 2
            arena = self._of_changes = arenas.make(room, self.device)
            if self._current is not None:  # it began beside the one before
                self._current.others = self._but(self._current.arena)
        return arena

    def _but(self, arena: Arena | None) -> list[Arena]:
        """The other arenas that ranks may still use."""
        of_changes = [] if self._of_changes is None else [self._of_changes]
        return [other for other in (*self._arenas, *self._apart.values(), *of_changes) if other is not arena]

    def again(self, lora: str | msgspec.UnsetType = msgspec.UNSET) -> Outgoing | None:
        """Start a push of the served version, of the weights or of an adapter, for `Outgoing.resend`; None if no arena
        holds that version."""
        served = self._served if lora is msgspec.UNSET else self._adapters.get(lora)
        return None if served is None or not arenas.reachable(served.arena) else self.repeat(served)

    def repeat(self, last: Outgoing) -> Outgoing:
        """Start a push of what the arena of ``last``, a push of this transfer, holds."""
        plan, others = msgspec.structs.replace(last.plan, push=secrets.token_hex(8)), self._but(last.arena)
        plan = msgspec.structs.replace(plan, content=last.content)
        before = last.announced, last.demand
        self._current = Outgoing(self._ends, self._packed, plan, last.layout, last.arena, others, *before)
        return self._current

    def _share(self, layout: Layout, shared: list[torch.Tensor]) -> None:
        arena, offered = self.shared, tuple(self._helpers.offered) if self._helpers is not None else ()
        if arena is not None and arena.holds(layout, shared) and offered == self._offered:
            arena.tensors = shared
        else:
            self._free()
            self._arenas.append(SharedParameters(layout, shared))
            self._offered = offered

    def _make_arenas(self, plan: UpdateRequest, layout: Layout, spare: bool) -> None:
        nbytes, count = buckets.arenas(plan, layout.nbytes, keep=plan.keep or spare)
        if layout.table:  # ranks keep versions in stages of their own
            nbytes, count = _of_host(layout), 1
        self.provide(nbytes, count, [layout.domain_bytes(domain) for domain in range(1, len(layout.table))])

    def provide(self, nbytes: int, count: int, sizes: Sequence[int] = ()) -> None:
        """Make ``count`` arenas of ``nbytes``, unless they are there; ``sizes`` are those of the other domains'."""
        same = len(self._arenas) == count and self._arenas[0].bytes.numel() == nbytes and self.shared is None
        if same and list(sizes) == self._sizes and all(map(arenas.reachable, self._arenas)):
            return
        self._free()
        self._sizes = list(sizes)
        for _ in range(count):
            self._arenas.append(arenas.make(nbytes, self.device, in_part=self._helpers is not None))

    @property
    def shared(self) -> SharedParameters | None:
        """The parameters that ranks read in place in the push before, if they did."""
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
        """Note that an engine was told to release this sender: it is set up again before the next push."""
        if transport in self._ends:
            self._ends[transport].disconnect(engine)

    def address(self, engine: str, transport: str) -> str:
        """The address by which the engine knows this sender; empty if it does not."""
        return self._ends[transport].address(engine) if transport in self._ends else ""

    def revoke(self) -> None:
        """Revoke shared parameters, which the trainer may then change: ranks that still read them will notice."""
        if self.shared is not None:
            self.shared.revoke()

    def cancel(self, error: BaseException) -> None:
        """Tell the ranks that the current push is cancelled."""
        if self._current is not None:
            self._current.cancel(error)
            self._current = None
        if self.shared is not None:
            self._free()

    def served(self, push: Outgoing) -> None:
        """Note that a push is served. With two arenas, the next push goes into the other one."""
        again, self._current, push.base = self._served is not None, None, None
        # Other hosts' arenas are not this sender's.
        whole = push.is_whole and not push.layout.table
        if push.plan.lora is not msgspec.UNSET:
            if whole:
                self._adapters[push.plan.lora] = push
            return
        if whole and self.shared is None:  # shared parameters change with the next training step
            self._served = push
        if not again:
            self._arenas.reverse()

    def dropped(self) -> None:
        """Note that every rank has received the current push, and that no engine will load it."""
        self._current = None

    def rolled_back(self, lora: str | msgspec.UnsetType) -> None:
        """Note that the version before is served again, of the weights or of an adapter."""
        if lora is not msgspec.UNSET:
            self._adapters.pop(lora, None)
            return
        self._served = None
        self._arenas.reverse()

    def close(self) -> None:
        """Release everything; idempotent."""
        self.closed = True
        self._free()
        self._adapters.clear()
        for arena in self._but(None):
            arena.close()
        self._apart.clear()
        self._of_changes = None
        while self._ends:
            self._ends.popitem()[1].close()
        native_copy.release()


def _of_host(layout: Layout) -> int:
    """The size of this host's arena, of a stream that is divided between hosts."""
    return max(layout.domain_bytes(0), ALIGN_BYTES)
