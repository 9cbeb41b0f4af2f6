"""ZMQ sockets and network addresses, for both sides of the control messages; bulk bytes never travel here.

The trainer binds a ROUTER (`control.trainer`), and every engine rank connects a DEALER (`control.engine`). On one host
the socket is a file in a private directory. Between hosts it is TCP with CURVE: the public key travels in the
authenticated request, so both sides are authenticated and the messages encrypted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket as sockets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
import zmq

from weightsync import errors
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas, forks
from weightsync.protocol import addresses, directories, http, in_process
from weightsync.protocol.control import Failed

#: Longest time in seconds that either side sleeps before it checks again whether the push was cancelled.
LOOK_UP_S: Final = 0.1
#: Seconds of silence after which a side checks through the socket whether the other has died.
SILENCE_S: Final = 1.0
#: Seconds a closing sender lingers to flush its final message, and a rank that loses its sender waits for it.
FINAL_MESSAGE_S: Final = 0.5
#: Timeout in seconds of a rank's connection to the trainer's store.
_REACH_S: Final = 2.0
#: The state of a listening socket in ``/proc/self/net/tcp``.
_LISTENING: Final = "0A"
_LOOPBACK: Final = "127.0.0.1"
#: Why a rank finds no trainer at the loopback address.
_OWN_LOOPBACK: Final = (
    "that is the engine's own loopback: the trainer is on another host, or reaches the engine through a forwarded "
    'port; have it pass Sender(..., address="an address of its host that the engine reaches")'
)
#: Pending connections of a listening socket; ZMQ accepts each at once.
_BACKLOG: Final = 1024
#: TCP does not report a dead peer unless the connection is probed.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2000, 10000

Socket = zmq.Socket[bytes]


def set_limits(socket: Socket, most_bytes: int = http.MAX_FRAME_BYTES) -> None:
    """Bound the size of received messages, and close without lingering."""
    socket.setsockopt(zmq.LINGER, 0)
    # The push itself bounds what is queued: a few bytes per bucket and 8 per tensor. With ZMQ's default limit of 1000
    # messages, a peer that is busy for a moment would be mistaken for a dead one.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)


def listen(socket: Socket, family: sockets.AddressFamily, place: str | tuple[str, int]) -> tuple[str, int]:
    """Make a socket listen at ``place``; returns its ZMQ address, and the descriptor, which `close` closes.

    A forked child that inherited the descriptor would make this process look alive after its death: the caller disowns
    it before `close`, see `forks`. Raises `TransferFailed`.
    """

    def opened() -> int:
        with sockets.socket(family) as listening:
            listening.bind(place)
            listening.listen(_BACKLOG)
            return listening.detach()

    try:
        descriptor = forks.own(opened)
    except OSError as error:
        raise TransferFailed(f"the trainer cannot listen at {place}: {error.strerror}") from error
    listening = sockets.socket(fileno=descriptor)
    name = listening.getsockname()
    listening.detach()
    address = f"ipc://{name}" if family == sockets.AF_UNIX else f"tcp://{bracketed(name[0])}:{name[1]}"
    socket.setsockopt(zmq.USE_FD, descriptor)
    socket.bind(address)
    return address, descriptor


def enable_heartbeats(socket: Socket) -> None:
    """Make a TCP socket notice a dead peer."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def encrypt(socket: Socket) -> str:
    """Encrypt what a socket that listens on TCP exchanges; returns the public key that whoever dials it needs."""
    public, private = zmq.curve_keypair()
    socket.curve_server, socket.curve_secretkey = True, private
    return public.decode()


def dial(socket: Socket, address: str, server_key: str) -> None:
    """Connect to a TCP address of a socket that `encrypt` has given this key."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = server_key.encode()
    socket.setsockopt(zmq.IPV6, int("[" in address))
    socket.connect(address)


def close(context: zmq.Context[Socket], open_sockets: list[Socket], final_message_s: float = 0.0) -> None:
    """Close sockets, then their context; queued messages have ``final_message_s`` to be sent."""
    # One by one: called by the garbage collector, the context no longer knows its sockets, and would wait for them
    # for ever.
    for socket in open_sockets:
        socket.close(linger=int(1000 * final_message_s))
    context.term()


def local_address(host: str) -> str:
    """The address from which this host reaches ``host``. Raises `TransferFailed` if there is no route."""
    try:
        family, kind, _, _, address = sockets.getaddrinfo(host, 9, type=sockets.SOCK_DGRAM)[0]
        with sockets.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:  # ValueError: the name is malformed
        raise TransferFailed(f"there is no route from this host to {host}: {error}") from error


def own_address(given: str) -> str:
    """Resolve ``given``, a name or an IP address of this host. Raises `UnsupportedOption` if it is not this host's."""
    try:
        found = [str(info[4][0]) for info in sockets.getaddrinfo(given, 0, type=sockets.SOCK_STREAM)]
    except (OSError, ValueError) as error:
        raise UnsupportedOption(f"address {given!r} cannot be resolved: {error}") from error
    for address in found:
        # Ranks dial this very address: a scoped or unspecified address means nothing to them.
        if "%" in address or ipaddress.ip_address(address).is_unspecified:
            continue
        family = sockets.AF_INET6 if ":" in address else sockets.AF_INET
        with contextlib.suppress(OSError), sockets.socket(family) as probe:
            probe.bind((address, 0))
            return address
    raise UnsupportedOption(
        f"address {given!r} ({', '.join(found)}) is not an address of this host at which engines could reach the "
        f"trainer; this host has {', '.join(_own_addresses())}"
    )


def _own_addresses() -> list[str]:
    kinds = (sockets.AF_INET, sockets.AF_INET6)
    found = [entry for entries in psutil.net_if_addrs().values() for entry in entries if entry.family in kinds]
    return [entry.address for entry in found if "%" not in entry.address]


def check_ways(given: str, engines: Mapping[str, http.OpenReply]) -> None:
    """Raise `UnsupportedOption`, naming the URL, if the ranks of an engine cannot dial this trainer.

    ``given`` is the address of this host that they dial; empty: the address on the route to each engine.
    """
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
    """The address from which this host reaches the trainer's ``tcp://`` address; dials nothing.

    Raises `TransferFailed` if the address is malformed, or a loopback address at which nothing listens.
    """
    addresses.check_host_address(address)
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    here = local_address(host.strip("[]"))
    if ipaddress.ip_address(here).is_loopback and not _is_listening(int(port)):
        raise TransferFailed(f"rank {rank} cannot reach the trainer at {address}: {_OWN_LOOPBACK}")
    return here


def _is_listening(port: int) -> bool:
    """Whether any process in this network namespace listens at ``port``; true if the kernel does not tell."""
    tables = [path for path in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")) if path.exists()]
    rows = [line.split() for table in tables for line in table.read_text().splitlines()]
    return not tables or any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENING for row in rows)


def check_reachable(rank: int, host: str, port: int, what: str = "store") -> str:
    """Dial what the trainer listens with; returns the address from which this host reaches it.

    Raises `TransferFailed` if the connection is not accepted.
    """
    here = local_address(host)
    try:
        sockets.create_connection((host, port), timeout=_REACH_S).close()
    except OSError as error:
        hint = "is that the trainer's address as the engine sees it, and is the port open?"
        if ipaddress.ip_address(here).is_loopback:
            hint = _OWN_LOOPBACK
        raise TransferFailed(
            f"rank {rank} cannot reach the trainer's {what} at {host} port {port} from {interface_of(here)}: {error}; "
            f"{hint}"
        ) from error
    return here


def reach(rank: int, address: str, server_key: str) -> str:
    """Dial the trainer's control socket and hang up; returns this host's address on the way, empty on a private socket.

    Raises `TransferFailed` if it must not be dialled, or does not answer.
    """
    remote = address.startswith("tcp://")
    addresses.check_address(address, server_key, remote=remote)
    if remote:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return check_reachable(rank, host.strip("[]"), int(port), "control socket")
    if not directories.listens(Path(address.removeprefix("ipc://"))):
        raise TransferFailed(f"rank {rank} finds no trainer at {address}")
    return ""


def interface_of(address: str) -> str:
    """The network interface that has this address, as ``name (address)``; the address alone if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return f"{name} ({address})"
    return address


def bracketed(address: str) -> str:
    """An address as it is written before a port: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def host_of(engine: str) -> str:
    """The host of an engine, by its URL or its name."""
    return in_process.host_of(engine) or _LOOPBACK


def to_error(failed: Failed, reporter: str) -> errors.WeightSyncError:
    """The exception for an error that the other side, named ``reporter``, has reported."""
    return errors.named(failed.error, TransferFailed)(f"{reporter}: {failed.message}")
