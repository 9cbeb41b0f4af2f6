"""The engine end of NIXL, one a rank; see `trainer` for the other."""

from __future__ import annotations

from threading import Event
from typing import Any, Final

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import control, http
from weightsync.protocol.control import Offer
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports import base
from weightsync.transports.control.engine import EngineControl, RankSession
from weightsync.transports.control.sockets import interface_of, way_to
from weightsync.transports.nixl.agents import Agent, ConnectionWarmUp, Transfers, spans_of
from weightsync.transports.nixl.incoming import IN_FLIGHT, Reading, Written
from weightsync.transports.nixl.messages import HANDLE, NixlHandle, RegisterNixl
from weightsync.transports.nixl.nics import shares_memory
from weightsync.transports.nixl.writing import KEPT

#: How long a rank tries to connect before its first push.
_WARM_S: Final = 30.0


class NixlEngineEnd:
    """Engine end, one a rank, see `base.EngineEnd`. ``device`` is where it receives."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        #: Lives from sender to sender, until a push fails.
        self._agent: Agent | None = None
        self._link: Link | None = None

    def join(self, asked: Handshake, rank: int) -> http.RankJoined:
        """See `base.EngineEnd`."""
        if not isinstance(asked, RegisterNixl):
            raise UnsupportedOption(f"nixl has no use for {type(asked).__name__}")
        here = interface_of(way_to(rank, asked.address)) if asked.address else ""
        self._drop()
        if self._agent is None:
            self._agent = Agent(self._device, rank)
        agent = self._agent
        self._link = Link(agent, asked, self._device)
        return http.RankJoined(
            rank=rank,
            device=str(self._device),
            interface=agent.nic or here,
            agent=agent.name,
            metadata=agent.metadata(),
        )

    def open(self, request: UpdateRequest, parts: Subset, rank: int, cancelled: Event) -> base.Incoming:
        """See `base.EngineEnd`."""
        if self._link is None:
            raise TransferFailed(f"rank {rank} knows no NIXL agent: register_nixl comes before update_weights_via_nixl")
        session, offer = self._control.open(request, parts, rank, self._link.known(), cancelled)
        if self._link.written:
            return Written(self._link, session, request, parts, offer.arena, rank)
        self._link.take(session, offer, min(parts.layout.nbytes, request.slots * request.bucket_bytes))
        return Reading(self._link, session, request, parts, offer.arena, rank)

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; what is still under way must find nobody, so the agent ends before its memory does."""
        self._control.fail(push, error)
        if self._link is None or not self._link.moving:
            return  # nor has the trainer cause to send its handshake again
        held = self._link.held()
        self._drop()
        self._agent = None
        del held

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._drop()
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        self._drop()
        self._agent = None
        self._control.close()


class Link:
    """What a rank's ``agent`` shares with that of the trainer that sent the handshake ``asked``."""

    def __init__(self, agent: Agent, asked: RegisterNixl, device: torch.device):
        self._agent, self._trainer, self._device = agent, asked.agent, device
        near = asked.host == arenas.host_id() and shares_memory()
        #: Whether the trainer writes to this rank, which otherwise reads.
        self.written = bool(asked.host) and not near and not (agent.nic and asked.rdma)
        #: Whether anything may be on its way into this rank's memory.
        self.moving = False
        agent.add_peer(asked.agent, asked.metadata, f"the trainer's agent {asked.agent}")
        self._warming = ConnectionWarmUp(agent, asked.agent, min(asked.timeout_s, _WARM_S))
        #: The sender's arenas by name.
        self._arenas: dict[str, NixlHandle] = {}
        #: READs by arena, place and size of the stage, size of the buckets and what is needed, the latest last.
        self._reads: dict[tuple[str, int, int, int, str], Transfers] = {}
        #: What is registered, and the memory itself, by place and size.
        self._registered: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._own: list[torch.Tensor] = []

    def known(self) -> tuple[str, ...]:
        """Names of the arenas that this rank can read."""
        return tuple(self._arenas)

    def take(self, session: RankSession, offer: Offer, nbytes: int) -> None:
        """Reach the arena of ``offer``, of which ``nbytes`` will be read. Raises `TransferFailed`."""
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]
            self._release({key for key in self._reads if key[0] == name})
        if (handle := control.handle_of(offer.handle, HANDLE, "the sender")) is not None:
            if handle.agent != self._trainer:
                raise TransferFailed(f"the arena is of the agent {handle.agent}, registered is {self._trainer}")
            with session.explained():
                self._agent.add_peer(handle.agent, handle.metadata, "the trainer's agent")
            self._arenas[offer.arena] = handle
        remote = self._arenas.get(offer.arena)
        if remote is None:
            raise TransferFailed(f"the arena {offer.arena} was never offered here; push again")
        if remote.nbytes < nbytes:
            raise TransferFailed(f"the arena holds {remote.nbytes} bytes, its buckets take more")

    def reads(self, arena: str, request: UpdateRequest, parts: Subset, stage: torch.Tensor | None) -> Transfers:
        """The READs that fill ``stage``, or this link's own two buckets, made where they are not there yet."""
        self.moving = True
        size, slots, layout = request.bucket_bytes, request.slots, parts.layout
        memory = self.memory(request, stage)
        key = (arena, memory.data_ptr(), layout.nbytes if stage is not None else -layout.nbytes, size, parts.name)
        found = self._reads.pop(key, None)
        if found is None:
            self._release(set(list(self._reads)[: max(0, len(self._reads) - KEPT + 1)]))
            self._register(memory)
            here = IN_FLIGHT if stage is None else layout.buckets(size)
            spans = spans_of(parts, size, slots, here)
            found = Transfers("READ", self._agent, self._arenas[arena], memory, spans)
        self._reads[key] = found
        return found

    def memory(self, request: UpdateRequest, stage: torch.Tensor | None) -> torch.Tensor:
        """Where buckets are brought: ``stage``, or this link's own two."""
        if stage is not None:
            return stage
        nbytes = IN_FLIGHT * request.bucket_bytes
        if not self._own or self._own[0].numel() != nbytes:
            self._own = [arenas.plain(nbytes, self._device)]
        return self._own[0]

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """What the trainer needs to write to ``memory``."""
        self.moving = True
        while len(self._registered) > KEPT:
            self._agent.deregister(self._registered.pop(next(iter(self._registered)))[0])
        self._register(memory)
        return self._agent.handle(memory)

    def arrived(self) -> None:
        """All of the push is here."""
        self.moving = False

    def notifications(self) -> list[bytes]:
        """What the trainer has sent since, once the connection is warm; looking brings in what it writes."""
        if self._warming.is_alive():
            return []
        return self._agent.notifications().get(self._trainer, [])

    def _register(self, memory: torch.Tensor) -> None:
        place = (memory.data_ptr(), memory.numel())
        if place not in self._registered and memory.numel():
            self._registered[place] = self._agent.register(memory), memory

    def _release(self, keys: set[tuple[str, int, int, int, str]]) -> None:
        for key in keys:
            self._reads.pop(key).release()
        used = {(reads.memory.data_ptr(), reads.memory.numel()) for reads in self._reads.values()}
        for place in self._registered.keys() - used:
            self._agent.deregister(self._registered.pop(place)[0])

    def held(self) -> list[torch.Tensor]:
        """The memory that the trainer may still be writing to."""
        return [*(memory for _, memory in self._registered.values()), *self._own]

    def close(self) -> None:
        """Give back all of it; the agent is not referred to any more."""
        self._warming.end()
        self._release(set(self._reads))
        while self._registered:
            self._agent.deregister(self._registered.popitem()[1][0])
        self._agent.forget(self._trainer)
        self._arenas.clear()
        self._own.clear()
        del self._agent
