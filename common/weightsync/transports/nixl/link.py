"""The connection of an engine rank to a sender over NIXL, and all that is prepared for it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
import torch

from weightsync.errors import TransferFailed
from weightsync.memory import arenas
from weightsync.protocol import control
from weightsync.protocol.control import Offer
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.control.engine import RankSession
from weightsync.transports.nixl.agents import IN_FLIGHT, Agent, ConnectionWarmUp, Spans, Transfers, spans_of
from weightsync.transports.nixl.messages import HANDLE, NixlHandle, RegisterNixl, SendingAgent
from weightsync.transports.nixl.nics import shares_memory
from weightsync.transports.nixl.passing import Passing
from weightsync.transports.nixl.writing import KEPT, Writer

#: Seconds that a rank tries to connect before its first push.
_WARM_S: Final = 30.0


class Way(NamedTuple):
    """How the bytes of one of the sender's hosts come: it writes them, or this rank reads them from its ``agent``."""

    agent: str
    written: bool


class Link:
    """The connection of a rank's ``agent`` to the sender that sent ``handshake``. ``device`` is that of the rank."""

    def __init__(self, agent: Agent, handshake: RegisterNixl, device: torch.device):
        self._agent, self._device = agent, device
        own = SendingAgent(handshake.agent, handshake.metadata, handshake.host, handshake.rdma)
        senders = own, *handshake.others
        #: One for each of the sender's hosts, in order of their memory domains.
        self.ways = [Way(sender.agent, is_written(agent.nic, sender, handshake.several)) for sender in senders]
        #: Whether a transfer into this rank's memory may be under way.
        self.moving = False
        for sender in senders:
            agent.add_peer(sender.agent, sender.metadata, f"the trainer's agent {sender.agent}")
        self._warming = ConnectionWarmUp(agent, [way.agent for way in self.ways], min(handshake.timeout_s, _WARM_S))
        #: The sender's arenas by name: the handle in each memory domain that this rank reads.
        self._arenas: dict[str, dict[int, NixlHandle]] = {}
        #: READs by what they depend on, the most recently used last; the arena's name is the first.
        self._reads: dict[tuple[str, object], Transfers] = {}
        #: Registrations, each with its memory, by address and size.
        self._registered: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._own: list[torch.Tensor] = []
        #: What this rank passes on to others.
        self._writer = Writer(agent)

    def known(self) -> tuple[str, ...]:
        """The names of the arenas that this rank can read."""
        return tuple(self._arenas)

    def take(self, session: RankSession, offer: Offer, request: UpdateRequest, layout: Layout) -> None:
        """Take the handles of the arenas in ``offer`` that will be read. Raises `TransferFailed`."""
        if layout.table and len(layout.table) != len(self.ways):
            raise TransferFailed(f"{len(layout.table)} hosts hold the push, but {len(self.ways)} are connected")
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]
            self._release({key for key in self._reads if key[0] == name})
        whole = min(layout.nbytes, request.slots * request.bucket_bytes)
        nbytes = [layout.domain_bytes(domain) for domain in range(len(layout.table))] or [whole]
        offered = offer.handle, *offer.others
        for domain, (way, size) in enumerate(zip(self.ways, nbytes, strict=False)):
            if not way.written and (size or not layout.table):
                raw = offered[domain] if domain < len(offered) else control.NO_HANDLE
                self._take(session, offer.arena, domain, raw, size)

    def _take(self, session: RankSession, arena: str, domain: int, raw: msgspec.Raw, nbytes: int) -> None:
        handle, way = control.handle_of(raw, HANDLE, "the sender"), self.ways[domain]
        known = self._arenas.setdefault(arena, {})
        if handle is not None and handle != known.get(domain):
            if handle.agent != way.agent:
                raise TransferFailed(
                    f"the arena belongs to the agent {handle.agent}, but this rank is connected to {way.agent}"
                )
            with session.explained():
                self._agent.add_peer(handle.agent, handle.metadata, "the trainer's agent")
            known[domain] = handle
        remote = known.get(domain)
        if remote is None:
            raise TransferFailed(f"this rank has no handle of the arena {arena}, and got none with it; push again")
        if remote.nbytes < nbytes:
            raise TransferFailed(f"the arena has {remote.nbytes} bytes, but its buckets take {nbytes}")

    def reads(
        self, domain: int, arena: str, request: UpdateRequest, subset: Subset, stage: torch.Tensor | None
    ) -> Transfers:
        """The READs of one domain that fill ``stage``, or this link's own two buckets; those of an earlier push if
        they fit."""
        self.moving = True
        size, layout, remote = request.bucket_bytes, subset.layout, self._arenas[arena][domain]
        memory = self.memory(request, stage)
        what = layout.name if layout.table else (layout.nbytes, stage is None)
        key = arena, (domain, remote, memory.data_ptr(), what, size, subset.name)
        found = self._reads.pop(key, None)
        if found is None:
            kept = KEPT * len(self.ways)
            self._release(set(list(self._reads)[: max(0, len(self._reads) - kept + 1)]))
            self._register(memory)
            here = IN_FLIGHT if stage is None else layout.buckets(size)
            found = Transfers("READ", self._agent, remote, memory, _reads_of(domain, subset, request, here))
        self._reads[key] = found
        return found

    def memory(self, request: UpdateRequest, stage: torch.Tensor | None) -> torch.Tensor:
        """The memory that receives the buckets: ``stage``, or this link's own two buckets."""
        if stage is not None:
            return stage
        nbytes = IN_FLIGHT * request.bucket_bytes
        if not self._own or self._own[0].numel() != nbytes:
            self._own = [arenas.plain(nbytes, self._device)]
        return self._own[0]

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """Register ``memory``, and return the handle with which the sender writes to it."""
        self.moving = True
        while len(self._registered) > KEPT:
            self._agent.deregister(self._registered.pop(next(iter(self._registered)))[0])
        self._register(memory)
        return self._agent.handle(memory)

    def arrived(self) -> None:
        """Note that the whole stream is here."""
        self.moving = False

    def notifications(self) -> dict[str, list[bytes]]:
        """Notifications by agent since the last call, once the connections are warm; also drives WRITEs."""
        if self._warming.is_alive():
            return {}
        found, self._warming.received = self._warming.received, {}
        for agent, notifications in self._agent.notifications().items():
            found.setdefault(agent, []).extend(notifications)
        return found

    def passing(self, request: UpdateRequest, subset: Subset, memory: torch.Tensor) -> Passing:
        """What this rank passes on of a push, whose stage is ``memory``."""
        return Passing(self._writer, memory, subset, request)

    def _register(self, memory: torch.Tensor) -> None:
        place = (memory.data_ptr(), memory.numel())
        if place not in self._registered and memory.numel():
            self._registered[place] = self._agent.register(memory), memory

    def _release(self, keys: set[tuple[str, object]]) -> None:
        for key in keys:
            self._reads.pop(key).release()
        used = {(reads.memory.data_ptr(), reads.memory.numel()) for reads in self._reads.values()}
        for place in self._registered.keys() - used:
            self._agent.deregister(self._registered.pop(place)[0])

    def held(self) -> list[torch.Tensor]:
        """The memory that the sender may still be writing to."""
        return [*(memory for _, memory in self._registered.values()), *self._own]

    def close(self) -> None:
        """Release everything but the agent; what a WRITE that is still under way needs remains with that."""
        self._warming.end()
        self._writer.forget()
        if self._agent.unfinished:
            self._registered.clear()
        self._release(set(self._reads))
        for way in self.ways:
            self._agent.forget(way.agent)
        self._arenas.clear()
        self._own.clear()


def is_written(nic: str, sender: SendingAgent, several: bool) -> bool:
    """Whether a rank with this RDMA device, or none, is written to; ``several`` as in `RegisterNixl`.

    Over RDMA a READ keeps neither side busy, but what ranks read leaves the sender's host once for each.
    """
    near = sender.host == arenas.host_id() and shares_memory()
    return bool(sender.host) and not near and (several or not (nic and sender.rdma))


def _reads_of(domain: int, subset: Subset, request: UpdateRequest, here: int) -> Spans:
    """What is read from a domain into memory of ``here`` buckets."""
    if isinstance(subset.layout, DividedLayout):
        runs = subset.layout.needed(domain, subset, request.bucket_bytes)
        return [[(there, at, nbytes) for at, there, nbytes in those] for those in runs]
    return spans_of(subset, request.bucket_bytes, request.slots, here)
