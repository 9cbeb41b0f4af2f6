"""The key, and the private places where sender and engine meet on one host."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import Final

from weightsync.errors import AuthenticationFailed, TransferFailed

logger = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "WEIGHTSYNC_TOKEN"
SHM_DIRECTORY: Final = Path("/dev/shm")
SOCKET_NAME: Final = "control"
#: What a sender calls its directory, and its arenas.
OWN_NAME: Final = re.compile(r"weightsync-[0-9]+-[0-9a-f]{16}")
_KEY_NAME: Final = "token"
_PREFIX: Final = "weightsync-"
#: A directory younger than this may be one whose owner has not bound its socket yet.
_SWEEP_AFTER_S: Final = 10.0
#: Longest path of a Unix socket that Linux takes, in bytes.
_MAX_SOCKET_PATH: Final = 107
#: How long a sender on another host is given to take a connection.
_PROBE_S: Final = 0.2
_TCP_ADDRESS: Final = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[0-9.]+):([0-9]{1,5})")
#: A public key as ZMQ spells it.
_CURVE_KEY_CHARS: Final = 40


def directory() -> Path:
    """Where this user's processes on this host meet: ``weightsync-UID`` beside the arenas, mode 0700, made if absent.

    It does not depend on the environment, which differs between a login and what cron, slurm or sudo starts, and does
    not go with the session in which a process was started. Raises `AuthenticationFailed` if it cannot be trusted.
    """
    return _private(SHM_DIRECTORY / f"{_PREFIX}{os.geteuid()}")


def _private(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthenticationFailed(f"the directory {path} cannot be made: {error.strerror}") from error
    if fault := _not_private(path):
        raise AuthenticationFailed(f"the directory {path} cannot be trusted: {fault}; remove it")
    return path


def meeting() -> str:
    """Equal for two processes that can meet in `directory`; of one that has none, its user's number alone."""
    try:
        return f"{os.geteuid()} {directory().stat().st_ino}"
    except AuthenticationFailed:
        return str(os.geteuid())


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


def _homes() -> list[Path]:
    """The directories that may hold this user's key; the first that does counts.

    The first is where everybody looks. The others are those of earlier senders and engines, and one of them outlives
    what a login manager removes from shared memory when its user has logged out.
    """
    base, own = os.environ.get("XDG_RUNTIME_DIR"), f"{_PREFIX}{os.geteuid()}"
    older = [Path(base) / "weightsync"] if base else []
    return [SHM_DIRECTORY / own, *older, Path(tempfile.gettempdir()) / own]


def _read_key(path: Path) -> str:
    """The key in a file, empty where there is none. Raises `AuthenticationFailed` for one that others can read."""
    if _not_private(path.parent):
        return ""
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


def _write_key(path: Path, key: str) -> None:
    """Write a key file, unless there is one. Raises `AuthenticationFailed` if that cannot be done."""
    try:
        # Several engines may start at once: the link is atomic, the losers read the winner's key.
        descriptor, draft = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(key)
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
        finally:
            os.unlink(draft)
    except OSError as error:
        raise AuthenticationFailed(f"the key file {path} cannot be written: {error.strerror}") from error


def usable(token: str) -> str:
    """The key without white space around it. Raises `AuthenticationFailed`, not naming it, if HTTP cannot carry it."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise AuthenticationFailed("the key holds characters that HTTP cannot carry; use printable ASCII")
    return token


def engine_token() -> str:
    """The key an engine asks for: ``$WEIGHTSYNC_TOKEN``, else that of this user's key file, written if absent (0600).

    Where from is logged. Raises `AuthenticationFailed` if no directory can hold a key file, or others can read it.
    """
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        logger.warning("weightsync asks for the key of %s", TOKEN_VARIABLE)
        return token
    homes, faults = [], []
    for home in _homes():
        try:
            homes.append(_private(home))
        except AuthenticationFailed as error:
            faults.append(str(error))
    if not homes:
        raise AuthenticationFailed(f"there is no place for the key; set {TOKEN_VARIABLE}: {'; '.join(faults)}")
    first = homes[0] / _KEY_NAME
    found = (key for home in homes if (key := _read_key(home / _KEY_NAME)))
    _write_key(first, next(found, "") or secrets.token_urlsafe(32))
    token = _read_key(first)
    for home in homes[1:]:
        with contextlib.suppress(AuthenticationFailed):  # it is for older senders, and for later
            _write_key(home / _KEY_NAME, token)
    # Engines show what libraries say from warnings on.
    logger.warning("weightsync asks for the key in %s%s", first, "".join(f"; {fault}" for fault in faults))
    return token


def sender_token() -> str:
    """The key a sender shows; empty where neither the variable nor a key file exists."""
    if token := usable(os.environ.get(TOKEN_VARIABLE, "")):
        return token
    return next((key for home in _homes() if (key := _read_key(home / _KEY_NAME))), "")


def origin(token: str) -> str:
    """Where a sender's key is from, for an error; the key itself is not told."""
    files = [home / _KEY_NAME for home in _homes()]
    if not token:
        return f"missing ({TOKEN_VARIABLE} is not set, and there is no key file {' or '.join(map(str, files))})"
    if same(token, os.environ.get(TOKEN_VARIABLE, "").strip()):
        return f"that of {TOKEN_VARIABLE}"
    with contextlib.suppress(AuthenticationFailed):
        for file in files:
            if same(token, _read_key(file)):
                return f"that in {file}"
    return "the one that the sender was given"


def shown_key(authorization: str) -> str:
    """The key in that header of a request; empty, which is nobody's, where there is none."""
    scheme, _, shown = authorization.partition(" ")
    return shown if scheme.lower() == "bearer" else ""


def same(shown: str, token: str) -> bool:
    """Compare keys in constant time; an empty key never matches."""
    return bool(token) and hmac.compare_digest(shown.encode(), token.encode())


def private_directory() -> Path:
    """A new directory, mode 0700, for one sender's socket; the caller removes it by `remove`."""
    root = directory()
    sweep()
    path = root / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    return path


def remove(path: Path) -> None:
    """Remove a sender's directory and its socket; one that holds anything else is left as it is."""
    with contextlib.suppress(OSError):
        if set(os.listdir(path)) <= {SOCKET_NAME}:
            (path / SOCKET_NAME).unlink(missing_ok=True)
            path.rmdir()


def sweep(older_than_s: float = _SWEEP_AFTER_S) -> None:
    """Remove this user's directories at whose socket nobody listens any more; nothing that a sender has not made."""
    for path in directory().iterdir():
        if not OWN_NAME.fullmatch(path.name) or _not_private(path):
            continue
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_ctime >= older_than_s
            if old and not listens(path / SOCKET_NAME):
                remove(path)


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
