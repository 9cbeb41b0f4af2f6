"""The private directories in which a sender's sockets lie, on one host."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import Final

from weightsync.errors import AuthenticationFailed

SHM_DIRECTORY: Final = Path("/dev/shm")
SOCKET_NAME: Final = "control"
PREFIX: Final = "weightsync-"
#: What a sender calls its directory, and its arenas.
OWN_NAME: Final = re.compile(r"weightsync-[0-9]+-[0-9a-f]{16}")
#: A directory younger than this may be one whose owner has not bound its socket yet.
_SWEEP_AFTER_S: Final = 10.0


def directory() -> Path:
    """Where this user's processes on this host meet: ``weightsync-UID`` beside the arenas, mode 0700, made if absent.

    It does not depend on the environment, which differs between a login and what cron, slurm or sudo starts, and does
    not go with the session in which a process was started. Raises `AuthenticationFailed` if it cannot be trusted.
    """
    return private(SHM_DIRECTORY / f"{PREFIX}{os.geteuid()}")


def private(path: Path) -> Path:
    """A directory that is this user's alone, made if absent. Raises `AuthenticationFailed` if it is not."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthenticationFailed(f"the directory {path} cannot be made: {error.strerror}") from error
    if fault := why_not_private(path):
        raise AuthenticationFailed(f"the directory {path} cannot be trusted: {fault}; remove it")
    return path


def meeting() -> str:
    """Equal for two processes that can meet in `directory`; of one that has none, its user's number alone."""
    try:
        return f"{os.geteuid()} {directory().stat().st_ino}"
    except AuthenticationFailed:
        return str(os.geteuid())


def why_not_private(directory: Path) -> str:
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


def private_directory() -> Path:
    """A new directory, mode 0700, for one sender's socket; the caller removes it by `remove`."""
    root = directory()
    sweep()
    path = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
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
        if not OWN_NAME.fullmatch(path.name) or why_not_private(path):
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
