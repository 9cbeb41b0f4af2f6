"""The conversation of a push between a trainer end and the ranks, over ZMQ: small messages, never the bytes.

The trainer binds a ROUTER (`trainer_control`), every engine rank connects a DEALER (`engine_control`). On one host the
socket is a file in a private directory; to other hosts it is TCP with CURVE, whose public key travels in the
authenticated request, so that both sides know whom they talk to and nobody listens in. Here is what both need.
"""

from __future__ import annotations

import socket as sockets
from typing import Final
from urllib.parse import urlsplit

import psutil
import zmq

from weightsync import errors, wire
from weightsync.errors import TransferFailed
from weightsync.frames import Failed

#: How long either side sleeps at most before it looks whether the push is over.
LOOK_UP_S: Final = 0.1
#: Who says nothing for so long may have died: its socket tells.
SILENCE_S: Final = 1.0
#: How long a sender that closes sees to it that its last word, why it gives up maybe, is sent, and a rank that loses it
#: listens for that.
LAST_WORD_S: Final = 0.5
#: TCP tells of a peer that is gone only when asked.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 10000

Socket = zmq.Socket[bytes]


def limit(socket: Socket) -> None:
    """Bound what a socket takes in, and how long it lives on."""
    socket.setsockopt(zmq.LINGER, 0)
    # What is sent is bounded by the push: a few bytes for each bucket and 8 for each tensor. At ZMQ's own bound, 1000
    # messages, a peer that is busy for a moment would be taken for one that is gone.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)


def beat(socket: Socket) -> None:
    """Have a socket of TCP notice a peer that is gone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def close(context: zmq.Context[Socket], open_sockets: list[Socket], last_word_s: float = 0.0) -> None:
    """Close sockets, then their context; what they were told last has so long to get on its way."""
    # One by one: where the garbage collector calls, the context has forgotten them and would wait for them for ever.
    for socket in open_sockets:
        socket.close(linger=int(1000 * last_word_s))
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


def named(failed: Failed, who: str) -> errors.WeightSyncError:
    """The error that the other side reported, as an exception of this side."""
    return errors.named(failed.error, TransferFailed)(f"{who}: {failed.message}")
