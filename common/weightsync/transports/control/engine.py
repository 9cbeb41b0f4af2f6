"""A rank's side of the conversation of a push, see `control`."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from threading import Event
from typing import Final

import msgspec
import zmq

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.protocol import addresses, control
from weightsync.protocol.control import (
    BucketDone,
    BucketReady,
    DescribeSubset,
    Failed,
    Heartbeat,
    Offer,
    Prepared,
    Register,
)
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.control.sockets import (
    FINAL_MESSAGE_S,
    LOOK_UP_S,
    SILENCE_S,
    Socket,
    beat,
    close,
    limit,
    named,
)

#: Ranks wait this much longer than the sender, which knows who is missing and should be the one to say so.
_GRACE_S: Final = 2.0
#: A message to a sender is a few bytes; if it cannot be queued at once, nobody is there.
_SEND_TIMEOUT_MS: Final = 5000


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
        self.close = weakref.finalize(self, close, self._context, self._sockets)

    def open(
        self, request: UpdateRequest, parts: Subset, rank: int, mapped: tuple[str, ...], cancelled: Event
    ) -> tuple[RankSession, Offer]:
        """Say hello; returns once the sender has said where the bytes are. Raises `TransferFailed`, `PushTimeout`."""
        hello = Register(push=request.push, secret=request.secret, rank=rank, mapped=mapped, keeps=parts.name)
        try:
            socket = self._dial(request)
            call = RankSession(socket, request, Deadline(request.timeout_s + _GRACE_S), cancelled)
            socket.send(control.pack(hello))
        except zmq.ZMQError as error:
            raise TransferFailed(f"the sender could not be met: {type(error).__name__}: {error}") from error
        offer = call.next("where the bytes are")
        if isinstance(offer, DescribeSubset):
            call.say(msgspec.structs.replace(hello, parts=parts.table()))
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

    def _tell(self, message: control.FromRank) -> None:
        # A sender that cannot be reached any more has nothing to be told.
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(control.pack(message))

    def check(self, request: UpdateRequest) -> None:
        """Raise `TransferFailed` for an address that is not to be dialled."""
        addresses.check_address(request.address, request.server_key, remote=self._remote)

    def _dial(self, request: UpdateRequest) -> Socket:
        self.check(request)
        address = request.address
        if not self._sockets or address != self.address:
            self.disconnect()
            socket: Socket = self._context.socket(zmq.DEALER)
            limit(socket)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            try:
                if self._remote:
                    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                    socket.curve_serverkey = request.server_key.encode()
                    socket.setsockopt(zmq.IPV6, int("[" in address))
                    beat(socket)
                socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._sockets.append(socket)
            self.address = address
        return self._sockets[0]

    def disconnect(self) -> None:
        """Forget the sender."""
        while self._sockets:
            self._sockets.pop().close(linger=0)
        self.address = ""


class RankSession:
    """One push, as a rank hears of it."""

    def __init__(self, socket: Socket, request: UpdateRequest, deadline: Deadline, cancelled: Event):
        self._socket, self._request, self.deadline, self._over = socket, request, deadline, cancelled
        self._looked = time.monotonic()

    def check(self, what: str) -> None:
        """Raise if waiting for ``what`` is in vain: the push was aborted, its time is up, or its sender is gone."""
        if self._over.is_set():
            raise TransferFailed("the push was aborted")
        self.deadline.check(what)
        if time.monotonic() - self._looked > SILENCE_S:
            self._looked = time.monotonic()
            if not addresses.owner_lives(self._request.address):
                with self.explained():  # its last word may not have been read yet
                    raise TransferFailed(f"the sender is gone; it was to announce {what}")

    def next(self, what: str) -> control.FromSender:
        """The next message about this push."""
        self._looked = time.monotonic()
        while True:
            self.check(what)
            if (message := self.heard(min(self.deadline.left(), LOOK_UP_S))) is not None:
                return message

    def heard(self, timeout_s: float) -> control.FromSender | None:
        """A message about this push that comes within ``timeout_s``. Raises what the sender reports."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        try:
            message = control.unpack_from_sender(self._socket.recv(zmq.DONTWAIT))
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the sender's message cannot be read: {error}") from error
        if message.push != self._request.push:
            return None  # left over from a push that was called off
        if isinstance(message, Failed):
            raise named(message, "the sender")
        return None if isinstance(message, Heartbeat) else message

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What breaks within mostly breaks because the sender gave up: raise what it says of that, if it does soon."""
        try:
            yield
        except TransferFailed:
            until = Deadline(min(FINAL_MESSAGE_S, self.deadline.left()))
            with contextlib.suppress(zmq.ZMQError):  # of what broke first is told
                while not self._over.is_set() and (left := until.left()):
                    self.heard(min(left, LOOK_UP_S))
            raise

    def filled(self, index: int) -> BucketReady:
        """Wait for a bucket to be announced."""
        return self.expect(self.next(f"bucket {index}"), index)

    def expect(self, message: control.FromSender, index: int) -> BucketReady:
        """The message, if it announces that bucket. Raises `TransferFailed`."""
        if not isinstance(message, BucketReady) or message.index != index:
            raise TransferFailed(f"expected bucket {index}, got {message}")
        return message

    def taken(self, index: int) -> None:
        """Tell the sender that a bucket is needed no more."""
        self.say(BucketDone(push=self._request.push, index=index))

    def say(self, message: control.FromRank) -> None:
        """Tell the sender something of this push. Raises `TransferFailed`."""
        try:
            self._socket.send(control.pack(message))
        except zmq.ZMQError as error:
            raise TransferFailed(f"the sender cannot be told {type(message).__name__}: {error}") from error
