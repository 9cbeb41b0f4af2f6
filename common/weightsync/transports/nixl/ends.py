"""Across hosts by NIXL: every rank READs the buckets from the trainer's registered arena into its registered stage.

The trainer only answers: it says which bucket is full, and is notified by NIXL when a rank has read it. Where the way
is plain TCP, on which a READ keeps both sides busy and takes three times as long, the trainer WRITEs instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from threading import Event
from typing import Any, Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena
from weightsync.protocol import control, http
from weightsync.protocol.control import BucketDone, Offer
from weightsync.protocol.handles import NixlHandle
from weightsync.protocol.http import Handshake, RegisterNixl, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports import base
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.sockets import check_ways, interface_of, way_to
from weightsync.transports.control.trainer import PushSession, TrainerControl
from weightsync.transports.nixl.agents import SPIN_S, WARM, Agent, Transfers, WarmUp, spans_of
from weightsync.transports.nixl.incoming import IN_FLIGHT, Reading, Written
from weightsync.transports.nixl.nics import shares_memory
from weightsync.transports.nixl.writing import KEPT, Writer

#: How long a rank tries to connect before its first push.
_WARM_S: Final = 30.0


class Trainer:
    """Trainer end, see `base.TrainerEnd`. ``device`` is where the arena is, ``address`` as for `nccl.Trainer`."""

    def __init__(self, device: torch.device, _: PeerRanks | None = None, address: str = ""):
        self._device, self._given = device, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._agent = Agent(device, 0)
        #: What is registered, by the name of the arena.
        self._registered: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._agents: dict[str, Peer] = {}
        self._talk: PushSession | None = None
        self._plan: UpdateRequest | None = None
        self._writer = Writer(self._agent)
        #: Of this push, the buckets that each rank has read or needs not, and the last before which none is missing.
        self._ended: dict[Peer, set[int]] = {}
        self._read: dict[Peer, int] = {}
        self._last = 0

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """See `base.TrainerEnd`; an engine that was restarted is told again, the others are left alone."""
        asked: dict[str, Handshake] = {}
        check_ways(self._given, engines)
        for url, hello in engines.items():
            if self._known.get(url) != hello.instance:
                self._known.pop(url, None)
                asked[url] = RegisterNixl(
                    agent=self._agent.name,
                    metadata=self._agent.metadata(),
                    timeout_s=timeout_s,
                    address=self.address(url),
                    instance=hello.instance,
                    host=arenas.host_id(),
                    rdma=bool(self._agent.nic),
                )
        return asked

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`; returns once every rank has been heard of by NIXL itself, both ways."""
        silent: dict[str, Peer] = {}
        for url, reply in replies.items():
            self._agents = {agent: peer for agent, peer in self._agents.items() if peer.engine != url}
            silent.update({rank.agent: Peer(url, rank.rank) for rank in reply.ranks})
            for rank in reply.ranks:
                self._writer.drop(rank.agent)
                self._agent.forget(rank.agent)  # its end of an older connection is gone
                self._agent.know(rank.agent, rank.metadata, str(Peer(url, rank.rank)))
        self._agents.update(silent)
        while silent:
            deadline.check(f"{', '.join(sorted(map(str, silent.values())))} to be reached over NIXL")
            for agent in self._agent.notices().keys() & silent.keys():
                self._agent.notify(agent, WARM, str(silent.pop(agent)))
            time.sleep(SPIN_S)
        self._known.update({url: reply.instance for url, reply in replies.items()})

    def meet(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> None:
        """See `base.TrainerEnd`."""
        memory = {arena.name: arena.bytes for arena in arenas if isinstance(arena.bytes, torch.Tensor)}
        assert len(memory) == len(arenas), "only ranks on this host read parameters where they are"
        for name in memory.keys() - self._registered.keys():
            self._registered[name] = self._agent.register(memory[name])
        self._plan, self._last = plan, layout.buckets(plan.bucket_bytes) - 1
        self._read = {}
        alive, first = tuple(memory), arenas[0].name
        self._writer.begin(plan, layout, memory[first])
        self._talk = PushSession(self._control, plan.push, layout, peers, deadline)
        handle = self._agent.handle(memory[first])

        def offer(mapped: tuple[str, ...]) -> Offer:
            return Offer(push=plan.push, arena=first, handle=None if first in mapped else handle, alive=alive)

        self._talk.meet(offer)
        self._ended = {peer: parts.idle(plan.bucket_bytes) for peer, parts in self._talk.keeps.items()}
        if plan.stream:
            self._talk.all_prepared("the ranks to reach the arena")

    def _talking(self) -> PushSession:
        assert self._talk is not None, "meet() comes first"
        return self._talk

    def _taken(self, bucket: int) -> None:
        """Wait until every rank has a bucket: NIXL notifies."""
        talk = self._talking()

        def missing() -> set[Peer]:
            self._look()
            return talk.without(bucket)

        if bucket >= 0:
            talk.wait(missing, f"bucket {bucket} to arrive", SPIN_S)

    def _look(self) -> None:
        """Looking is also what keeps transfers going, while the trainer packs too."""
        talk, plan = self._talking(), self._plan
        assert plan is not None
        heard = list(self._agent.notices().items())
        while not self._writer.heard.empty():
            heard.append(self._writer.heard.get())
        for agent, notices in heard:
            for notice in notices:
                self._noticed(agent, notice, plan.push, talk)
        for peer, bucket in self._writer.arrived(talk.rooms, self._agents, talk.keeps).items():
            talk.taken(peer, bucket)

    def _noticed(self, agent: str, notice: bytes, push: str, talk: PushSession) -> None:
        peer = self._agents.get(agent)
        try:
            message = control.unpack_from_rank(notice)
        except msgspec.MsgspecError:
            return
        ended = self._ended.get(peer) if peer is not None else None
        if peer is not None and ended is not None and isinstance(message, BucketDone) and message.push == push:
            # READs that are under way together may end, and be told of, in any order.
            ended.add(message.index)
            while self._read.get(peer, -1) + 1 in ended:
                self._read[peer] = self._read.get(peer, -1) + 1
            talk.taken(peer, self._read.get(peer, -1))

    def acquire(self, bucket: int) -> None:
        """See `base.TrainerEnd`."""
        assert self._plan is not None
        self._look()
        self._taken(bucket - self._plan.slots)

    def keeps(self) -> Iterable[Subset]:
        """See `base.TrainerEnd`."""
        return self._talking().keeps.values()

    def announce(self, bucket: int, digests: Digests) -> None:
        """See `base.TrainerEnd`."""
        self._talking().announce(bucket, digests)
        self._writer.filled(bucket)
        self._look()

    def finish(self) -> float:
        """See `base.TrainerEnd`."""
        self._taken(self._last)
        seconds = self._talking().all_prepared("the ranks to hold and verify everything")
        self._writer.stop()
        return seconds

    def call_off(self, error: BaseException) -> None:
        """See `base.TrainerEnd`; the ranks give up their agents, and are to be introduced again."""
        self._writer.stop()
        if self._talk is not None:
            self._talk.call_off(error)
            for peer in self._talk.peers:
                self._known.pop(peer.engine, None)
            self._talk = None

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`."""
        self._known.pop(engine, None)

    def forget(self) -> None:
        """See `base.TrainerEnd`."""
        self._writer.forget()
        for registered in self._registered.values():
            self._agent.deregister(registered)
        self._registered.clear()

    def close(self) -> None:
        """Release registrations and socket; idempotent. The agent goes with its last reference."""
        self.forget()
        self._control.close()


class Engine:
    """Engine end, one a rank, see `base.EngineEnd`. ``device`` is where it receives."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        self._agent: Agent | None = None
        self._trainer = ""
        #: Whether the trainer writes to this rank, which otherwise reads.
        self._written = False
        #: Whether anything may be on its way into this rank's memory.
        self._moving = False
        self._warming: WarmUp | None = None
        #: The sender's arenas by name.
        self._arenas: dict[str, NixlHandle] = {}
        #: READs by arena, place and size of the stage, size of the buckets and what is kept, the latest last.
        self._reads: dict[tuple[str, int, int, int, str], Transfers] = {}
        #: What is registered, and the memory itself, by place and size.
        self._registered: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}
        self._own: list[torch.Tensor] = []

    def join(self, asked: Handshake, rank: int) -> http.RankJoined:
        """See `base.EngineEnd`."""
        if not isinstance(asked, RegisterNixl):
            raise UnsupportedOption(f"nixl has no use for {type(asked).__name__}")
        here = interface_of(way_to(rank, asked.address)) if asked.address else ""
        self._drop()
        if self._agent is None:
            self._agent = Agent(self._device, rank)
        agent = self._agent
        near = asked.host == arenas.host_id() and shares_memory()
        self._written = bool(asked.host) and not near and not (agent.nic and asked.rdma)
        agent.know(asked.agent, asked.metadata, f"the trainer's agent {asked.agent}")
        self._trainer = asked.agent
        self._warming = WarmUp(agent, asked.agent, min(asked.timeout_s, _WARM_S))
        return http.RankJoined(
            rank=rank, device=str(self._device), interface=agent.nic or here, agent=agent.name,
            metadata=agent.metadata(),
        )  # fmt: skip

    def meet(self, request: UpdateRequest, parts: Subset, rank: int, over: Event) -> base.Incoming:
        """See `base.EngineEnd`."""
        if self._agent is None or not self._trainer:
            raise TransferFailed(f"rank {rank} knows no NIXL agent: register_nixl comes before update_weights_via_nixl")
        layout = parts.layout
        call, offer = self._control.meet(request, parts, rank, tuple(self._arenas), over)
        if self._written:
            return Written(self, call, request, parts, offer.arena, rank)
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]
            self._release({key for key in self._reads if key[0] == name})
        if isinstance(offer.handle, NixlHandle):
            if offer.handle.agent != self._trainer:
                raise TransferFailed(f"the arena is of the agent {offer.handle.agent}, registered is {self._trainer}")
            with call.explained():
                self._agent.know(offer.handle.agent, offer.handle.metadata, "the trainer's agent")
            self._arenas[offer.arena] = offer.handle
        remote = self._arenas.get(offer.arena)
        if remote is None:
            raise TransferFailed(f"the arena {offer.arena} was never offered here; push again")
        if remote.nbytes < min(layout.nbytes, request.slots * request.bucket_bytes):
            raise TransferFailed(f"the arena holds {remote.nbytes} bytes, its buckets take more")
        return Reading(self, call, request, parts, offer.arena, rank)

    def reads(self, arena: str, request: UpdateRequest, parts: Subset, stage: torch.Tensor | None) -> Transfers:
        """The requests that fill ``stage``, or this end's own two buckets, made where they are not there yet."""
        assert self._agent is not None
        self._moving = True
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
        """Where buckets are brought: ``stage``, or this end's own two."""
        if stage is not None:
            return stage
        nbytes = IN_FLIGHT * request.bucket_bytes
        if not self._own or self._own[0].numel() != nbytes:
            self._own = [arenas.plain(nbytes, self._device)]
        return self._own[0]

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """What the trainer needs to write to ``memory``."""
        assert self._agent is not None
        self._moving = True
        while len(self._registered) > KEPT:
            self._agent.deregister(self._registered.pop(next(iter(self._registered)))[0])
        self._register(memory)
        return self._agent.handle(memory)

    def arrived(self) -> None:
        """All of the push is here."""
        self._moving = False

    def notices(self) -> list[bytes]:
        """What the trainer has sent since, once the connection is warm; looking brings in what it writes."""
        assert self._agent is not None
        if self._warming is not None and self._warming.is_alive():
            return []
        return self._agent.notices().get(self._trainer, [])

    def _register(self, memory: torch.Tensor) -> None:
        assert self._agent is not None
        place = (memory.data_ptr(), memory.numel())
        if place not in self._registered and memory.numel():
            self._registered[place] = self._agent.register(memory), memory

    def _release(self, keys: set[tuple[str, int, int, int, str]]) -> None:
        for key in keys:
            self._reads.pop(key).release()
        used = {(reads.memory.data_ptr(), reads.memory.numel()) for reads in self._reads.values()}
        for place in self._registered.keys() - used:
            assert self._agent is not None
            self._agent.deregister(self._registered.pop(place)[0])

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; what is still under way must find nobody, so the agent ends before its memory does."""
        self._control.fail(push, error)
        if not self._moving:
            return  # nor has the trainer cause to introduce itself again
        held = [memory for _, memory in self._registered.values()], list(self._own)
        self._drop()
        self._agent, self._moving = None, False
        del held

    def _cut(self) -> None:
        self._release(set(self._reads))
        if self._agent is not None:
            while self._registered:
                self._agent.deregister(self._registered.popitem()[1][0])
            if self._trainer:
                self._agent.forget(self._trainer)
        self._arenas.clear()
        self._own.clear()

    def _drop(self) -> None:
        if self._warming is not None:
            self._warming.end()
            self._warming = None
        self._cut()
        self._trainer, self._written = "", False

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.hang_up()
        self._drop()
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        self._drop()
        self._agent = None
        self._control.close()
