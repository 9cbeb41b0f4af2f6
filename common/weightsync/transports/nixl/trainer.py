"""The trainer end of the nixl transport: every rank READs the buckets from the trainer's arena into its stage.

The trainer announces each bucket, and NIXL notifies it when a rank has read one. Over plain TCP, where a READ keeps
both sides busy and takes three times as long, and to ranks on several hosts, which pass buckets on, the trainer WRITEs
instead. Of a trainer on several hosts, each has an agent, every rank takes what it needs from each, and tells rank 0
when it has a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.memory.arenas import Arena
from weightsync.protocol import control, http
from weightsync.protocol.control import BucketDone, Offer, WriteWindow
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors import digest
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import check_ways
from weightsync.transports.control.trainer import PushSession, TrainerControl
from weightsync.transports.nixl.agents import SPIN_S
from weightsync.transports.nixl.chain import Chain
from weightsync.transports.nixl.messages import HANDLE, EngineAgent, NixlHandle, RegisterNixl
from weightsync.transports.nixl.others import Others, Receiver
from weightsync.transports.nixl.sending import SendingHost, writes_of
from weightsync.transports.nixl.writing import Background, Writing


class NixlTrainerEnd:
    """Trainer end, see `base.TrainerEnd`.

    ``device`` is where the arena lies. ``address`` is the IP address of this host that ranks dial; by default the one
    on the route to each engine.
    """

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self._device, self._given_address = device, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._others = Others(helpers, on_gpu=device.type == "cuda")
        self._start()

    def _start(self) -> None:
        self.host = SendingHost(self._device, 0)
        #: By URL: the instance of the engine that was sent a handshake, the agents in it, and its ``several``.
        self._known: dict[str, tuple[str, tuple[str, ...], bool]] = {}
        self._offered: tuple[tuple[str, ...], bool] = (), False
        #: What engines said when they were opened, and the ranks that can pass on what is written to them.
        self._hellos: dict[str, http.OpenReply] = {}
        self._passing: set[Peer] = set()
        self._background: Background | None = None

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """See `base.TrainerEnd`; an engine that has restarted gets a new handshake, and all do after `forget`."""
        if self.host.agent.closed:
            self._start()
        self._others.expose(Deadline(timeout_s))
        own, others = self.host.described, tuple(exposed.sender for exposed in self._others.exposed.values())
        far = {rank.host or hello.host for hello in engines.values() for rank in hello.ranks} - {own.host}
        several = len(far) > 1
        self._offered = (own.agent, *(sender.agent for sender in others)), several
        handshakes: dict[str, Handshake] = {}
        check_ways(self._given_address, engines)
        for url, hello in engines.items():
            self._hellos[url] = hello
            if self._known.get(url) != (hello.instance, *self._offered):
                self._known.pop(url, None)
                handshakes[url] = RegisterNixl(
                    agent=own.agent,
                    metadata=own.metadata,
                    timeout_s=timeout_s,
                    address=self.address(url),
                    instance=hello.instance,
                    host=own.host,
                    rdma=own.rdma,
                    others=others,
                    several=several,
                )
        return handshakes

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`; returns once NIXL itself has carried a notification both ways with every rank."""
        ranks = [
            EngineAgent(rank.agent, rank.metadata, Peer(url, rank.rank))
            for url, reply in replies.items()
            for rank in reply.ranks
        ]
        with self._others.blaming():
            self._others.meet(ranks, deadline)
            self.host.meet(ranks, deadline, self._others.check)
            self._others.finished("to reach the engines over NIXL", deadline)
        for url, reply in replies.items():
            self._passing -= {peer for peer in self._passing if peer.engine == url}
            self._passing |= {Peer(url, rank.rank) for rank in reply.ranks if rank.written}
        self._known.update({url: (reply.instance, *self._offered) for url, reply in replies.items()})

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> NixlSending:
        """See `base.TrainerEnd`."""
        memory = {arena.name: arena.bytes for arena in arenas if isinstance(arena.bytes, torch.Tensor)}
        assert len(memory) == len(arenas), "parameters in place are for ranks that can map them"
        for stream in memory.values():
            self.host.register(stream)
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        self._stop()
        least = (http.PROTOCOL[0], control.PASS_ON_PARTS_MINOR if layout.table else 0)
        passing = {peer: self._hellos[peer.engine] for peer in peers & self._passing}
        hosts = {peer: hello.host for peer, hello in passing.items() if hello.protocol >= least}
        sending = NixlSending(self.host, self._others, self.disconnect, session, plan, layout, memory, hosts)
        self._background = sending.background
        return sending

    def _stop(self) -> None:
        if self._background is not None:
            self._background.stop()
            self._background = None

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`; the engine is sent a handshake again."""
        self._known.pop(engine, None)

    def forget(self) -> None:
        """See `base.TrainerEnd`; ends the agent: it could still serve a READ of a failed push, see `Agent.close`."""
        if self.host.is_used:
            self._end()

    def _end(self) -> None:
        self._stop()
        self.host.end()

    def close(self) -> None:
        """End the agent and close the socket; idempotent."""
        self._end()
        self._control.close()


class NixlSending:
    """See `base.Sending`. ``memory`` are the registered arenas by name; the stream goes through the first.

    ``disconnect`` has an engine, by URL, sent a handshake again. ``hosts`` are those of the ranks that can pass on what
    is written to them.
    """

    def __init__(
        self,
        host: SendingHost,
        others: Others,
        disconnect: Callable[[str], None],
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        memory: Mapping[str, torch.Tensor],
        hosts: Mapping[Peer, str],
    ):
        self._host, self._others, self._disconnect = host, others, disconnect
        self._session, self._plan, self._layout = session, plan, layout
        self._alive, self._arena = tuple(memory), next(iter(memory))
        self._memory = memory[self._arena]
        self._formed = False
        self._last = layout.buckets(plan.bucket_bytes) - 1
        #: The buckets that each rank has read or does not need, and the last one up to which none is missing.
        self._ended: dict[Peer, set[int]] = {}
        self._read: dict[Peer, int] = {}
        self._writing = Writing(plan.push)
        self.background = Background(self._writing, host.agent)
        self._handle = control.raw_handle(host.handle(self._memory))
        self._agents = {peer: agent for agent, peer in host.peers.items()}
        self._chain = Chain(session, plan, layout, self._digests, hosts, self._agents, self._supply)

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        others = [exposed.handle for exposed in self._others.exposed.values()] if self._layout.table else []
        handles = tuple(map(control.raw_handle, others))

        def offer(mapped: tuple[str, ...]) -> Offer:
            handle = control.NO_HANDLE if self._arena in mapped else self._handle
            return Offer(self._plan.push, self._arena, handle, self._alive, handles)

        self._session.await_ranks(offer)
        self._ended = {peer: subset.idle(self._plan.bucket_bytes) for peer, subset in self._session.needs.items()}
        if self._plan.stream:
            self._session.all_prepared("the ranks to reach the arena")

    def _await_bucket(self, bucket: int, *, everywhere: bool) -> None:
        """Wait until every rank has a bucket, or only those that get it from the trainer."""

        def missing() -> set[Peer]:
            self._poll()
            late = self._chain.late(self._session.without(bucket))
            return late if everywhere else {peer for peer in late if self._chain.is_direct(peer)}

        if bucket >= 0:
            self._session.wait(missing, f"bucket {bucket} to arrive", SPIN_S)

    def _poll(self) -> None:
        """Handle notifications; this also drives transfers, so it is called while the trainer packs too."""
        session, writing = self._session, self._writing
        received = list(self._host.agent.notifications().items())
        while not self.background.received.empty():
            received.append(self.background.received.get())
        for peer, window in session.windows.items():
            if writing.knows(peer):
                writing.allow(peer, window.upto)
            elif 0 in window.domains and self._formed and self._chain.is_direct(peer):
                self._write_to(peer)
        self.background.check()
        if self._layout.table:  # ranks say when they have a bucket: it comes from several hosts
            return
        for agent, notifications in received:
            for notification in notifications:
                self._handle_notification(self._host.peers.get(agent), notification)
        for peer, bucket in writing.arrived().items():
            if not self._chain.tells(peer):
                session.taken(peer, bucket)

    def _write_to(self, peer: Peer, first: int = 0) -> None:
        """Have a rank written to, from a bucket on. Raises `TransferFailed`."""
        plan, layout, subset, window = self._plan, self._layout, self._session.needs[peer], self._session.windows[peer]
        size, slots = plan.bucket_bytes, plan.slots
        handle = self._window(peer, window)
        depends_on = layout.name if layout.table else layout.nbytes, size, slots, window.slots, subset.name
        made = self._host.writer.transfers(
            handle, self._memory, lambda: writes_of(subset, size, slots, window.slots), depends_on, peer
        )
        self._writing.add(peer, made, window.upto, first)
        self.background.start()

    def _window(self, peer: Peer, window: WriteWindow) -> NixlHandle:
        """The memory that a rank offers. Raises `TransferFailed`."""
        handle = control.handle_of(window.handle, HANDLE, str(peer))
        if handle is None or self._host.peers.get(handle.agent) != peer:
            raise TransferFailed(f"{peer} offers memory of an agent that is not its own; push again")
        if handle.nbytes < min(self._layout.nbytes, window.slots * self._plan.bucket_bytes):
            raise TransferFailed(f"{peer} offers {handle.nbytes} bytes, fewer than its buckets take")
        return handle

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
        self._await_bucket(bucket - self._plan.slots, everywhere=False)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        with self._others.blaming():
            if not bucket:
                self._begin()
            self._session.announce(bucket, digests, begins=begins, buckets=self._chain.announced(bucket))
            self._writing.filled = bucket + 1
            self._poll()

    def _begin(self) -> None:
        session = self._session
        self._chain.form()
        if isinstance(self._layout, DividedLayout):
            self._serve(self._layout)
        self._formed = True

        def watch() -> None:
            self._others.check()
            self._chain.watch()

        session.watch = watch

    def _serve(self, layout: DividedLayout) -> None:
        """Have the trainer's other hosts send what they hold, once every rank has said how it gets that."""
        session, others = self._session, self._others
        session.wait(lambda: session.peers - session.windows.keys(), "the ranks to say who is to write to them")
        direct = [self._receiver(peer) for peer in session.windows if self._chain.is_direct(peer)]
        others.serve(self._plan, layout, direct, session.deadline)

    def _receiver(self, peer: Peer) -> Receiver:
        window, needs = self._session.windows[peer], self._session.needs[peer]
        handle = self._window(peer, window) if window.domains else None
        return Receiver(self._agents[peer], needs, handle, window.domains)

    def _supply(self, peer: Peer, first: int) -> None:
        """Have a rank written to that another one supplied, from a bucket on."""
        if 0 in self._session.windows[peer].domains:
            self._write_to(peer, first)
        if isinstance(self._layout, DividedLayout):
            self._others.serve(self._plan, self._layout, [self._receiver(peer)], self._session.deadline, first)

    def _digests(self, subsets: Mapping[str, Subset]) -> Callable[[int], Mapping[str, int]]:
        """A function that has the digests of a bucket that is filled, by the name of a subset."""
        plan, memory, layout, size = self._plan, self._memory, self._layout, self._plan.bucket_bytes
        if not isinstance(layout, DividedLayout):

            def own(bucket: int) -> dict[str, int]:
                moved = (bucket % plan.slots - bucket) * size
                cut = {
                    name: [(at + moved, nbytes) for at, nbytes in one.cut(size)[bucket]]
                    for name, one in subsets.items()
                }
                return {name: digest.digest_runs(plan.digest, memory, runs) for name, runs in cut.items()}

            return own
        others = self._others.digests(plan, layout, subsets, self._session.deadline)

        def all_hosts(bucket: int) -> dict[str, int]:
            found = {}
            for name, subset in subsets.items():
                mine = layout.needed(0, subset, size)[bucket]
                values = digest.digests(plan.digest, (memory[run.there :][: run.nbytes] for run in mine))
                pairs = [(run.at, value) for run, value in zip(mine, values, strict=True)]
                for domain, hashed in others.items():
                    runs = layout.needed(domain, subset, size)[bucket]
                    pairs += [(run.at, value) for run, value in zip(runs, hashed[name][bucket], strict=True)]
                found[name] = digest.joined([value for _, value in sorted(pairs)])
            return found

        return all_hosts

    def finish(self) -> float:
        """See `base.Sending`."""
        with self._others.blaming():
            self._await_bucket(self._last, everywhere=True)
            seconds = self._session.all_prepared("the ranks to hold and verify everything")
            self.background.stop()
            self._others.finished("to send what its host holds", self._session.deadline)
        for engine in self._chain.lingering:
            self._disconnect(engine)
        return seconds

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`; ranks end their agents, so their engines need a new handshake."""
        self.background.stop()
        self._others.cancelled()
        self._session.cancel(error)
        for peer in self._session.peers:
            self._disconnect(peer.engine)
