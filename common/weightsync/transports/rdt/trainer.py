"""The trainer end of the rdt transport: it shows its arena, and every rank reads the buckets from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch

from weightsync.deadline import Deadline
from weightsync.memory.arenas import Arena
from weightsync.protocol import control, http
from weightsync.protocol.control import Offer
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import check_ways
from weightsync.transports.control.trainer import PushSession, TrainerControl
from weightsync.transports.rdt import compat

#: By rank and instance of its engine: arenas that it may still be reading for pushes that failed. Over TCP this process
#: reads them for it, at any time until that connection is gone, and would crash if they were.
_read: Final[dict[tuple[Peer, str], list[torch.Tensor]]] = {}


class RdtTrainerEnd:
    """Trainer end, see `base.TrainerEnd`.

    ``address`` is the IP address of this host that ranks dial; by default the one on the route to each engine.
    """

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self._given_address = address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._direct: compat.Direct | None = None
        #: Registered arenas by name.
        self._registered: dict[str, torch.Tensor] = {}
        #: The instances of the engines, by URL.
        self._instances: dict[str, str] = {}
        self._sending: RdtSending | None = None

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """No engine needs a handshake: Ray's agents connect when a rank reads."""
        self._direct = compat.Direct("the trainer", in_cluster=True)
        check_ways(self._given_address, engines)
        for url, hello in engines.items():
            self._instances[url] = hello.instance
            for gone in [(peer, of) for peer, of in _read if peer.engine == url and of != hello.instance]:
                _read.pop(gone, None)
        return {}

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> RdtSending:
        """See `base.TrainerEnd`."""
        direct = self._direct
        assert direct is not None, "connect comes first"
        memory = {arena.name: arena.bytes for arena in arenas if isinstance(arena.bytes, torch.Tensor)}
        assert len(memory) == len(arenas), "parameters in place are for ranks that can map them"
        for name in self._registered.keys() - memory.keys():
            direct.deregister(self._registered.pop(name))
        for name in memory.keys() - self._registered.keys():
            direct.register(memory[name])
            self._registered[name] = memory[name]
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        self._end_push()
        self._sending = RdtSending(
            session, plan, layout, direct, arenas[0].name, memory[arenas[0].name], self._instances
        )
        return self._sending

    def _end_push(self) -> None:
        if self._sending is not None:
            self._sending.shown.end()
            self._sending = None

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`."""

    def forget(self) -> None:
        """See `base.TrainerEnd`; what a rank may still be reading stays in memory."""
        self._end_push()
        while self._registered and self._direct is not None:
            self._direct.deregister(self._registered.popitem()[1])

    def close(self) -> None:
        """Release everything; idempotent."""
        self.forget()
        self._control.close()


class RdtSending:
    """See `base.Sending`. The stream goes through ``memory``, that of ``arena``; ``instances`` are of the engines."""

    def __init__(
        self,
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        direct: compat.Direct,
        arena: str,
        memory: torch.Tensor,
        instances: Mapping[str, str],
    ):
        self._session, self._plan, self._arena, self._memory = session, plan, arena, memory
        self._instances = instances
        self._last = layout.buckets(plan.bucket_bytes) - 1
        self.shown = direct.show(plan.push, memory)

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        handle = control.raw_handle(self.shown.handle)
        self._session.await_ranks(lambda _: Offer(push=self._plan.push, arena=self._arena, handle=handle))
        if self._plan.stream:
            self._session.all_prepared("the ranks to reach the arena")

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        self._session.all_taken(bucket - self._plan.slots)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        self._session.announce(bucket, digests, begins=begins)

    def finish(self) -> float:
        """See `base.Sending`."""
        self._session.all_taken(self._last)
        seconds = self._session.all_prepared("the ranks to hold and verify everything")
        self._end()
        return seconds

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`."""
        self._session.cancel(error)
        self._end()

    def _end(self) -> None:
        self.shown.end()
        for peer in self._session.needs:
            key, last = (peer, self._instances[peer.engine]), self._session.last_taken(peer)
            if last >= 0:  # before a rank reads for a push, what it read here for an earlier one has ended
                _read.pop(key, None)
            if last < self._last:
                _read.setdefault(key, []).append(self._memory)
