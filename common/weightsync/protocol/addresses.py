"""Addresses of senders: what an engine checks before it dials one."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Final

from weightsync.errors import TransferFailed
from weightsync.protocol.directories import PREFIX, SOCKET_NAME, listens, why_not_private

#: Longest path of a Unix socket on Linux, in bytes.
_MAX_SOCKET_PATH: Final = 107
#: Seconds in which a sender on another host must accept a connection.
_PROBE_S: Final = 0.2
_TCP_ADDRESS: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})")
#: Length of a CURVE public key as ZMQ writes it.
_CURVE_KEY_CHARS: Final = 40


def owner_lives(address: str) -> bool:
    """Whether the sender at ``address`` still exists; assumed if its host does not answer at all.

    Raises `TransferFailed` if ``address`` must not be dialled.
    """
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
        except ConnectionRefusedError:
            return False
        except (OSError, ValueError):
            return True
        return True
    if not _ipc_path(address).parent.exists():
        return False  # a sender removes its directory when it closes
    return listens(Path(check_ipc_address(address).removeprefix("ipc://")))


def _ipc_path(address: str) -> Path:
    text = address.removeprefix("ipc://")
    path = Path(text)
    plain = text.isprintable() and text == str(path) and ".." not in path.parts
    fits = plain and len(os.fsencode(path)) <= _MAX_SOCKET_PATH
    ours = path.name == SOCKET_NAME and path.parent.name.startswith(PREFIX)
    if not (address.startswith("ipc:///") and fits and ours):
        raise TransferFailed(f"refused to dial {address!r}: not a sender's ipc address")
    return path


def check_ipc_address(address: str) -> str:
    """Return ``address`` if it is a socket in a private directory of this user; raise `TransferFailed` otherwise."""
    path = _ipc_path(address)
    if fault := why_not_private(path.parent):
        raise TransferFailed(f"refused to dial {address!r}: {fault}")
    if path.is_symlink():
        raise TransferFailed(f"refused to dial {address!r}: it is a symbolic link")
    return address


def check_tcp_address(address: str, server_key: str) -> str:
    """Return ``address`` if it is a numeric TCP address with a CURVE key; raise `TransferFailed` otherwise."""
    found = _TCP_ADDRESS.fullmatch(address)
    try:
        number = ipaddress.ip_address(found.group(1).strip("[]") if found else "")
        fits = (
            found is not None
            and not (number.is_unspecified or number.is_multicast)
            and 0 < int(found.group(2)) < 1 << 16
        )
    except ValueError:
        fits = False
    keyed = len(server_key) == _CURVE_KEY_CHARS and server_key.isascii() and server_key.isprintable()
    if not (fits and keyed):
        raise TransferFailed(f"refused to dial {address!r}: not a numeric TCP address of a sender, with its key")
    return address


def check_address(address: str, server_key: str, *, remote: bool) -> None:
    """Raise `TransferFailed` unless ``address`` may be dialled: TCP if the sender is ``remote``, else a Unix socket."""
    if remote:
        check_tcp_address(address, server_key)
    else:
        check_ipc_address(address)


def check_host_address(address: str) -> None:
    """Raise `TransferFailed` unless ``address`` is empty or a numeric TCP address."""
    if address:
        check_tcp_address(address, "k" * _CURVE_KEY_CHARS)
