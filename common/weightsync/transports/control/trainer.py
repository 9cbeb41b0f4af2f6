"""The control messages of a push on the trainer's side, see `sockets`."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import zmq

from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout, TransferFailed, WeightSyncError
from weightsync.memory import forks
from weightsync.protocol import control, directories
from weightsync.protocol.control import (
    BucketDone,
    BucketReady,
    DescribeSubset,
    Failed,
    Heartbeat,
    Offer,
    Prepared,
    Register,
    WriteWindow,
)
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Peer, PeerRanks
from weightsync.transports.control.sockets import (
    FINAL_MESSAGE_S,
    LOOK_UP_S,
    SILENCE_S,
    Socket,
    close,
    enable_heartbeats,
    encrypt,
    host_of,
    listen,
    local_address,
    set_limits,
    to_error,
)

#: An empty mapping.
NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class TrainerControl:
    """The control socket of a trainer end.

    With ``remote`` it listens on TCP, otherwise on a private socket. ``address`` is the IP address of this host that
    ranks dial; by default the one on the route to each engine.
    """

    def __init__(self, *, remote: bool, address: str = ""):
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket: Socket = self._context.socket(zmq.ROUTER)
        set_limits(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._remote, self._given = remote, address
        #: ZMQ addresses, by the address of this host that engines dial; "" for the private socket.
        self._addresses: dict[str, str] = {}
        self._directories: list[Path] = []
        self._listening: list[int] = []
        self._server_key = ""
        if remote:
            self._server_key = encrypt(self.socket)
            enable_heartbeats(self.socket)
        self._push = ""
        self._secrets: dict[str, str] = {}
        #: The subsets that the ranks of the latest push need, by name.
        self.subsets: dict[str, Subset] = {}
        self.close = weakref.finalize(
            self, _close_trainer, self._context, self.socket, self._directories, self._listening, os.getpid()
        )
        if not remote:
            self.address("")

    def address(self, engine: str) -> str:
        """The ZMQ address at which the ranks of the engine at this URL reach the trainer."""
        if not self._remote:
            # Login managers remove a user's files in shared memory at logout, so the directory may have to be replaced.
            if not self._directories or not self._directories[-1].exists():
                self._directories.append(directories.private_directory())
                self._addresses[""] = self._listen(
                    sockets.AF_UNIX, str(self._directories[-1] / directories.SOCKET_NAME)
                )
            return self._addresses[""]
        here = self._given or local_address(host_of(engine))
        if here not in self._addresses:
            family = sockets.AF_INET6 if ":" in here else sockets.AF_INET
            self.socket.setsockopt(zmq.IPV6, int(family == sockets.AF_INET6))
            self._addresses[here] = self._listen(family, (here, 0))
        return self._addresses[here]

    def _listen(self, family: sockets.AddressFamily, place: str | tuple[str, int]) -> str:
        address, descriptor = listen(self.socket, family, place)
        self._listening.append(descriptor)
        return address

    def request(self, plan: UpdateRequest, engine: str) -> UpdateRequest:
        """The request that makes an engine's ranks connect: ``plan`` with this socket's address and a secret."""
        if plan.push != self._push:
            self._push, self._secrets = plan.push, {}  # secrets of an earlier push are void
        secret = secrets.token_urlsafe(24)
        self._secrets[secret] = engine
        return msgspec.structs.replace(plan, address=self.address(engine), secret=secret, server_key=self._server_key)

    def engine_of(self, secret: str) -> str:
        """The URL of the engine that was sent this secret; empty if none was."""
        return self._secrets.get(secret, "")


def _close_trainer(
    context: zmq.Context[Socket], socket: Socket, created: list[Path], listening: list[int], owner: int
) -> None:
    if os.getpid() != owner:
        return  # a forked child, such as a data loader's worker, must not close what belongs to its parent
    for descriptor in listening:
        forks.disown(descriptor)  # the socket closes them
    close(context, [socket], FINAL_MESSAGE_S)
    for directory in created:
        directories.remove(directory)


class PushSession:
    """One push on the trainer's side: sends messages about it to ``peers`` and tracks their answers."""

    def __init__(self, control: TrainerControl, push: str, layout: Layout, peers: set[Peer], deadline: Deadline):
        self._control, self._push, self.peers, self.deadline = control, push, peers, deadline
        self._everything, self._previous, control.subsets = Subset(layout, {}), control.subsets, {}
        #: The subset that each connected rank needs.
        self.needs: dict[Peer, Subset] = {}
        self._identity: dict[Peer, bytes] = {}
        self._peer: dict[bytes, Peer] = {}
        self._mapped: dict[Peer, tuple[str, ...]] = {}
        self._taken = dict.fromkeys(peers, -1)
        self._prepared: dict[Peer, float] = {}
        #: The window in each rank's memory that the trainer may write to; empty where ranks read.
        self.windows: dict[Peer, WriteWindow] = {}
        #: Called regularly during a wait; raises if there is no point in waiting on.
        self.watch: Callable[[], None] = lambda: None

    def await_ranks(self, offer: Callable[[tuple[str, ...]], Offer]) -> None:
        """Wait until every rank has registered, then send each its offer.

        ``offer`` makes it from the names of the arenas that the rank has mapped. Raises `TransferFailed` or
        `PushTimeout`, naming the ranks.
        """
        self.wait(lambda: self.peers - self._identity.keys(), "the ranks to connect")
        for peer in self._identity:
            self.tell(peer, offer(self._mapped[peer]))

    def announce(
        self,
        index: int,
        digests: Digests,
        sender: int = 0,
        begins: tuple[int, ...] = (),
        buckets: Mapping[str, int] = NOTHING,
    ) -> None:
        """Tell every rank that a bucket is ready, in which the tensors ``begins`` begin, see `control.BucketReady`.

        ``sender`` is the number of the trainer rank that sends it. ``buckets`` has the digests of the bucket itself, by
        the name of a subset.
        """
        self.deadline.check(f"bucket {index} to be packed")
        for peer in self.peers:
            needed = digests.get(self.needs[peer].name, ())
            whole = buckets.get(self.needs[peer].name)
            self.tell(peer, BucketReady(self._push, index, needed, sender, begins, whole))

    def taken(self, peer: Peer, index: int) -> None:
        """Record that a rank no longer needs a bucket, nor any before it."""
        if peer in self._taken:
            self._taken[peer] = max(self._taken[peer], index)

    def all_taken(self, index: int) -> None:
        """Wait until every rank has taken a bucket; at once for a negative index."""
        if index >= 0:
            self.wait(lambda: self.without(index), f"bucket {index} to be taken")

    def all_prepared(self, what: str) -> float:
        """Wait until every rank is prepared, called ``what`` in errors; the slowest verification, in seconds."""
        self.wait(self.unprepared, what)
        return max(self._prepared.values(), default=0.0)

    def unprepared(self) -> set[Peer]:
        """The ranks that have not reported that they are prepared."""
        return self.peers - self._prepared.keys()

    def last_taken(self, peer: Peer) -> int:
        """The last bucket that a rank has taken, with all before it; -1 for none."""
        return self._taken[peer]

    def without(self, index: int) -> set[Peer]:
        """The ranks that have not taken a bucket."""
        return {peer for peer in self.peers if self._taken[peer] < index}

    def cancel(self, error: BaseException) -> set[Peer]:
        """Tell every connected rank that the push is cancelled; returns the ranks that are gone."""
        gone = set()
        message = str(error) or type(error).__name__
        for peer in self._identity:
            try:
                self.tell(peer, Failed(push=self._push, error="TransferFailed", message=f"cancelled: {message}"))
            except TransferFailed:  # that rank is gone, which may be why the push is cancelled
                gone.add(peer)
        return gone

    def tell(self, peer: Peer, message: control.FromSender) -> None:
        """Send a message to a rank that has connected. Raises `TransferFailed` if it is gone."""
        try:
            self._control.socket.send_multipart([self._identity[peer], control.pack(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise TransferFailed(f"{peer} is gone: {error}") from error

    def wait(self, missing: Callable[[], set[Peer]], what: str, look_up_s: float = LOOK_UP_S) -> None:
        """Handle messages until ``missing()``, called at least every ``look_up_s`` seconds, is empty.

        Raises `PushTimeout`, naming ``what`` and the missing ranks, the error that a rank reports, `TransferFailed` if
        one is gone, and what ``watch`` raises.
        """
        probed = watched = time.monotonic()
        while absent := missing():
            if time.monotonic() - watched > LOOK_UP_S:
                watched = time.monotonic()
                self._watch(absent)
            if time.monotonic() - probed > SILENCE_S:
                probed = time.monotonic()
                for peer in absent & self._identity.keys():
                    self.tell(peer, Heartbeat(push=self._push))
            # Checked on every pass: a flood of meaningless messages must not hold it off.
            self.deadline.check(f"{what}; {_missing(absent)}")
            # Poll briefly: another thread may end the deadline early.
            self._handle_next(min(self.deadline.left(), look_up_s))

    def explain(self) -> None:
        """Raise the error that a rank reports, if one arrives soon.

        A transfer mostly breaks because a rank gave up, and its report may be slower than the broken connection.
        """
        # Not as long as the other ranks wait for this side's reason: what they report then is that it broke.
        until = Deadline(min(FINAL_MESSAGE_S / 2, self.deadline.left()))
        while left_s := until.left():
            self._handle_next(left_s)

    def _handle_next(self, timeout_s: float) -> None:
        """Handle a message, if one comes within the time."""
        poll_ms = int(timeout_s * 1000)
        if not self._control.socket.poll(poll_ms):
            if not poll_ms:
                time.sleep(timeout_s)
            return
        identity, frame = self._control.socket.recv_multipart(zmq.DONTWAIT)[:2]
        with contextlib.suppress(msgspec.MsgspecError):  # not from a peer: a silent peer runs into the deadline
            self._handle(identity, control.unpack_from_rank(frame))

    def _watch(self, absent: set[Peer]) -> None:
        try:
            self.watch()
        except PushTimeout as error:  # of another trainer rank, a moment before this one's; both waited for ``absent``
            error.args = (f"{error.message}; {_missing(absent)}",)
            raise

    def _handle(self, identity: bytes, message: control.FromRank) -> None:
        if message.push != self._push:
            return  # left over from a cancelled push
        if isinstance(message, Register):
            peer = Peer(self._control.engine_of(message.secret), message.rank)
            if peer in self.peers and peer not in self._identity and self._learn_subset(identity, peer, message):
                self._identity[peer] = identity
                self._peer[identity] = peer
                self._mapped[peer] = message.mapped
            return
        sender = self._peer.get(identity)
        if sender is None:
            return
        if isinstance(message, BucketDone):
            self.taken(sender, message.index)
        elif isinstance(message, Prepared):
            self._prepared[sender] = message.verify_s
        elif isinstance(message, WriteWindow):
            known = self.windows.get(sender)
            unchanged = known is not None and message.handle == control.NO_HANDLE
            handle = known.handle if known is not None and unchanged else message.handle
            self.windows[sender] = msgspec.structs.replace(message, handle=handle)
        else:
            raise to_error(message, str(sender))

    def _learn_subset(self, identity: bytes, peer: Peer, hello: Register) -> bool:
        """Record the subset that a rank needs. If its name is unknown, ask the rank to describe it; returns False."""
        subset = self._control.subsets.get(hello.keeps) or self._previous.get(hello.keeps)
        if not hello.keeps:
            subset = self._everything
        elif hello.parts is not None:
            try:
                boxes = {number: Box(*box) for number, box in hello.parts}
                subset = Subset(self._everything.layout, boxes)
            except ValueError as error:
                raise TransferFailed(f"{peer} needs parts that the push does not contain: {error}") from error
        layout = self._everything.layout
        if subset is None or (subset.layout is not layout and subset.layout.name != layout.name):
            with contextlib.suppress(zmq.ZMQError):  # the rank is gone; the deadline will report it
                self._control.socket.send_multipart([identity, control.pack(DescribeSubset(self._push))], zmq.DONTWAIT)
            return False
        # Ranks with equal subsets share one object, so that its runs are computed once.
        self.needs[peer] = self._control.subsets.setdefault(subset.name, subset)
        return True


def _missing(peers: set[Peer]) -> str:
    return f"still missing: {', '.join(sorted(map(str, peers)))}"


@contextlib.contextmanager
def blaming(helping: Callable[[], PeerRanks | None]) -> Iterator[None]:
    """Extend an error raised inside with the trainer ranks that have stopped, among those ``helping`` by then."""
    try:
        yield
    except WeightSyncError as error:
        extended = helpers.blamed(error) if (helpers := helping()) is not None else error
        if extended is error:
            raise
        raise extended from error
