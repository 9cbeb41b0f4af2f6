"""The trainer's side of the conversation of a push, see `control`."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket as sockets
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import zmq

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
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
from weightsync.transports.base import Peer
from weightsync.transports.control.sockets import (
    FINAL_MESSAGE_S,
    LOOK_UP_S,
    SILENCE_S,
    Socket,
    beat,
    bracketed,
    close,
    host_of,
    limit,
    local_address,
    named,
)

#: Ranks that connect at one moment; ZMQ takes each at once.
_BACKLOG: Final = 1024


class TrainerControl:
    """The trainer's side; lives as long as its transport's trainer end. ``remote`` engines are on other hosts.

    ``address`` is this host's own, as a number, that they are told; by default that on the way to each.
    """

    def __init__(self, *, remote: bool, address: str = ""):
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket: Socket = self._context.socket(zmq.ROUTER)
        limit(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._remote, self._given = remote, address
        #: One for each of this host's addresses that engines see.
        self._addresses: dict[str, str] = {}
        self._directories: list[Path] = []
        self._listening: list[int] = []
        self._server_key = ""
        if remote:
            public, private = zmq.curve_keypair()
            self.socket.curve_server, self.socket.curve_secretkey = True, private
            beat(self.socket)
            self._server_key = public.decode()
        self._push = ""
        self._secrets: dict[str, str] = {}
        #: What ranks keep, by name, as far as they have said: those of the last push, and of the one before.
        self.kept: dict[str, Subset] = {}
        self.close = weakref.finalize(
            self, _close_trainer, self._context, self.socket, self._directories, self._listening, os.getpid()
        )
        if not remote:
            self.address("")

    def address(self, engine: str) -> str:
        """Where the ranks of the engine at this URL find the trainer."""
        if not self._remote:
            # Login managers remove what a user has in shared memory once it has logged out.
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
        """Have the socket listen at a place, by a descriptor of ours; the address of that."""

        def opened() -> int:
            with sockets.socket(family) as listening:
                listening.bind(place)
                listening.listen(_BACKLOG)
                return listening.detach()

        try:
            # A forked child that had it would go on saying that this trainer lives.
            descriptor = forks.own(opened)
        except OSError as error:
            raise TransferFailed(f"the trainer cannot listen at {place}: {error.strerror}") from error
        self._listening.append(descriptor)
        listening = sockets.socket(fileno=descriptor)
        name = listening.getsockname()
        listening.detach()
        address = f"ipc://{name}" if family == sockets.AF_UNIX else f"tcp://{bracketed(name[0])}:{name[1]}"
        self.socket.setsockopt(zmq.USE_FD, descriptor)
        self.socket.bind(address)
        return address

    def request(self, plan: UpdateRequest, engine: str) -> UpdateRequest:
        """The message that makes an engine's ranks come: ``plan`` with this socket's address and a secret."""
        if plan.push != self._push:
            self._push, self._secrets = plan.push, {}  # those of a push that was refused before it began
        secret = secrets.token_urlsafe(24)
        self._secrets[secret] = engine
        return msgspec.structs.replace(plan, address=self.address(engine), secret=secret, server_key=self._server_key)

    def who(self, secret: str) -> str:
        """The engine that was sent this secret; empty if none was."""
        return self._secrets.get(secret, "")


def _close_trainer(
    context: zmq.Context[Socket], socket: Socket, own: list[Path], listening: list[int], owner: int
) -> None:
    if os.getpid() != owner:
        return  # a forked child, of a data loader say, that forgets what is its parent's
    for descriptor in listening:
        forks.disown(descriptor)  # the socket closes them
    close(context, [socket], FINAL_MESSAGE_S)
    for directory in own:
        directories.remove(directory)


class PushSession:
    """One push, as the trainer speaks of it with ``peers``."""

    def __init__(self, control: TrainerControl, push: str, layout: Layout, peers: set[Peer], deadline: Deadline):
        self._control, self._push, self.peers, self.deadline = control, push, peers, deadline
        self._all, self._known, control.kept = Subset(layout, {}), control.kept, {}
        #: What each rank that has come keeps.
        self.needs: dict[Peer, Subset] = {}
        self._identity: dict[Peer, bytes] = {}
        self._peer: dict[bytes, Peer] = {}
        self._mapped: dict[Peer, tuple[str, ...]] = {}
        self._taken = dict.fromkeys(peers, -1)
        self._prepared: dict[Peer, float] = {}
        #: The ranks that are to be written to, and where.
        self.windows: dict[Peer, WriteWindow] = {}
        #: Called now and then while something is waited for: raises where that is in vain.
        self.watch: Callable[[], None] = lambda: None

    def await_ranks(self, offer: Callable[[tuple[str, ...]], Offer]) -> None:
        """Wait until every rank has said hello, then tell each where the bytes are; ``offer`` is given what it has."""
        self.wait(lambda: self.peers - self._identity.keys(), "the ranks to come for the bytes")
        for peer in self._identity:
            self._send(peer, offer(self._mapped[peer]))

    def announce(self, index: int, digests: Digests, lane: int = 0) -> None:
        """Tell every rank that a bucket is full; ``lane`` is the trainer's rank that sends it."""
        self.deadline.check(f"bucket {index} to be packed")
        for peer in self.peers:
            those = digests.get(self.needs[peer].name, ())
            self._send(peer, BucketReady(push=self._push, index=index, digests=those, lane=lane))

    def taken(self, peer: Peer, index: int) -> None:
        """A rank needs a bucket no more."""
        if peer in self._taken:
            self._taken[peer] = max(self._taken[peer], index)

    def all_taken(self, index: int) -> None:
        """Wait until every rank has taken a bucket."""
        if index >= 0:
            self.wait(lambda: self.without(index), f"bucket {index} to be taken")

    def all_prepared(self, what: str) -> float:
        """Wait until every rank has said so; the longest that one took to verify, in seconds."""
        self.wait(self.unprepared, what)
        return max(self._prepared.values(), default=0.0)

    def unprepared(self) -> set[Peer]:
        """The ranks that have not said that they hold everything."""
        return self.peers - self._prepared.keys()

    def without(self, index: int) -> set[Peer]:
        """The ranks that have not taken a bucket."""
        return {peer for peer in self.peers if self._taken[peer] < index}

    def cancel(self, error: BaseException) -> set[Peer]:
        """Tell the ranks that are listening that no more will come; returns those that are gone."""
        gone = set()
        message = str(error) or type(error).__name__
        for peer in self._identity:
            try:
                self._send(peer, Failed(push=self._push, error="TransferFailed", message=f"called off: {message}"))
            except TransferFailed:  # that rank is gone, which may be the very reason
                gone.add(peer)
        return gone

    def _send(self, peer: Peer, message: control.FromSender) -> None:
        try:
            self._control.socket.send_multipart([self._identity[peer], control.pack(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise TransferFailed(f"{peer} is gone: {error}") from error

    def wait(self, missing: Callable[[], set[Peer]], what: str, look_up_s: float = LOOK_UP_S) -> None:
        """Handle messages until ``missing()``, asked at least every ``look_up_s``, is empty."""
        looked = watched = time.monotonic()
        while absent := missing():
            if time.monotonic() - watched > LOOK_UP_S:
                watched = time.monotonic()
                self.watch()
            if time.monotonic() - looked > SILENCE_S:
                looked = time.monotonic()
                for peer in absent & self._identity.keys():
                    self._send(peer, Heartbeat(push=self._push))
            # Also where others keep us busy with messages of no meaning.
            self.deadline.check(f"{what}; still missing: {', '.join(sorted(map(str, absent)))}")
            # Not longer at once: somebody else may find out that waiting is in vain.
            look_ms = int(min(self.deadline.left(), look_up_s) * 1000)
            if not self._control.socket.poll(look_ms):
                if not look_ms:
                    time.sleep(look_up_s)
                continue
            identity, frame = self._control.socket.recv_multipart(zmq.DONTWAIT)[:2]
            with contextlib.suppress(msgspec.MsgspecError):  # not a peer; a peer's silence is caught by the deadline
                self._handle(identity, control.unpack_from_rank(frame))

    def _handle(self, identity: bytes, message: control.FromRank) -> None:
        if message.push != self._push:
            return  # left over from a push that was called off
        if isinstance(message, Register):
            peer = Peer(self._control.who(message.secret), message.rank)
            if peer in self.peers and peer not in self._identity and self._explained(identity, peer, message):
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
            again = known is not None and message.handle == control.NO_HANDLE
            handle = known.handle if known is not None and again else message.handle
            self.windows[sender] = msgspec.structs.replace(message, handle=handle)
        else:
            raise named(message, str(sender))

    def _explained(self, identity: bytes, peer: Peer, hello: Register) -> bool:
        """Whether what a rank keeps is known; it is asked where it is not."""
        parts = self._control.kept.get(hello.keeps) or self._known.get(hello.keeps)
        if not hello.keeps:
            parts = self._all
        elif hello.parts is not None:
            try:
                boxes = {number: Box(*box) for number, box in hello.parts}
                parts = Subset(self._all.layout, boxes)
            except ValueError as error:
                raise TransferFailed(f"{peer} keeps what was not sent: {error}") from error
        layout = self._all.layout
        if parts is None or (parts.layout is not layout and parts.layout.name != layout.name):
            with contextlib.suppress(zmq.ZMQError):  # it is gone, which the deadline tells
                self._control.socket.send_multipart([identity, control.pack(DescribeSubset(self._push))], zmq.DONTWAIT)
            return False
        # Equal ones are one, of which the pieces are counted once.
        self.needs[peer] = self._control.kept.setdefault(parts.name, parts)
        return True
