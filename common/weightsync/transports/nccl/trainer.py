"""The trainer end of the nccl transport: broadcast in one process group of the trainer and every engine rank.

The backend is NCCL if all are on GPUs, otherwise gloo. A group that a rank has left cannot be used again: it is
dropped, and the next push makes a new one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket as sockets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.memory.arenas import Arena
from weightsync.memory.cuda_ipc import device_uuid
from weightsync.protocol import http
from weightsync.protocol.control import Offer
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import check_ways, host_of, local_address
from weightsync.transports.control.trainer import PushSession, TrainerControl, blaming
from weightsync.transports.nccl import groups, parallel_broadcast
from weightsync.transports.nccl.findings import NAME
from weightsync.transports.nccl.groups import Group
from weightsync.transports.nccl.messages import InitNcclGroup


class NcclTrainerEnd:
    """Trainer end, see `base.TrainerEnd`; rank 0 of the group.

    ``device`` is where the arena lies. ``address`` is the IP address of this host that ranks dial; by default the one
    on the route to each engine.
    """

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self._device, self._helpers, self._given_address = device, helpers, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._group: Group | None = None
        self._init: InitNcclGroup | None = None
        self._store: Any = None
        #: The engines in the group: instance by URL.
        self._known: dict[str, str] = {}
        self._names: list[str] = []
        self._here = ""
        #: The broadcasts of the last push.
        self._works: list[Any] = []

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """See `base.TrainerEnd`; any change of the engines makes a new group."""
        instances = {url: hello.instance for url, hello in engines.items()}
        if self._group is not None and instances == self._known:
            return {}
        self._leave()
        named = [(f"rank {rank.rank} of {url}", rank) for url, hello in engines.items() for rank in hello.ranks]
        on_gpus = self._device.type == "cuda" and all(rank.device == "cuda" for _, rank in named)
        if on_gpus:
            groups.preflight(groups.settings(), device_uuid(self._device), named)
        check_ways(self._given_address, engines)
        others = filter(None, self._helpers.addresses if self._helpers is not None else ())
        found = {self._given_address or local_address(host) for host in (*map(host_of, engines), *others)}
        # A loopback address only if there is no other; of several always the same.
        self._here = min(found, key=lambda address: (address.startswith(("127.", "::1")), address))
        family = sockets.AF_INET6 if ":" in self._here else sockets.AF_INET
        listening = sockets.create_server((self._here, 0), family=family, backlog=1024)
        port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(
            self._here,
            port,
            None,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        members = tuple((url, len(hello.ranks)) for url, hello in engines.items())
        self._names = [name for name, _ in named]
        self._init = InitNcclGroup(
            group_name=f"weightsync-{secrets.token_hex(8)}",
            master_address=self._here,
            master_port=port,
            rank_offset=1,
            world_size=1 + len(named),
            backend="nccl" if on_gpus else "gloo",
            timeout_s=timeout_s,
            members=members,
            senders=len(self._helpers.senders) if self._helpers is not None else 1,
        )
        handshakes: dict[str, Handshake] = {}
        offset = 1
        for url, count in members:
            handshakes[url] = msgspec.structs.replace(
                self._init, rank_offset=offset, address=self.address(url), instance=instances[url]
            )
            offset += count
        self._known = instances
        return handshakes

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""
        if self._group is not None or self._init is None:
            return
        helpers = self._helpers
        with blaming(lambda: helpers):
            try:
                if helpers is not None:
                    init, senders = self._init, enumerate(helpers.senders)
                    asked = {rank: parallel_broadcast.Make(init, number) for number, rank in senders if rank}
                    helpers.ask(NAME, {rank: http.to_json(make) for rank, make in asked.items()})
                watch = helpers.check if helpers is not None else (lambda: None)
                self._group = parallel_broadcast.make(self._store, self._init, self._here, self._names, deadline, watch)
                if helpers is not None:
                    helpers.answered("to join its group", deadline)
            except BaseException:
                self._leave()
                raise

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> BroadcastSending:
        """See `base.TrainerEnd`. Raises `TransferFailed` if the group has been left since `connected`."""
        if self._group is None:
            raise TransferFailed("the process group was left before the push began; push again")
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        sending = BroadcastSending(self._group, session, arenas[0], plan, layout, self._helpers, self._leave)
        self._works = sending.works
        return sending

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`; drops the group, which the engine has left."""
        if engine in self._known:
            self._leave()

    def forget(self) -> None:
        """See `base.TrainerEnd`."""
        self._works = []

    def _leave(self) -> None:
        if self._group is not None:
            self._group.drop(self._works)
        self._group = self._init = self._store = None
        self._known, self._works = {}, []

    def close(self) -> None:
        """Leave the group and release the socket; idempotent."""
        self._leave()
        self._control.close()


class BroadcastSending:
    """See `base.Sending`; ``leave`` drops the group, which cannot be used again after a failed broadcast."""

    def __init__(
        self,
        group: Group,
        session: PushSession,
        arena: Arena,
        plan: UpdateRequest,
        layout: Layout,
        helpers: PeerRanks | None,
        leave: Callable[[], None],
    ):
        self._group, self._session, self._arena, self._plan, self._layout = group, session, arena, plan, layout
        self._helpers, self._leave = helpers, leave
        #: torch's ``Work`` of each bucket; None for an empty bucket and for one that another trainer rank broadcasts.
        self.works: list[Any] = []
        #: The last bucket known to have been sent, with all before it.
        self._sent = -1
        #: How many trainer ranks send, and what this one does, by bucket: everything if it is None.
        self._senders = 1
        self._own: dict[int, parallel_broadcast.Place] | None = None

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        with self._blaming():
            self._session.await_ranks(lambda _: Offer(push=self._plan.push, arena=self._group.name))
            if self._plan.stream:
                self._session.all_prepared("the ranks to be ready")

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        with self._blaming():
            self._await_broadcasts(bucket - self._plan.slots)

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        session = self._session
        with self._blaming():
            if not bucket:
                self._begin()
            session.announce(bucket, digests, bucket % self._senders, begins)
            self.works.append(self._broadcast(bucket))

    def _begin(self) -> None:
        """Have the trainer's other ranks send too, if they can."""
        helpers, plan, deadline = self._helpers, self._plan, self._session.deadline
        # Of several domains only those that have a part of the stream can send, and of changes rank 0 alone.
        has = helpers is not None and helpers.filled and (helpers.in_one_domain or self._layout.table)
        if helpers is None or not has or plan.delta is not msgspec.UNSET:
            return
        self._senders = len(helpers.senders)
        asked = {
            rank: parallel_broadcast.places(self._layout, plan.bucket_bytes, number, self._senders)
            for number, rank in enumerate(helpers.senders)
        }
        self._own = {place.number: place for place in asked.pop(0)}
        messages = {rank: parallel_broadcast.Send(own, deadline.left()) for rank, own in asked.items()}
        helpers.ask(NAME, {rank: http.to_json(send) for rank, send in messages.items()})
        self._session.watch = helpers.check

    def _broadcast(self, bucket: int) -> Any:
        """Start to broadcast this rank's part of a bucket; None if there is none."""
        size, deadline = self._plan.bucket_bytes, self._session.deadline
        if self._own is not None:
            place = self._own.get(bucket)
            start, end = place[1:] if place is not None else (0, 0)
        else:
            start = (bucket % self._plan.slots) * size
            end = start + min(size, self._layout.nbytes - bucket * size)
        return self._group.broadcast(self._arena.bytes[start:end], deadline.left()) if start < end else None

    def _await_broadcasts(self, bucket: int) -> None:
        """Wait until rank 0 has broadcast a bucket and all before it; other trainer ranks are not checked."""
        session = self._session
        while self._sent < bucket:
            work, number = self.works[self._sent + 1], self._sent + 1
            if work is not None:
                session.wait(
                    lambda: set() if work.is_completed() else session.without(number),  # noqa: B023 - called here
                    f"bucket {number} to be broadcast",
                    parallel_broadcast.LOOK_S,
                )
                try:
                    work.wait()
                except RuntimeError as error:
                    session.explain()
                    gone = session.cancel(error) or session.without(number)
                    raise TransferFailed(
                        f"bucket {number} could not be broadcast to {', '.join(sorted(map(str, gone)))}: {error}"
                    ) from error
            self._sent += 1

    def finish(self) -> float:
        """See `base.Sending`."""
        last = len(self.works) - 1
        with self._blaming():
            self._await_broadcasts(last)
            if self._plan.stream:
                self._session.all_taken(last)
            verify_s = self._session.all_prepared("the ranks to hold and verify everything")
            if self._helpers is not None and self._senders > 1:
                self._helpers.answered("to broadcast its part", self._session.deadline)
        return verify_s

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`; drops the group, in which ranks may be left with unfinished broadcasts."""
        self._session.cancel(error)
        self._leave()

    def _blaming(self) -> contextlib.AbstractContextManager[None]:
        return blaming(lambda: self._helpers if self._senders > 1 else None)
