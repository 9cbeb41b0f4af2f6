"""Across hosts by broadcast: one process group of the trainer and every rank of every engine; NCCL on GPUs, gloo else.

A group that a peer has left is of no use to anybody; it is dropped, and the next push makes a new one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket as sockets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, WeightSyncError
from weightsync.memory.arenas import Arena
from weightsync.memory.cuda_ipc import device_uuid
from weightsync.protocol import http
from weightsync.protocol.control import Offer
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import check_ways, host_of, local_address
from weightsync.transports.control.trainer import PushSession, TrainerControl
from weightsync.transports.nccl import groups, parallel_broadcast
from weightsync.transports.nccl.groups import Group
from weightsync.transports.nccl.messages import InitNcclGroup

NAME: Final = "nccl"


class NcclTrainerEnd:
    """Trainer end, see `base.TrainerEnd`; rank 0 of the group. ``device`` is where the arena is, ``address`` this
    host's own by which the ranks find it, if not that on the way to each."""

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self._device, self._helpers, self._given = device, helpers, address
        self._control = TrainerControl(remote=True, address=address)
        self.address, self.request = self._control.address, self._control.request
        self._group: Group | None = None
        self._asked: InitNcclGroup | None = None
        self._store: Any = None
        #: Who is in the group: each engine's instance by URL.
        self._known: dict[str, str] = {}
        self._names: list[str] = []
        self._here = ""
        #: The broadcasts of the last push.
        self._works: list[Any] = []

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """See `base.TrainerEnd`. Any change of who takes part makes a new group."""
        instances = {url: hello.instance for url, hello in engines.items()}
        if self._group is not None and instances == self._known:
            return {}
        self._leave()
        named = [(f"rank {rank.rank} of {url}", rank) for url, hello in engines.items() for rank in hello.ranks]
        on_gpus = self._device.type == "cuda" and all(rank.device == "cuda" for _, rank in named)
        if on_gpus:
            groups.preflight(groups.settings(), device_uuid(self._device), named)
        check_ways(self._given, engines)
        found = {self._given or local_address(host_of(url)) for url in engines}
        ways = sorted(found, key=lambda a: a.startswith(("127.", "::1")))
        self._here = ways[0]
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
        self._asked = InitNcclGroup(
            group_name=f"weightsync-{secrets.token_hex(8)}",
            master_address=self._here,
            master_port=port,
            rank_offset=1,
            world_size=1 + len(named),
            backend="nccl" if on_gpus else "gloo",
            timeout_s=timeout_s,
            members=members,
            senders=self._helpers.size if self._helpers is not None else 1,
        )
        asked: dict[str, Handshake] = {}
        offset = 1
        for url, count in members:
            asked[url] = msgspec.structs.replace(
                self._asked, rank_offset=offset, address=self.address(url), instance=instances[url]
            )
            offset += count
        self._known = instances
        return asked

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""
        if self._group is not None or self._asked is None:
            return
        helpers = self._helpers
        with _naming(lambda: helpers):
            try:
                if helpers is not None:
                    helpers.ask(NAME, http.to_json(parallel_broadcast.Make(self._asked)), deadline)
                look = (lambda: helpers.check(deadline)) if helpers is not None else (lambda: None)
                self._group = parallel_broadcast.make(self._store, self._asked, self._here, self._names, deadline, look)
                if helpers is not None:
                    helpers.answered("to join its group", deadline)
            except BaseException:
                self._leave()
                raise

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> BroadcastSending:
        """See `base.TrainerEnd`. Raises `TransferFailed` where the group has been left since `connected`."""
        if self._group is None:
            raise TransferFailed("the process group was left before the push began; push again")
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        sending = BroadcastSending(self._group, session, arenas[0], plan, layout, self._helpers, self._leave)
        self._works = sending.works
        return sending

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`; the group is one short."""
        if engine in self._known:
            self._leave()

    def forget(self) -> None:
        """See `base.TrainerEnd`."""
        self._works = []

    def _leave(self) -> None:
        if self._group is not None:
            self._group.drop(self._works)
        self._group = self._asked = self._store = None
        self._known, self._works = {}, []

    def close(self) -> None:
        """Leave the group, release the socket; idempotent."""
        self._leave()
        self._control.close()


class BroadcastSending:
    """See `base.Sending`; ``leave`` gives up the group, which is of no use to a rank that a broadcast has failed at."""

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
        #: By bucket; none for what is empty, or is broadcast by another rank of the trainer.
        self.works: list[Any] = []
        self._sent = -1
        #: How many ranks send.
        self._senders = 1

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        with self._naming():
            self._session.await_ranks(lambda _: Offer(push=self._plan.push, arena=self._group.name))
            if self._plan.stream:
                self._session.all_prepared("the ranks to be ready")

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        with self._naming():
            self._await_broadcasts(bucket - self._plan.slots)

    def announce(self, bucket: int, digests: Digests) -> None:
        """See `base.Sending`."""
        size, nbytes, deadline = self._plan.bucket_bytes, self._layout.nbytes, self._session.deadline
        with self._naming():
            if not bucket and (helpers := self._helpers) is not None and helpers.filled:
                self._senders = helpers.size
                helpers.ask(NAME, http.to_json(parallel_broadcast.Send(nbytes, size, deadline.left())), deadline)
                self._session.watch = lambda: helpers.check(deadline)
            sender = bucket % self._senders
            self._session.announce(bucket, digests, sender)
            slot = (bucket % self._plan.slots) * size
            data = self._arena.bytes[slot : slot + min(size, nbytes - bucket * size)]
            own = not sender and data.numel()
            self.works.append(self._group.broadcast(data, deadline.left()) if own else None)

    def _await_broadcasts(self, bucket: int) -> None:
        """Wait until rank 0's broadcasts of a bucket, and of all before it, have ended."""
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
                    gone = session.cancel(error) or session.without(number)
                    raise TransferFailed(
                        f"bucket {number} could not be broadcast to {', '.join(sorted(map(str, gone)))}: {error}"
                    ) from error
            self._sent += 1

    def finish(self) -> float:
        """See `base.Sending`."""
        last = len(self.works) - 1
        with self._naming():
            self._await_broadcasts(last)
            if self._plan.stream:
                self._session.all_taken(last)
            verify_s = self._session.all_prepared("the ranks to hold and verify everything")
            if self._helpers is not None and self._senders > 1:
                self._helpers.answered("to broadcast its part", self._session.deadline)
        return verify_s

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`; a rank may have part of a broadcast, and the group is of no use to it then."""
        self._session.cancel(error)
        self._leave()

    def _naming(self) -> contextlib.AbstractContextManager[None]:
        return _naming(lambda: self._helpers if self._senders > 1 else None)


@contextlib.contextmanager
def _naming(helping: Callable[[], PeerRanks | None]) -> Iterator[None]:
    """What goes wrong inside names the ranks of the trainer that are ``helping`` by then and do not run."""
    try:
        yield
    except WeightSyncError as error:
        told = helpers.blamed(error) if (helpers := helping()) is not None else error
        if told is error:
            raise
        raise told from error
