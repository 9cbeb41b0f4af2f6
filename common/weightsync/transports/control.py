"""The conversation of a push between a trainer end and the ranks, over ZMQ: small messages, never the bytes.

The trainer binds a ROUTER, every engine rank connects a DEALER. On one host the socket is a file in a private
directory; to other hosts it is TCP with CURVE, whose public key travels in the authenticated request, so that both
sides know whom they talk to and nobody listens in.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket as sockets
import time
import weakref
from collections.abc import Callable
from threading import Event
from typing import Final
from urllib.parse import urlsplit

import msgspec
import psutil
import zmq

from weightsync import errors, frames, security, wire
from weightsync.errors import TransferFailed
from weightsync.frames import Failed, Filled, Hello, Offer, Prepared, Room, Still, Taken
from weightsync.transports.base import Deadline, Peer
from weightsync.wire import UpdateRequest

#: How long either side sleeps at most before it looks whether the push is over.
LOOK_UP_S: Final = 0.1
#: Ranks wait this much longer than the sender, which knows who is missing and should be the one to say so.
_GRACE_S: Final = 2.0
#: A message to a sender is a few bytes; if it cannot be queued at once, nobody is there.
_SEND_TIMEOUT_MS: Final = 5000
#: Who says nothing for so long may have died: its socket tells.
_SILENCE_S: Final = 1.0
#: TCP tells of a peer that is gone only when asked.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 10000

Socket = zmq.Socket[bytes]


def _limit(socket: Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)


def _close(context: zmq.Context[Socket], open_sockets: list[Socket]) -> None:
    # One by one: where the garbage collector calls, the context has forgotten them and would wait for them for ever.
    for socket in open_sockets:
        socket.close(linger=0)
    context.term()


def local_address(host: str) -> str:
    """This host's own address on the way to ``host``. Raises `TransferFailed` where there is no way."""
    try:
        family, kind, _, _, address = sockets.getaddrinfo(host, 9, type=sockets.SOCK_DGRAM)[0]
        with sockets.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:  # a name that cannot be one is a ValueError
        raise TransferFailed(f"there is no way from here to {host}: {error}") from error


def interface_of(address: str) -> str:
    """The network interface that has this address, as people read it."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return f"{name} ({address})"
    return address


def host_of(url: str) -> str:
    """The host of an engine's URL."""
    return urlsplit(url).hostname or ""


class TrainerControl:
    """The trainer's side; lives as long as its transport's trainer end. ``remote`` engines are on other hosts."""

    def __init__(self, *, remote: bool):
        self._context: zmq.Context[Socket] = zmq.Context()
        self.socket: Socket = self._context.socket(zmq.ROUTER)
        _limit(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._remote = remote
        #: One for each of this host's addresses that engines see.
        self._addresses: dict[str, str] = {}
        self._server_key = directory = ""
        if remote:
            public, private = zmq.curve_keypair()
            self.socket.curve_server, self.socket.curve_secretkey = True, private
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            self._server_key = public.decode()
        else:
            directory = str(security.private_directory())
            self._addresses[""] = f"ipc://{directory}/{security.SOCKET_NAME}"
            self.socket.bind(self._addresses[""])
        self._push = ""
        self._secrets: dict[str, str] = {}
        self.close = weakref.finalize(self, _close_trainer, self._context, self.socket, directory, os.getpid())

    def address(self, engine: str) -> str:
        """Where the ranks of the engine at this URL find the trainer."""
        here = local_address(host_of(engine)) if self._remote else ""
        if here not in self._addresses:
            shown = f"[{here}]" if ":" in here else here
            self.socket.setsockopt(zmq.IPV6, int(":" in here))
            self.socket.bind(f"tcp://{shown}:*")
            self._addresses[here] = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self._addresses[here]

    def invite(self, plan: UpdateRequest, engine: str) -> UpdateRequest:
        """The message that makes an engine's ranks come: ``plan`` with this socket's address and a secret."""
        if plan.push != self._push:
            self._push, self._secrets = plan.push, {}  # those of a push that was refused before it began
        secret = secrets.token_urlsafe(24)
        self._secrets[secret] = engine
        return msgspec.structs.replace(plan, address=self.address(engine), secret=secret, server_key=self._server_key)

    def who(self, secret: str) -> str:
        """The engine that was sent this secret; empty if none was."""
        return self._secrets.get(secret, "")


def _close_trainer(context: zmq.Context[Socket], socket: Socket, directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child, of a data loader say, that forgets what is its parent's
    _close(context, [socket])
    if directory:
        shutil.rmtree(directory, ignore_errors=True)


class Talk:
    """One push, as the trainer speaks of it with ``peers``."""

    def __init__(self, control: TrainerControl, push: str, peers: set[Peer], deadline: Deadline):
        self._control, self._push, self.peers, self.deadline = control, push, peers, deadline
        self._identity: dict[Peer, bytes] = {}
        self._peer: dict[bytes, Peer] = {}
        self._mapped: dict[Peer, tuple[str, ...]] = {}
        self._taken = dict.fromkeys(peers, -1)
        self._prepared: dict[Peer, float] = {}
        #: The ranks that are to be written to, and where.
        self.rooms: dict[Peer, Room] = {}

    def meet(self, offer: Callable[[tuple[str, ...]], Offer]) -> None:
        """Wait until every rank has said hello, then tell each where the bytes are; ``offer`` is given what it has."""
        self.wait(lambda: self.peers - self._identity.keys(), "the ranks to come for the bytes")
        for peer in self._identity:
            self._send(peer, offer(self._mapped[peer]))

    def announce(self, index: int, digests: tuple[int, ...]) -> None:
        """Tell every rank that a bucket is full."""
        self.deadline.check(f"bucket {index} to be packed")
        for peer in self.peers:
            self._send(peer, Filled(push=self._push, index=index, digests=digests))

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

    def call_off(self, error: BaseException) -> set[Peer]:
        """Tell the ranks that are listening that no more will come; returns those that are gone."""
        gone = set()
        message = str(error) or type(error).__name__
        for peer in self._identity:
            try:
                self._send(peer, Failed(push=self._push, error="TransferFailed", message=f"called off: {message}"))
            except TransferFailed:  # that rank is gone, which may be the very reason
                gone.add(peer)
        return gone

    def _send(self, peer: Peer, message: frames.FromSender) -> None:
        try:
            self._control.socket.send_multipart([self._identity[peer], frames.pack(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise TransferFailed(f"{peer} is gone: {error}") from error

    def wait(self, missing: Callable[[], set[Peer]], what: str, look_up_s: float = LOOK_UP_S) -> None:
        """Handle messages until ``missing()``, asked at least every ``look_up_s``, is empty."""
        looked = time.monotonic()
        while absent := missing():
            if time.monotonic() - looked > _SILENCE_S:
                looked = time.monotonic()
                for peer in absent & self._identity.keys():
                    self._send(peer, Still(push=self._push))
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
                self._handle(identity, frames.unpack_from_rank(frame))

    def _handle(self, identity: bytes, message: frames.FromRank) -> None:
        if message.push != self._push:
            return  # left over from a push that was called off
        if isinstance(message, Hello):
            peer = Peer(self._control.who(message.secret), message.rank)
            if peer in self.peers and peer not in self._identity:
                self._identity[peer] = identity
                self._peer[identity] = peer
                self._mapped[peer] = message.mapped
            return
        sender = self._peer.get(identity)
        if sender is None:
            return
        if isinstance(message, Taken):
            self.taken(sender, message.index)
        elif isinstance(message, Prepared):
            self._prepared[sender] = message.verify_s
        elif isinstance(message, Room):
            known = self.rooms.get(sender)
            handle = known.handle if known is not None and message.handle is None else message.handle
            self.rooms[sender] = msgspec.structs.replace(message, handle=handle)
        else:
            raise _named(message, str(sender))


def _named(failed: Failed, who: str) -> errors.WeightSyncError:
    """The error that the other side reported, as an exception of this side."""
    return errors.named(failed.error, TransferFailed)(f"{who}: {failed.message}")


class EngineControl:
    """A rank's side; keeps its socket from push to push, as long as the sender's address stays the same.

    ``remote``: it dials TCP and nothing else, otherwise private sockets and nothing else.
    """

    def __init__(self, *, remote: bool) -> None:
        self._remote = remote
        self._context: zmq.Context[Socket] = zmq.Context()
        #: None, or the one that is connected to ``address``.
        self._sockets: list[Socket] = []
        self.address = ""
        self.close = weakref.finalize(self, _close, self._context, self._sockets)

    def meet(self, request: UpdateRequest, rank: int, mapped: tuple[str, ...], over: Event) -> tuple[Call, Offer]:
        """Say hello; returns once the sender has said where the bytes are. Raises `TransferFailed`, `PushTimeout`."""
        try:
            socket = self._dial(request)
            call = Call(socket, request, Deadline(request.timeout_s + _GRACE_S), over)
            socket.send(frames.pack(Hello(push=request.push, secret=request.secret, rank=rank, mapped=mapped)))
        except zmq.ZMQError as error:
            raise TransferFailed(f"the sender could not be met: {type(error).__name__}: {error}") from error
        offer = call.next("where the bytes are")
        if not isinstance(offer, Offer):
            raise TransferFailed(f"the sender announced {type(offer).__name__} before where the bytes are")
        return call, offer

    def confirm(self, push: str, verify_s: float) -> None:
        """Tell the sender that the push is ready to be committed."""
        self._tell(Prepared(push=push, verify_s=verify_s))

    def fail(self, push: str, error: BaseException) -> None:
        """Tell the sender that the push is over here."""
        kind = type(error).__name__ if isinstance(error, errors.WeightSyncError) else "TransferFailed"
        self._tell(Failed(push=push, error=kind, message=str(error) or type(error).__name__))

    def _tell(self, message: frames.FromRank) -> None:
        # A sender that cannot be reached any more has nothing to be told.
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(frames.pack(message))

    def check(self, request: UpdateRequest) -> None:
        """Raise `TransferFailed` for an address that is not to be dialled."""
        security.check_address(request.address, request.server_key, remote=self._remote)

    def _dial(self, request: UpdateRequest) -> Socket:
        self.check(request)
        address = request.address
        if not self._sockets or address != self.address:
            self.hang_up()
            socket: Socket = self._context.socket(zmq.DEALER)
            _limit(socket)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            try:
                if self._remote:
                    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                    socket.curve_serverkey = request.server_key.encode()
                    socket.setsockopt(zmq.IPV6, int("[" in address))
                    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
                    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
                socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._sockets.append(socket)
            self.address = address
        return self._sockets[0]

    def hang_up(self) -> None:
        """Forget the sender."""
        while self._sockets:
            self._sockets.pop().close(linger=0)
        self.address = ""


class Call:
    """One push, as a rank hears of it."""

    def __init__(self, socket: Socket, request: UpdateRequest, deadline: Deadline, over: Event):
        self._socket, self._request, self.deadline, self._over = socket, request, deadline, over
        self._looked = time.monotonic()

    def check(self, what: str) -> None:
        """Raise if waiting for ``what`` is in vain: the push was aborted, its time is up, or its sender is gone."""
        if self._over.is_set():
            raise TransferFailed("the push was aborted")
        self.deadline.check(what)
        if time.monotonic() - self._looked > _SILENCE_S:
            self._looked = time.monotonic()
            if not security.owner_lives(self._request.address):
                raise TransferFailed(f"the sender is gone; it was to announce {what}")

    def next(self, what: str) -> frames.FromSender:
        """The next message about this push."""
        self._looked = time.monotonic()
        while True:
            self.check(what)
            if (message := self.heard(min(self.deadline.left(), LOOK_UP_S))) is not None:
                return message

    def heard(self, timeout_s: float) -> frames.FromSender | None:
        """A message about this push that comes within ``timeout_s``. Raises what the sender reports."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        try:
            message = frames.unpack_from_sender(self._socket.recv(zmq.DONTWAIT))
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the sender's message cannot be read: {error}") from error
        if message.push != self._request.push:
            return None  # left over from a push that was called off
        if isinstance(message, Failed):
            raise _named(message, "the sender")
        return None if isinstance(message, Still) else message

    def filled(self, index: int) -> Filled:
        """Wait for a bucket to be announced."""
        return self.expect(self.next(f"bucket {index}"), index)

    def expect(self, message: frames.FromSender, index: int) -> Filled:
        """The message, if it announces that bucket. Raises `TransferFailed`."""
        if not isinstance(message, Filled) or message.index != index:
            raise TransferFailed(f"expected bucket {index}, got {message}")
        return message

    def taken(self, index: int) -> None:
        """Tell the sender that a bucket is needed no more."""
        self.say(Taken(push=self._request.push, index=index))

    def say(self, message: frames.FromRank) -> None:
        """Tell the sender something of this push. Raises `TransferFailed`."""
        try:
            self._socket.send(frames.pack(message))
        except zmq.ZMQError as error:
            raise TransferFailed(f"the sender cannot be told {type(message).__name__}: {error}") from error
