"""The control messages of a push on a rank's side, see `sockets`."""

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
    close,
    dial,
    enable_heartbeats,
    set_limits,
    to_error,
)

#: Seconds that ranks wait longer than the sender: it knows which rank is missing, so it should report the timeout.
_GRACE_S: Final = 2.0
#: A message to a sender is a few bytes: if it cannot be queued within this time, the sender is gone.
_SEND_TIMEOUT_MS: Final = 5000


class EngineControl:
    """The control socket of a rank, kept between pushes while the sender's address stays the same.

    With ``remote`` it dials TCP addresses only, otherwise private sockets only.
    """

    def __init__(self, *, remote: bool) -> None:
        self._remote = remote
        self._context: zmq.Context[Socket] = zmq.Context()
        #: The socket that is connected to ``address``, or empty.
        self._sockets: list[Socket] = []
        self.address = ""
        self.close = weakref.finalize(self, close, self._context, self._sockets)

    def open(
        self, request: UpdateRequest, subset: Subset, rank: int, mapped: tuple[str, ...], cancelled: Event
    ) -> tuple[RankSession, Offer]:
        """Register with the sender and return its offer, which says where the bytes will lie.

        ``mapped`` names the arenas that this rank has mapped. Raises `TransferFailed` or `PushTimeout`.
        """
        hello = Register(push=request.push, secret=request.secret, rank=rank, mapped=mapped, keeps=subset.name)
        try:
            socket = self._connect(request)
            session = RankSession(socket, request, Deadline(request.timeout_s + _GRACE_S), cancelled)
            socket.send(control.pack(hello))
        except zmq.ZMQError as error:
            raise TransferFailed(
                f"rank {rank} could not connect to the sender: {type(error).__name__}: {error}"
            ) from error
        offer = session.next("where the bytes lie")
        if isinstance(offer, DescribeSubset):
            session.send(msgspec.structs.replace(hello, parts=subset.table()))
            offer = session.next("where the bytes lie")
        if not isinstance(offer, Offer):
            raise TransferFailed(f"rank {rank} expected the sender's Offer, got {type(offer).__name__}")
        return session, offer

    def confirm(self, push: str, verify_s: float) -> None:
        """Tell the sender that this rank is ready to commit; verifying took ``verify_s`` seconds."""
        self._send(Prepared(push=push, verify_s=verify_s))

    def fail(self, push: str, error: BaseException) -> None:
        """Tell the sender that the push has failed in this rank."""
        kind = type(error).__name__ if isinstance(error, errors.WeightSyncError) else "TransferFailed"
        self._send(Failed(push=push, error=kind, message=str(error) or type(error).__name__))

    def _send(self, message: control.FromRank) -> None:
        # Best effort: a sender that cannot be reached needs no message.
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(control.pack(message))

    def check(self, request: UpdateRequest) -> None:
        """Raise `TransferFailed` if the sender's address must not be dialled."""
        addresses.check_address(request.address, request.server_key, remote=self._remote)

    def _connect(self, request: UpdateRequest) -> Socket:
        self.check(request)
        address = request.address
        if not self._sockets or address != self.address:
            self.disconnect()
            socket: Socket = self._context.socket(zmq.DEALER)
            set_limits(socket)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            try:
                if self._remote:
                    enable_heartbeats(socket)
                    dial(socket, address, request.server_key)
                else:
                    socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._sockets.append(socket)
            self.address = address
        return self._sockets[0]

    def disconnect(self) -> None:
        """Close the connection to the sender."""
        while self._sockets:
            self._sockets.pop().close(linger=0)
        self.address = ""


class RankSession:
    """One push on a rank's side: receives the sender's messages about it and answers them."""

    def __init__(self, socket: Socket, request: UpdateRequest, deadline: Deadline, cancelled: Event):
        self._socket, self._request, self.deadline, self._cancelled = socket, request, deadline, cancelled
        self._checked_sender = time.monotonic()

    def check(self, what: str) -> None:
        """Raise if waiting for ``what`` is pointless.

        Raises `TransferFailed` if the push was aborted or its sender is gone, `PushTimeout` after the deadline.
        """
        if self._cancelled.is_set():
            raise TransferFailed("the push was aborted")
        self.deadline.check(what)
        if time.monotonic() - self._checked_sender > SILENCE_S:
            self._checked_sender = time.monotonic()
            if not addresses.owner_lives(self._request.address):
                with self.explained():  # its final message may still be unread
                    raise TransferFailed(f"the sender is gone; this rank was waiting for {what}")

    def next(self, what: str) -> control.FromSender:
        """Wait for the next message about this push, called ``what`` in errors.

        Raises what `check` raises, and the error that the sender reports.
        """
        self._checked_sender = time.monotonic()
        while True:
            self.check(what)
            if (message := self.receive(min(self.deadline.left(), LOOK_UP_S))) is not None:
                return message

    def receive(self, timeout_s: float) -> control.FromSender | None:
        """The next message about this push, or None if none arrives within ``timeout_s``.

        Raises the error that the sender reports, or `TransferFailed` for a malformed message.
        """
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        try:
            message = control.unpack_from_sender(self._socket.recv(zmq.DONTWAIT))
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the sender's message cannot be read: {error}") from error
        if message.push != self._request.push:
            return None  # left over from a cancelled push
        if isinstance(message, Failed):
            raise to_error(message, "the sender")
        return None if isinstance(message, Heartbeat) else message

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Replace a `TransferFailed` raised inside by the sender's own error, if that arrives soon.

        A transfer mostly breaks because the sender gave up, and the sender's final message says why.
        """
        try:
            yield
        except TransferFailed:
            until = Deadline(min(FINAL_MESSAGE_S, self.deadline.left()))
            with contextlib.suppress(zmq.ZMQError):  # the first error is the one to report
                while not self._cancelled.is_set() and (left := until.left()):
                    self.receive(min(left, LOOK_UP_S))
            raise

    def filled(self, index: int) -> BucketReady:
        """Wait until a bucket is announced. Raises what `next` raises, or `TransferFailed` for any other message."""
        return self.expect(self.next(f"bucket {index}"), index)

    def expect(self, message: control.FromSender, index: int) -> BucketReady:
        """Return ``message`` if it announces bucket ``index``. Raises `TransferFailed` otherwise."""
        if not isinstance(message, BucketReady) or message.index != index:
            raise TransferFailed(f"expected bucket {index}, got {message}")
        return message

    def taken(self, index: int) -> None:
        """Tell the sender that this rank no longer needs a bucket. Raises `TransferFailed`."""
        self.send(BucketDone(push=self._request.push, index=index))

    def send(self, message: control.FromRank) -> None:
        """Send the sender a message about this push. Raises `TransferFailed`."""
        try:
            self._socket.send(control.pack(message))
        except zmq.ZMQError as error:
            raise TransferFailed(f"{type(message).__name__} could not be sent to the sender: {error}") from error
