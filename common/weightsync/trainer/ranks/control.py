"""The messages between the ranks of one trainer, over ZMQ: rank 0 binds a ROUTER, every other rank connects a DEALER.

No collective is started: the trainer's own groups are not touched, and a missing rank does not make the others hang.
Where rank 0 listens is in the store of the default group, see `store`, with the CURVE key that encrypts the messages
and a secret without which rank 0 ignores what it is sent.

Every message has a name, and is kept until its reader asks for that. Nothing is sent to a rank that has not asked for
it first. No call waits for a peer that is frozen: sockets queue without limit, and a wait has a deadline. A process
that ends is found through its number where that is visible, and elsewhere because its connection closes; there are no
ZMQ heartbeats, since a process that is only frozen would not answer them either.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import socket as sockets
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.memory import forks
from weightsync.memory.processes import ENDED, process_state
from weightsync.protocol import codec
from weightsync.protocol.http import Message
from weightsync.trainer.ranks.store import AddressStore, Listening
from weightsync.transports.control.sockets import (
    FINAL_MESSAGE_S,
    LOOK_UP_S,
    Socket,
    bracketed,
    close,
    dial,
    encrypt,
    listen,
    set_limits,
)

#: Largest message, in bytes: what a rank holds, or is to write, of a million tensors.
_MAX_MESSAGE_BYTES: Final = 1 << 30
#: Seconds that a closing rank 0 waits until the last outcome is on its way to the others.
_HEARD_S: Final = 2.0
#: Seconds between two checks of the processes of missing ranks.
_CHECK_S: Final = 0.5
#: Seconds between the first two looks at the store, and by how much each pause is longer.
_FIRST_S, _LONGER = 0.001, 1.5
#: Seconds that an answer may take to get here.
_ON_ITS_WAY_S: Final = 0.2
#: Frames that are read before whoever waits looks at its deadline again.
_AT_ONCE: Final = 1000
_LOOPBACK: Final = "127.0.0.1"
#: What is seen of a process whose number is not visible from here.
_GONE: Final = "has ended or closed its Sender"
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Envelope(Message, frozen=True):
    """rank -> 0: the name of the message in the next frame; without one, the message of that name is withdrawn."""

    secret: str
    rank: int
    name: str


_ENVELOPE: Final[msgspec.msgpack.Decoder[Envelope]] = codec.msgpack_decoder(Envelope)


class Control(ABC):
    """One end of the messages. ``pids``: the other ranks' processes that are visible from here."""

    def __init__(self, group: str) -> None:
        self._store = AddressStore(group)
        self.pids: dict[int, int] = {}
        #: By rank and name.
        self._inbox: dict[tuple[int, str], bytes] = {}
        self._context: zmq.Context[Socket] = zmq.Context()

    @abstractmethod
    def close(self) -> None:
        """Release sockets and connections; idempotent."""

    def address(self) -> str:
        """The address of this host on the way to the store; empty if that is unknown, or not on the network."""
        return self._store.address()

    def forget(self, rank: int, but: str = "") -> None:
        """Drop what has arrived from a rank and was not read, but for the message of this name."""
        self._receive()
        self._inbox = {key: body for key, body in self._inbox.items() if key[0] != rank or key[1] == but}

    def is_here(self, rank: int, name: str) -> bool:
        """Whether a message has arrived and was not read."""
        self._receive()
        return (rank, name) in self._inbox

    def take(self, names: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> None:
        """Wait for one message from each rank, by its name, and add them to ``found``.

        Raises `TransferFailed` or `PushTimeout` that names the missing ranks, and what each was ``to`` do.
        """
        checked = time.monotonic()
        while missing := self.poll(names, found):
            if not deadline.left():
                deadline.check(f"{self.describe(missing)} {to}")
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                self.check(names, found, to)
            self._wait(min(LOOK_UP_S, deadline.left()), deadline)

    def poll(self, names: Mapping[int, str], found: dict[int, bytes]) -> list[int]:
        """As `take`, without waiting; return the ranks whose message is missing."""
        self._receive()
        for rank, name in names.items():
            if rank not in found and (rank, name) in self._inbox:
                found[rank] = self._inbox.pop((rank, name))
        return [rank for rank in names if rank not in found]

    def check(self, names: Mapping[int, str], found: dict[int, bytes], to: str) -> None:
        """As `poll`. Raises `TransferFailed` if the process of a missing rank has ended."""
        ended = [rank for rank in names if rank not in found and self.ended(rank)]
        if ended:
            missing = self.poll(names, found)  # it may have ended after its last message
            if ended := [rank for rank in ended if rank in missing]:
                raise TransferFailed(f"{self.describe(ended)}: it was {to}")

    def describe(self, ranks: list[int]) -> str:
        """Ranks for an error message, with the state of their processes as far as visible."""
        return ", ".join(self._describe(rank) for rank in ranks)

    def _describe(self, rank: int) -> str:
        process = f"process {self.pids[rank]}" if rank in self.pids else ""
        known = ", ".join(filter(None, (process, f"which {fault}" if (fault := self._fault(rank)) else "")))
        return f"trainer rank {rank}{f' ({known})' if known else ''}"

    def runs(self, rank: int) -> bool:
        """Whether a rank's process is not known to have ended or to be frozen."""
        return not self._fault(rank)

    def ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return self._fault(rank) in (ENDED, _GONE)

    def _fault(self, rank: int) -> str:
        if rank in self.pids:
            return process_state(self.pids[rank])
        return "" if self._is_connected(rank) else _GONE

    @abstractmethod
    def _is_connected(self, rank: int) -> bool:
        """Whether the connection to a rank is not known to have closed."""

    @abstractmethod
    def _receive(self) -> None:
        """Put what has arrived into the inbox."""

    @abstractmethod
    def _wait(self, seconds: float, deadline: Deadline) -> None:
        """Wait until something may have arrived."""


class CoordinatorControl(Control):
    """Rank 0's end."""

    def __init__(self, group: str) -> None:
        super().__init__(group)
        self._secret = secrets.token_urlsafe(24)
        #: By rank: how ZMQ names its connection, also if it connects again. Once the `Sender` is built, a rank has no
        #: other: what comes over one is meant for another `Sender`, which has not yet said where it listens.
        self._identities: dict[int, bytes] = {}
        self.is_complete = False
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        set_limits(self._socket, _MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that connects again is the same rank
        self._descriptors: list[int] = []
        self._ends: list[forks.End] = []
        self._finalizer = weakref.finalize(
            self, _close, self._context, [self._socket], self._descriptors, self._ends, _HEARD_S, os.getpid()
        )

    def open(self, deadline: Deadline) -> None:
        """Listen, and tell the other ranks where. Raises `TransferFailed` or `PushTimeout`."""
        server_key = encrypt(self._socket)
        here = self.address() or _LOOPBACK
        # The name of a host may be an alias of its loopback there, while it leads other hosts to its address.
        everywhere = ipaddress.ip_address(here).is_loopback and not self._store.is_local
        family = sockets.AF_INET6 if ":" in here else sockets.AF_INET
        self._socket.setsockopt(zmq.IPV6, int(family == sockets.AF_INET6))
        address, descriptor = listen(self._socket, family, ("" if everywhere else here, 0))
        port = int(address.rpartition(":")[2])
        self._descriptors.append(descriptor)
        self._ends.append(forks.own_connections("", port))
        self._store.write(Listening("" if everywhere else here, port, server_key, self._secret), deadline)
        self._store.close()

    def send(self, rank: int, name: str, body: bytes) -> None:
        """Send a rank a message. Without effect if it is gone, which `take` and `check` find out."""
        _check_size(body)
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([self._identities[rank], name.encode(), body], zmq.DONTWAIT)

    def close(self) -> None:
        """See `Control.close`. Sends what is still to be sent, for at most two seconds."""
        self._store.close()
        self._finalizer()

    def _is_connected(self, rank: int) -> bool:
        if rank not in self._identities:
            return True
        try:
            self._socket.send_multipart([self._identities[rank], b""], zmq.DONTWAIT)  # means nothing to the rank
        except zmq.ZMQError:
            return False
        return True

    def _receive(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._socket.poll(0):
                return
            identity, *frames = self._socket.recv_multipart(zmq.DONTWAIT)
            with contextlib.suppress(msgspec.MsgspecError):
                envelope = codec.readable(lambda: _ENVELOPE.decode(frames[0]))  # noqa: B023
                if hmac.compare_digest(envelope.secret.encode(), self._secret.encode()):
                    self._put(identity, envelope, frames[1:])

    def _put(self, identity: bytes, envelope: Envelope, body: list[bytes]) -> None:
        is_known = self._identities.get(envelope.rank) == identity
        if body and (is_known or not self.is_complete):
            self._identities[envelope.rank] = identity
            self._inbox[envelope.rank, envelope.name] = body[0]
        elif is_known and not body:
            self._inbox.pop((envelope.rank, envelope.name), None)

    def _wait(self, seconds: float, _: Deadline) -> None:
        self._socket.poll(int(1000 * seconds))


class FollowerControl(Control):
    """The end of a rank other than 0."""

    def __init__(self, group: str, rank: int) -> None:
        super().__init__(group)
        self._rank = rank
        self._listening: Listening | None = None
        #: The socket that is connected there, and the one that reports its events; or empty.
        self._sockets: list[Socket] = []
        self._ends: list[forks.End] = []
        #: The first message, until rank 0 has answered: it goes to every place where rank 0 may listen.
        self._first: tuple[str, bytes] | None = None
        self._answered, self._connected = False, False
        self._looked, self._pause_s = 0.0, 0.0
        self._finalizer = weakref.finalize(
            self, _close, self._context, self._sockets, [], self._ends, FINAL_MESSAGE_S, os.getpid()
        )

    def send(self, name: str, body: bytes) -> None:
        """Send rank 0 a message, which replaces one of the same name that it has not read."""
        _check_size(body)
        if not self._answered:
            self._first = name, body
        self._send(name, body)

    def withdraw(self, name: str) -> None:
        """Have rank 0 drop a message, if it has not read it."""
        self._send(name)

    def _send(self, name: str, *body: bytes) -> None:
        if self._sockets and self._listening is not None:
            envelope = Envelope(self._listening.secret, self._rank, name)
            with contextlib.suppress(zmq.ZMQError):  # nothing is full: the queue has no limit
                self._sockets[0].send_multipart([msgspec.msgpack.encode(envelope), *body], zmq.DONTWAIT)

    def close(self) -> None:
        """See `Control.close`."""
        self._store.close()
        self._finalizer()

    def _is_connected(self, _: int) -> bool:
        self._receive()
        return self._connected or not self._answered

    def _receive(self) -> None:
        if not self._sockets:
            return
        socket, monitor = self._sockets
        while monitor.poll(0):
            self._connected = recv_monitor_message(monitor, zmq.DONTWAIT)["event"] != zmq.EVENT_DISCONNECTED
        for _ in range(_AT_ONCE):
            if not socket.poll(0):
                return
            name, *body = socket.recv_multipart(zmq.DONTWAIT)
            if body:
                self._inbox[0, name.decode()] = body[0]
                if not self._answered:
                    self._answered, self._first = True, None
                    self._store.close()

    def _wait(self, seconds: float, deadline: Deadline) -> None:
        if not self._answered:
            self._look_up(deadline)
            seconds = min(seconds, self._pause_s)
        self._poll(seconds)

    def _poll(self, seconds: float) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        if self._sockets:
            poller.poll(max(1, int(1000 * seconds)))
        else:
            time.sleep(seconds)

    def _look_up(self, deadline: Deadline) -> None:
        """Dial where the store says that rank 0 listens.

        Until rank 0 has answered, that may be where it listens, or has listened, for another `Sender`.
        """
        if time.monotonic() - self._looked < self._pause_s:
            return
        found = self._store.read(deadline)
        self._looked = time.monotonic()
        self._pause_s = min(max(_FIRST_S, _LONGER * self._pause_s), LOOK_UP_S)
        if found is None or found == self._listening:
            return
        if self._connected:
            self._poll(_ON_ITS_WAY_S)  # rank 0 may have answered, and have built another `Sender` since
        self._receive()
        if not self._answered:
            self._dial(found)

    def _dial(self, listening: Listening) -> None:
        self._disconnect()
        self._connected = False
        host = listening.host or self._store.address_of_host()
        socket: Socket = self._context.socket(zmq.DEALER)
        self._sockets.append(socket)
        set_limits(socket, _MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IDENTITY, secrets.token_hex(16).encode())  # kept if ZMQ connects again
        events = f"inproc://events-{secrets.token_hex(8)}"
        self._sockets.append(socket.get_monitor_socket(_EVENTS, events))
        self._ends.append(forks.own_connections(host, listening.port))
        dial(socket, f"tcp://{bracketed(host)}:{listening.port}", listening.server_key)
        self._listening = listening
        if self._first is not None:
            self._send(*self._first)

    def _disconnect(self) -> None:
        while self._sockets:
            self._sockets.pop().close(linger=0)
        while self._ends:
            forks.disown_connections(self._ends.pop())


def _check_size(body: bytes) -> None:
    if len(body) > _MAX_MESSAGE_BYTES:
        raise TransferFailed(f"a message of {len(body)} bytes is too large for the trainer's ranks")


def _close(
    context: zmq.Context[Socket],
    open_sockets: list[Socket],
    descriptors: list[int],
    ends: list[forks.End],
    final_message_s: float,
    owner: int,
) -> None:
    if os.getpid() != owner:
        return  # a forked child, such as a data loader's worker, must not close what belongs to its parent
    for descriptor in descriptors:
        forks.disown(descriptor)  # the socket closes them
    for end in ends:
        forks.disown_connections(end)
    close(context, open_sockets, final_message_s)
