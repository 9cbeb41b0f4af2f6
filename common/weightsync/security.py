"""The key, and the private places where sender and engine meet on one host."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from weightsync.errors import AuthenticationFailed, TransferFailed

TOKEN_VARIABLE: Final = "WEIGHTSYNC_TOKEN"
SOCKET_NAME: Final = "control"
_PREFIX: Final = "weightsync-"
#: A directory younger than this may be one whose owner has not bound its socket yet.
_SWEEP_AFTER_S: Final = 10.0
#: Longest path of a Unix socket that Linux takes, in bytes, and that less the socket's own name.
_MAX_SOCKET_PATH: Final = 107
_MAX_SOCKET_DIRECTORY: Final = 90
#: How long a sender on another host is given to take a connection.
_PROBE_S: Final = 0.2
_TCP_ADDRESS: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})")
#: A public key as ZMQ spells it.
_CURVE_KEY_CHARS: Final = 40


def runtime_directory() -> Path:
    """This user's directory for run-time files, mode 0700, made if absent.

    ``$XDG_RUNTIME_DIR/weightsync`` where a session manager provides that, else a directory of the system's temporary
    folder named after the user. Raises `AuthenticationFailed` if somebody else prepared it.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(base) / "weightsync" if base else Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthenticationFailed(f"the run-time directory {path} cannot be made: {error.strerror}") from error
    if fault := _not_private(path):
        raise AuthenticationFailed(f"the run-time directory {path} cannot be trusted: {fault}; remove it")
    return path


def _not_private(directory: Path) -> str:
    """Why a directory is not this user's own and closed to others; empty if it is."""
    try:
        info = directory.lstat()
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a directory"
    if info.st_uid != os.geteuid():
        return f"it belongs to user {info.st_uid}"
    if info.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(info.st_mode):04o}, not 0700"
    return ""


def _token_file() -> Path:
    return runtime_directory() / "token"


def _read_token(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise AuthenticationFailed(f"the key file {path} cannot be read: {error.strerror}; remove it") from error
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as file:
        info = os.fstat(descriptor)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise AuthenticationFailed(f"the key file {path} is not this user's alone (0600); remove it")
        return usable(file.read())


def usable(token: str) -> str:
    """The key without white space around it. Raises `AuthenticationFailed`, not naming it, if HTTP cannot carry it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationFailed("the key holds characters that HTTP cannot carry; use printable ASCII")
    return token


def engine_token() -> str:
    """The key an engine asks for: ``$WEIGHTSYNC_TOKEN``, else this user's key file, written if absent (0600)."""
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        return token
    path = _token_file()
    # Several engines may start at once: the link is atomic, the losers read the winner's key.
    descriptor, draft = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)
    return _read_token(path)


def sender_token() -> str:
    """The key a sender shows; empty where neither the variable nor the key file exists."""
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        return token
    return _read_token(_token_file())


def shown_key(authorization: str) -> str:
    """The key in that header of a request; empty, which is nobody's, where there is none."""
    scheme, _, shown = authorization.partition(" ")
    return shown if scheme.lower() == "bearer" else ""


def same(shown: str, token: str) -> bool:
    """Compare keys in constant time; an empty key never matches."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())


def private_directory() -> Path:
    """A new directory, mode 0700, for one sender's socket; the caller removes it."""
    root = runtime_directory()
    if len(str(root)) > _MAX_SOCKET_DIRECTORY - 20:
        root = Path(tempfile.gettempdir())
    sweep(root)
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))


def sweep(root: Path, older_than_s: float = _SWEEP_AFTER_S) -> None:
    """Remove this user's directories below ``root`` at whose socket nobody listens any more."""
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            old = time.time() - directory.lstat().st_ctime >= older_than_s
            if old and not _not_private(directory) and not listens(directory / SOCKET_NAME):
                shutil.rmtree(directory)


def listens(path: Path) -> bool:
    """Whether somebody owns the socket, be it somebody who is stopped and does not answer."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its queue is full
        return True


def owner_lives(address: str) -> bool:
    """Whether the sender at an address is still there; one whose host does not answer at all is taken to be.

    Raises `TransferFailed` for an address that is none.
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
        return False  # it took its directory with it
    return listens(Path(check_ipc_address(address).removeprefix("ipc://")))


def _ipc_path(address: str) -> Path:
    text = address.removeprefix("ipc://")
    path = Path(text)
    plain = text.isprintable() and text == str(path) and ".." not in path.parts
    fits = plain and len(os.fsencode(path)) <= _MAX_SOCKET_PATH
    ours = path.name == SOCKET_NAME and path.parent.name.startswith(_PREFIX)
    if not (address.startswith("ipc:///") and fits and ours):
        raise TransferFailed(f"refused to dial {address!r}: not a sender's ipc address")
    return path


def check_ipc_address(address: str) -> str:
    """The address, if it is a socket in a private directory of this user. Raises `TransferFailed`."""
    path = _ipc_path(address)
    if fault := _not_private(path.parent):
        raise TransferFailed(f"refused to dial {address!r}: {fault}")
    if path.is_symlink():
        raise TransferFailed(f"refused to dial {address!r}: it is a link")
    return address


def check_tcp_address(address: str, server_key: str) -> str:
    """The address, if it is of TCP, by number and with a CURVE key. Raises `TransferFailed`."""
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
        raise TransferFailed(f"refused to dial {address!r}: not a sender's TCP address, by number and with its key")
    return address


def check_address(address: str, server_key: str, *, remote: bool) -> None:
    """Raise `TransferFailed` for what must not be dialled: ``remote`` senders have a TCP address, others a socket."""
    if remote:
        check_tcp_address(address, server_key)
    else:
        check_ipc_address(address)


def check_host_address(address: str) -> None:
    """Raise `TransferFailed` unless the address is empty or one of TCP, by number."""
    if address:
        check_tcp_address(address, "k" * _CURVE_KEY_CHARS)
