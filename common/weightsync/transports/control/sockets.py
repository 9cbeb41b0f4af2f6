"""The conversation of a push between a trainer end and the ranks, over ZMQ: small messages, never the bytes.

The trainer binds a ROUTER (`trainer_control`), every engine rank connects a DEALER (`engine_control`). On one host the
socket is a file in a private directory; to other hosts it is TCP with CURVE, whose public key travels in the
authenticated request, so that both sides know whom they talk to and nobody listens in. Here is what both need.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket as sockets
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psutil
import zmq

from weightsync import errors
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import addresses, http
from weightsync.protocol.control import Failed

#: How long either side sleeps at most before it looks whether the push is over.
LOOK_UP_S: Final = 0.1
#: Who says nothing for so long may have died: its socket tells.
SILENCE_S: Final = 1.0
#: How long a sender that closes sees to it that its last word, why it gives up maybe, is sent, and a rank that loses it
#: listens for that.
FINAL_MESSAGE_S: Final = 0.5
#: A rank tries so long to reach the trainer before it says that it cannot.
_REACH_S: Final = 2.0
#: How the kernel's tables spell that a socket listens.
_LISTENING: Final = "0A"
#: Why a rank does not find a trainer at the loopback.
_OWN_LOOPBACK: Final = (
    "that is the engine's own loopback: the trainer is on another host, or reaches the engine through a forwarded "
    'port; have it pass Sender(..., address="an address of its host that the engine reaches")'
)
#: TCP tells of a peer that is gone only when asked.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 10000

Socket = zmq.Socket[bytes]


def limit(socket: Socket) -> None:
    """Bound what a socket takes in, and how long it lives on."""
    socket.setsockopt(zmq.LINGER, 0)
    # What is sent is bounded by the push: a few bytes for each bucket and 8 for each tensor. At ZMQ's own bound, 1000
    # messages, a peer that is busy for a moment would be taken for one that is gone.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, http.MAX_FRAME_BYTES)


def beat(socket: Socket) -> None:
    """Have a socket of TCP notice a peer that is gone."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def close(context: zmq.Context[Socket], open_sockets: list[Socket], final_message_s: float = 0.0) -> None:
    """Close sockets, then their context; what they were told last has so long to get on its way."""
    # One by one: where the garbage collector calls, the context has forgotten them and would wait for them for ever.
    for socket in open_sockets:
        socket.close(linger=int(1000 * final_message_s))
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


def own_address(given: str) -> str:
    """The address ``given``, by number or by name, as a number. Raises `UnsupportedOption` unless it is this host's."""
    try:
        found = [str(one[4][0]) for one in sockets.getaddrinfo(given, 0, type=sockets.SOCK_STREAM)]
    except (OSError, ValueError) as error:
        raise UnsupportedOption(f"address {given!r} is none: {error}") from error
    for number in found:
        # Ranks dial it by number alone, and of everybody's address they learn nothing.
        if "%" in number or ipaddress.ip_address(number).is_unspecified:
            continue
        family = sockets.AF_INET6 if ":" in number else sockets.AF_INET
        with contextlib.suppress(OSError), sockets.socket(family) as probe:
            probe.bind((number, 0))
            return number
    raise UnsupportedOption(
        f"address {given!r} ({', '.join(found)}) is none of this host's, at which engines could reach the trainer; "
        f"it has {', '.join(_own_addresses())}"
    )


def _own_addresses() -> list[str]:
    kinds = (sockets.AF_INET, sockets.AF_INET6)
    found = [one for those in psutil.net_if_addrs().values() for one in those if one.family in kinds]
    return [one.address for one in found if "%" not in one.address]


def check_ways(given: str, engines: Mapping[str, http.OpenReply]) -> None:
    """Raise `UnsupportedOption` for an engine, by URL, that cannot dial this trainer, at ``given`` if that is set."""
    for url, hello in engines.items():
        here = given or local_address(host_of(url))
        if "%" in here:
            raise UnsupportedOption(
                f"{url} is reached from the link-local address {here}, which means nothing to it; use another address "
                'of the engine in its URL, or pass Sender(..., address="an address of this host")'
            )
        if ipaddress.ip_address(here).is_loopback and hello.network not in ("", arenas.network_id()):
            raise UnsupportedOption(
                f"{url} is reached from {here}, this host's loopback, but the engine runs in another network: a port "
                "is forwarded to it (docker -p, kubectl port-forward, ssh -L), and its ranks cannot dial back; pass "
                f'Sender(..., address="an address of this host that the engine reaches"), such as '
                f"{' or '.join(a for a in _own_addresses() if not ipaddress.ip_address(a).is_loopback) or 'none yet'}, "
                "or start the engine's container with --network=host, or with --ipc=host to use shared memory"
            )


def way_to(rank: int, address: str) -> str:
    """This host's address on the way to the trainer at an address of TCP, which is not dialled.

    Raises `TransferFailed` for what is none, and for a loopback at which nobody listens.
    """
    addresses.check_host_address(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    here = local_address(host.strip("[]"))
    if ipaddress.ip_address(here).is_loopback and not _somebody_listens(int(port)):
        raise TransferFailed(f"rank {rank} cannot reach the trainer at {address}: {_OWN_LOOPBACK}")
    return here


def _somebody_listens(port: int) -> bool:
    """Whether any process of this network does, as far as the kernel tells."""
    tables = [path for path in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")) if path.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()]
    return not tables or any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENING for row in rows)


def check_reachable(rank: int, host: str, port: int) -> str:
    """This host's address on the way to the trainer's store. Raises `TransferFailed` where that does not answer."""
    here = local_address(host)
    try:
        sockets.create_connection((host, port), timeout=_REACH_S).close()
    except OSError as error:
        hint = "is that the trainer's address as the engine sees it, and is the port open?"
        if ipaddress.ip_address(here).is_loopback:
            hint = _OWN_LOOPBACK
        raise TransferFailed(
            f"rank {rank} cannot reach the trainer's store at {host} port {port} from {interface_of(here)}: {error}; "
            f"{hint}"
        ) from error
    return here


def interface_of(address: str) -> str:
    """The network interface that has this address, as people read it."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return f"{name} ({address})"
    return address


def bracketed(address: str) -> str:
    """An address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


def host_of(url: str) -> str:
    """The host of an engine's URL."""
    return urlsplit(url).hostname or ""


def named(failed: Failed, who: str) -> errors.WeightSyncError:
    """The error that the other side reported, as an exception of this side."""
    return errors.named(failed.error, TransferFailed)(f"{who}: {failed.message}")
