"""The private directories on one host that hold senders' sockets and this user's key file."""

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
#: The label that an engine with several servers serves, beside their socket; what a process writes before has a suffix.
LABEL_NAME: Final = "label"
_OWN_FILES: Final = re.compile(rf"{SOCKET_NAME}|{LABEL_NAME}(\.[0-9]+)?")
PREFIX: Final = "weightsync-"
#: Names of a sender's directory and of its arenas.
OWN_NAME: Final = re.compile(r"weightsync-[0-9]+-[0-9a-f]{16}")
#: In seconds: the owner of a younger directory may not have bound its socket yet.
_SWEEP_AFTER_S: Final = 10.0


def directory() -> Path:
    """The directory that all of this user's processes on this host share: ``/dev/shm/weightsync-UID``, mode 0700.

    Created if absent. Its path does not depend on the environment, which differs between a login shell and processes
    started by cron, slurm or sudo, and it is not removed with a login session's runtime directory. Raises
    `AuthenticationFailed` if it is not private to this user.
    """
    return private(SHM_DIRECTORY / f"{PREFIX}{os.geteuid()}")


def private(path: Path) -> Path:
    """The directory ``path``, created with mode 0700 if absent.

    Raises `AuthenticationFailed` if it cannot be created or is not private to this user.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AuthenticationFailed(f"the directory {path} cannot be created: {error.strerror}") from error
    if fault := why_not_private(path):
        raise AuthenticationFailed(f"the directory {path} cannot be trusted: {fault}; remove it")
    return path


def meeting() -> str:
    """Equal for two processes that share `directory`; only the user's number if this process cannot use it."""
    try:
        return f"{os.geteuid()} {directory().stat().st_ino}"
    except AuthenticationFailed:
        return str(os.geteuid())


def why_not_private(directory: Path) -> str:
    """Why ``directory`` is not private to this user; empty if it is."""
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
    """Create a directory, mode 0700, for one sender's socket; the caller removes it with `remove`."""
    root = directory()
    sweep()
    path = root / f"{PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    return path


def remove(path: Path) -> None:
    """Remove a directory of a sender, or of an engine's servers; one that holds anything else is left alone."""
    with contextlib.suppress(OSError):
        names = os.listdir(path)
        if all(map(_OWN_FILES.fullmatch, names)):
            for name in names:
                (path / name).unlink(missing_ok=True)
            path.rmdir()


def sweep(older_than_s: float = _SWEEP_AFTER_S) -> None:
    """Remove this user's sender directories whose sockets have no listener any more, if they are old enough.

    Leaves alone whatever no sender has created.
    """
    for path in directory().iterdir():
        if not OWN_NAME.fullmatch(path.name) or why_not_private(path):
            continue
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_ctime >= older_than_s
            if old and not listens(path / SOCKET_NAME):
                remove(path)


def listens(path: Path) -> bool:
    """Whether a process listens on the socket at ``path``, even one that is stopped and does not answer."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # a listener whose queue is full
        return True
