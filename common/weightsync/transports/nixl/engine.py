"""The engine end of the nixl transport, in every rank; `trainer` is the other end."""

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

#: Seconds that a rank tries to connect before its first push.
_WARM_S: Final = 30.0


class NixlEngineEnd:
    """Engine end of one rank, see `base.EngineEnd`. ``device`` is where it receives the bytes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        #: Serves one sender after another, until a push fails.
        self._agent: Agent | None = None
        self._link: Link | None = None

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """See `base.EngineEnd`."""
        if not isinstance(handshake, RegisterNixl):
            raise UnsupportedOption(f"nixl takes a RegisterNixl, but was sent {type(handshake).__name__}")
        here = interface_of(way_to(rank, handshake.address)) if handshake.address else ""
        self._drop()
        if self._agent is None:
            self._agent = Agent(self._device, rank)
        agent = self._agent
        self._link = Link(agent, handshake, self._device)
        return http.RankJoined(
            rank=rank,
            device=str(self._device),
            interface=agent.nic or here,
            agent=agent.name,
            metadata=agent.metadata(),
        )

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> base.Incoming:
        """See `base.EngineEnd`."""
        if self._link is None:
            raise TransferFailed(f"rank {rank} knows no NIXL agent: register_nixl comes before update_weights_via_nixl")
        session, offer = self._control.open(request, subset, rank, self._link.known(), cancelled)
        if self._link.written:
            return Written(self._link, session, request, subset, offer.arena, rank)
        self._link.take(session, offer, min(subset.layout.nbytes, request.slots * request.bucket_bytes))
        return Reading(self._link, session, request, subset, offer.arena, rank)

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; the agent ends before its memory is freed, so that no transfer writes there later."""
        self._control.fail(push, error)
        if self._link is None or not self._link.moving:
            return  # the trainer does not send its handshake again either
        held = self._link.held()
        self._end()
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

    def _end(self) -> None:
        self._drop()
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def close(self) -> None:
        """Release everything; idempotent."""
        self._end()
        self._control.close()


class Link:
    """The connection of a rank's ``agent`` to the trainer that sent ``handshake``, and all that is prepared for it."""

    def __init__(self, agent: Agent, handshake: RegisterNixl, device: torch.device):
        self._agent, self._trainer, self._device = agent, handshake.agent, device
        near = handshake.host == arenas.host_id() and shares_memory()
        #: Whether the trainer writes to this rank; otherwise the rank reads.
        self.written = bool(handshake.host) and not near and not (agent.nic and handshake.rdma)
        #: Whether a transfer into this rank's memory may be under way.
        self.moving = False
        agent.add_peer(handshake.agent, handshake.metadata, f"the trainer's agent {handshake.agent}")
        self._warming = ConnectionWarmUp(agent, handshake.agent, min(handshake.timeout_s, _WARM_S))
        #: The sender's arenas by name.
        self._arenas: dict[str, NixlHandle] = {}
        #: READs by arena, address and size of the stage, bucket size and subset; the most recently used last.
        self._reads: dict[tuple[str, int, int, int, str], Transfers] = {}
        #: Registrations, each with its memory, by address and size.
        self._registered: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._own: list[torch.Tensor] = []

    def known(self) -> tuple[str, ...]:
        """The names of the arenas that this rank can read."""
        return tuple(self._arenas)

    def take(self, session: RankSession, offer: Offer, nbytes: int) -> None:
        """Take the handle of the arena in ``offer``, of which ``nbytes`` will be read. Raises `TransferFailed`."""
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]
            self._release({key for key in self._reads if key[0] == name})
        if (handle := control.handle_of(offer.handle, HANDLE, "the sender")) is not None:
            if handle.agent != self._trainer:
                raise TransferFailed(
                    f"the arena belongs to the agent {handle.agent}, but this rank is connected to {self._trainer}"
                )
            with session.explained():
                self._agent.add_peer(handle.agent, handle.metadata, "the trainer's agent")
            self._arenas[offer.arena] = handle
        remote = self._arenas.get(offer.arena)
        if remote is None:
            raise TransferFailed(
                f"this rank has no handle of the arena {offer.arena}, and got none with it; push again"
            )
        if remote.nbytes < nbytes:
            raise TransferFailed(f"the arena has {remote.nbytes} bytes, but its buckets take {nbytes}")

    def reads(self, arena: str, request: UpdateRequest, subset: Subset, stage: torch.Tensor | None) -> Transfers:
        """The READs that fill ``stage``, or this link's own two buckets; those of an earlier push if they fit."""
        self.moving = True
        size, slots, layout = request.bucket_bytes, request.slots, subset.layout
        memory = self.memory(request, stage)
        key = (arena, memory.data_ptr(), layout.nbytes if stage is not None else -layout.nbytes, size, subset.name)
        found = self._reads.pop(key, None)
        if found is None:
            self._release(set(list(self._reads)[: max(0, len(self._reads) - KEPT + 1)]))
            self._register(memory)
            here = IN_FLIGHT if stage is None else layout.buckets(size)
            spans = spans_of(subset, size, slots, here)
            found = Transfers("READ", self._agent, self._arenas[arena], memory, spans)
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
        """Register ``memory``, and return the handle with which the trainer writes to it."""
        self.moving = True
        while len(self._registered) > KEPT:
            self._agent.deregister(self._registered.pop(next(iter(self._registered)))[0])
        self._register(memory)
        return self._agent.handle(memory)

    def arrived(self) -> None:
        """Note that the whole stream is here."""
        self.moving = False

    def notifications(self) -> list[bytes]:
        """The trainer's notifications since the last call, once the connection is warm; also drives its WRITEs."""
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
        """Release everything but the agent."""
        self._warming.end()
        self._release(set(self._reads))
        while self._registered:
            self._agent.deregister(self._registered.popitem()[1][0])
        self._agent.forget(self._trainer)
        self._arenas.clear()
        self._own.clear()
