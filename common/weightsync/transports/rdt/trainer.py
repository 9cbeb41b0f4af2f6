"""The trainer end of the rdt transport: it shows its arena, and every rank reads the buckets from there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
from weightsync.transports.nixl.agents import SPIN_S
from weightsync.transports.rdt import compat


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
        self._sending: RdtSending | None = None

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """No engine needs a handshake: agents connect when a rank reads."""
        check_ways(self._given_address, engines)
        if self._direct is None:
            self._direct = compat.Direct("the trainer", in_cluster=True)
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
        self._sending = RdtSending(session, plan, layout, direct, arenas[0].name, memory[arenas[0].name])
        return self._sending

    def _end_push(self) -> None:
        if self._sending is not None:
            self._sending.shown.end()
            self._sending = None

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`."""

    def forget(self) -> None:
        """See `base.TrainerEnd`; ends the agent: it could still serve a READ of a failed push."""
        self._end_push()
        if self._registered:
            self._end()
        self._registered.clear()

    def _end(self) -> None:
        if self._direct is not None:
            self._direct.end()
            self._direct = None

    def close(self) -> None:
        """End the agent and close the socket; idempotent."""
        self.forget()
        self._end()
        self._control.close()


class RdtSending:
    """See `base.Sending`. The stream goes through ``memory``, that of ``arena``."""

    def __init__(
        self,
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        direct: compat.Direct,
        arena: str,
        memory: torch.Tensor,
    ):
        self._session, self._plan, self._direct, self._arena = session, plan, direct, arena
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
        self._await_bucket(bucket - self._plan.slots)

    def _await_bucket(self, bucket: int) -> None:
        """Wait until every rank has read a bucket, and serve READs meanwhile."""

        def missing() -> set[Peer]:
            self._direct.drive()
            return self._session.without(bucket)

        if bucket >= 0:
            self._session.wait(missing, f"bucket {bucket} to be read", SPIN_S)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        self._session.announce(bucket, digests, begins=begins)
        self._direct.drive()

    def finish(self) -> float:
        """See `base.Sending`."""
        self._await_bucket(self._last)
        seconds = self._session.all_prepared("the ranks to hold and verify everything")
        self.shown.end()
        return seconds

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`."""
        self._session.cancel(error)
        self.shown.end()
