"""The trainer end of the nixl transport: every rank READs the buckets from the trainer's arena into its stage.

The trainer announces each bucket, and NIXL notifies it when a rank has read one. Over plain TCP, where a READ keeps
both sides busy and takes three times as long, the trainer WRITEs instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

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


class NixlTrainerEnd:
    """Trainer end, see `base.TrainerEnd`.

    ``device`` is where the arena lies. ``address`` is the IP address of this host that ranks dial; by default the one
    on the route to each engine.
    """

    def __init__(self, device: torch.device, _: PeerRanks | None = None, address: str = ""):
        self._device, self._given_address = device, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._start()

    def _start(self) -> None:
        self.agent = Agent(self._device, 0)
        #: The registered arenas by name.
        self._registered: dict[str, torch.Tensor] = {}
        self._known: dict[str, str] = {}
        self.agents: dict[str, Peer] = {}
        self.writer = Writer(self.agent)

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """See `base.TrainerEnd`; an engine that has restarted gets a new handshake, and all do after `forget`."""
        if self.agent.closed:
            self._start()
        handshakes: dict[str, Handshake] = {}
        check_ways(self._given_address, engines)
        for url, hello in engines.items():
            if self._known.get(url) != hello.instance:
                self._known.pop(url, None)
                handshakes[url] = RegisterNixl(
                    agent=self.agent.name,
                    metadata=self.agent.metadata(),
                    timeout_s=timeout_s,
                    address=self.address(url),
                    instance=hello.instance,
                    host=arenas.host_id(),
                    rdma=bool(self.agent.nic),
                )
        return handshakes

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`; returns once NIXL itself has carried a notification both ways with every rank."""
        silent: dict[str, Peer] = {}
        for url, reply in replies.items():
            self.agents = {agent: peer for agent, peer in self.agents.items() if peer.engine != url}
            silent.update({rank.agent: Peer(url, rank.rank) for rank in reply.ranks})
            for rank in reply.ranks:
                self.writer.drop(rank.agent)
                self.agent.forget(rank.agent)  # an older connection has lost its other end
                self.agent.add_peer(rank.agent, rank.metadata, str(Peer(url, rank.rank)))
        self.agents.update(silent)
        while silent:
            deadline.check(f"{', '.join(sorted(map(str, silent.values())))} to be reached over NIXL")
            for agent in self.agent.notifications().keys() & silent.keys():
                self.agent.notify(agent, WARM, str(silent.pop(agent)))
            time.sleep(SPIN_S)
        self._known.update({url: reply.instance for url, reply in replies.items()})

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> NixlSending:
        """See `base.TrainerEnd`."""
        memory = {arena.name: arena.bytes for arena in arenas if isinstance(arena.bytes, torch.Tensor)}
        assert len(memory) == len(arenas), "parameters in place are for ranks that can map them"
        for name in memory.keys() - self._registered.keys():
            self.agent.register(memory[name])
            self._registered[name] = memory[name]
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        return NixlSending(self, session, plan, layout, memory)

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`; the engine is sent a handshake again."""
        self._known.pop(engine, None)

    def forget(self) -> None:
        """See `base.TrainerEnd`; ends the agent: it could still serve a READ of a failed push, see `Agent.close`."""
        if self._registered:
            self._end()

    def _end(self) -> None:
        self.writer.forget()
        self.agent.close(list(self._registered.values()))
        self._registered.clear()

    def close(self) -> None:
        """End the agent and close the socket; idempotent."""
        self._end()
        self._control.close()


class NixlSending:
    """See `base.Sending`. ``memory`` are the registered arenas by name; the stream goes through the first."""

    def __init__(
        self,
        end: NixlTrainerEnd,
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        memory: Mapping[str, torch.Tensor],
    ):
        self._end, self._session, self._plan = end, session, plan
        self._alive, self._arena = tuple(memory), next(iter(memory))
        self._last = layout.buckets(plan.bucket_bytes) - 1
        #: The buckets that each rank has read or does not need, and the last one up to which none is missing.
        self._ended: dict[Peer, set[int]] = {}
        self._read: dict[Peer, int] = {}
        self._writing = end.writer.begin(plan, layout, memory[self._arena])
        self._handle = control.raw_handle(end.agent.handle(memory[self._arena]))

    def await_ranks(self) -> None:
        """See `base.Sending`."""

        def offer(mapped: tuple[str, ...]) -> Offer:
            handle = control.NO_HANDLE if self._arena in mapped else self._handle
            return Offer(push=self._plan.push, arena=self._arena, handle=handle, alive=self._alive)

        self._session.await_ranks(offer)
        self._ended = {peer: subset.idle(self._plan.bucket_bytes) for peer, subset in self._session.needs.items()}
        if self._plan.stream:
            self._session.all_prepared("the ranks to reach the arena")

    def _await_bucket(self, bucket: int) -> None:
        """Wait until every rank has a bucket."""

        def missing() -> set[Peer]:
            self._poll()
            return self._session.without(bucket)

        if bucket >= 0:
            self._session.wait(missing, f"bucket {bucket} to arrive", SPIN_S)

    def _poll(self) -> None:
        """Handle notifications; this also drives transfers, so it is called while the trainer packs too."""
        writing, session = self._writing, self._session
        received = list(self._end.agent.notifications().items())
        while not writing.received.empty():
            received.append(writing.received.get())
        for agent, notifications in received:
            for notification in notifications:
                self._handle_notification(self._end.agents.get(agent), notification)
        for peer, bucket in writing.arrived(session.windows, self._end.agents, session.needs).items():
            session.taken(peer, bucket)

    def _handle_notification(self, peer: Peer | None, notification: bytes) -> None:
        try:
            message = control.unpack_from_rank(notification)
        except msgspec.MsgspecError:
            return
        ended = self._ended.get(peer) if peer is not None else None
        if peer is None or ended is None or not isinstance(message, BucketDone) or message.push != self._plan.push:
            return
        # READs under way together may end, and be notified, in any order.
        ended.add(message.index)
        while self._read.get(peer, -1) + 1 in ended:
            self._read[peer] = self._read.get(peer, -1) + 1
        self._session.taken(peer, self._read.get(peer, -1))

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        self._poll()
        self._await_bucket(bucket - self._plan.slots)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        self._session.announce(bucket, digests, begins=begins)
        self._writing.filled(bucket)
        self._poll()

    def finish(self) -> float:
        """See `base.Sending`."""
        self._await_bucket(self._last)
        seconds = self._session.all_prepared("the ranks to hold and verify everything")
        self._writing.stop()
        return seconds

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`; ranks end their agents, so their engines need a new handshake."""
        self._writing.stop()
        self._session.cancel(error)
        for peer in self._session.peers:
            self._end.disconnect(peer.engine)
