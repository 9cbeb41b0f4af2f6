"""Across hosts by NIXL: every rank READs the buckets from the trainer's registered arena into its registered stage.

The trainer only answers: it says which bucket is full, and is notified by NIXL when a rank has read it. Where the way
is plain TCP, on which a READ keeps both sides busy and takes three times as long, the trainer WRITEs instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena
from weightsync.protocol import control, http
from weightsync.protocol.control import BucketDone, Offer
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import check_ways
from weightsync.transports.control.trainer import PushSession, TrainerControl
from weightsync.transports.nixl.agents import SPIN_S, WARM, Agent
from weightsync.transports.nixl.messages import RegisterNixl
from weightsync.transports.nixl.writing import Writer

#: How long a rank tries to connect before its first push.
_WARM_S: Final = 30.0


class NixlTrainerEnd:
    """Trainer end, see `base.TrainerEnd`. ``device`` is where the arena is, ``address`` this host's own by which the
    ranks find it, if not that on the way to each."""

    def __init__(self, device: torch.device, _: PeerRanks | None = None, address: str = ""):
        self._device, self._given = device, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._agent = Agent(device, 0)
        #: What is registered, by the name of the arena.
        self._registered: dict[str, Any] = {}
        self._known: dict[str, str] = {}
        self._agents: dict[str, Peer] = {}
        self._session: PushSession | None = None
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
                self._agent.add_peer(rank.agent, rank.metadata, str(Peer(url, rank.rank)))
        self._agents.update(silent)
        while silent:
            deadline.check(f"{', '.join(sorted(map(str, silent.values())))} to be reached over NIXL")
            for agent in self._agent.notifications().keys() & silent.keys():
                self._agent.notify(agent, WARM, str(silent.pop(agent)))
            time.sleep(SPIN_S)
        self._known.update({url: reply.instance for url, reply in replies.items()})

    def await_ranks(
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
        self._session = PushSession(self._control, plan.push, layout, peers, deadline)
        handle = control.raw_handle(self._agent.handle(memory[first]))

        def offer(mapped: tuple[str, ...]) -> Offer:
            known = control.NO_HANDLE if first in mapped else handle
            return Offer(push=plan.push, arena=first, handle=known, alive=alive)

        self._session.await_ranks(offer)
        self._ended = {peer: parts.idle(plan.bucket_bytes) for peer, parts in self._session.needs.items()}
        if plan.stream:
            self._session.all_prepared("the ranks to reach the arena")

    def _pushing(self) -> PushSession:
        assert self._session is not None, "await_ranks() comes first"
        return self._session

    def _taken(self, bucket: int) -> None:
        """Wait until every rank has a bucket: NIXL notifies."""
        talk = self._pushing()

        def missing() -> set[Peer]:
            self._look()
            return talk.without(bucket)

        if bucket >= 0:
            talk.wait(missing, f"bucket {bucket} to arrive", SPIN_S)

    def _look(self) -> None:
        """Looking is also what keeps transfers going, while the trainer packs too."""
        talk, plan = self._pushing(), self._plan
        assert plan is not None
        heard = list(self._agent.notifications().items())
        while not self._writer.heard.empty():
            heard.append(self._writer.heard.get())
        for agent, notifications in heard:
            for notice in notifications:
                self._noticed(agent, notice, plan.push, talk)
        for peer, bucket in self._writer.arrived(talk.rooms, self._agents, talk.needs).items():
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

    def needs(self) -> Iterable[Subset]:
        """See `base.TrainerEnd`."""
        return self._pushing().needs.values()

    def announce(self, bucket: int, digests: Digests) -> None:
        """See `base.TrainerEnd`."""
        self._pushing().announce(bucket, digests)
        self._writer.filled(bucket)
        self._look()

    def finish(self) -> float:
        """See `base.TrainerEnd`."""
        self._taken(self._last)
        seconds = self._pushing().all_prepared("the ranks to hold and verify everything")
        self._writer.stop()
        return seconds

    def cancel(self, error: BaseException) -> None:
        """See `base.TrainerEnd`; the ranks give up their agents, and are to be introduced again."""
        self._writer.stop()
        if self._session is not None:
            self._session.cancel(error)
            for peer in self._session.peers:
                self._known.pop(peer.engine, None)
            self._session = None

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
