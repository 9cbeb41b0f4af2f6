"""Descriptors that Ctrl-C must not leave open, and those that a forked child must not keep.

A listening socket, a connection or a locked file shows that its owner lives. If a child process inherits it, such as a
worker of a data loader, the owner would still seem to live after it was killed.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: Where connections lead to: host and port; without a host, the port of this process that others dial.
End = tuple[str, int]

_held: Final[set[int]] = set()
_files: Final[weakref.WeakSet[io.FileIO]] = weakref.WeakSet()
_ends: Final[list[End]] = []
#: Held during a fork, so that none happens between opening a descriptor and recording it.
_lock: Final = threading.RLock()


def opened(path: str | Path, flags: int) -> io.FileIO:
    """Open a file, private to this user if that makes it. Raises `OSError`.

    It is closed when nobody refers to it any more. No bytecode runs between the system's call and that: Python would
    raise KeyboardInterrupt there, and nobody would know of the descriptor, which keeps shared memory alive.
    """
    (file,) = map(io.FileIO, map(os.open, [path], [flags | os.O_CLOEXEC], [0o600]))
    return file


def own_file(path: str | Path, flags: int) -> io.FileIO:
    """As `opened`; it is closed in every child that Python forks later."""
    with _lock:
        file = opened(path, flags)
        _files.add(file)
        return file


def own(open_descriptor: Callable[[], int]) -> int:
    """Open a descriptor by calling ``open_descriptor``, and close it in every child that Python forks later."""
    with _lock:
        descriptor = open_descriptor()
        _held.add(descriptor)
        return descriptor


def disown(descriptor: int) -> None:
    """Forget a descriptor that is about to be closed."""
    with _lock:
        _held.discard(descriptor)


def own_connections(host: str, port: int) -> End:
    """Close in every child that Python forks later the TCP connections to ``host`` and ``port``.

    Without a host: those that this process has accepted at ``port``. A library has opened them, and does not say which
    descriptors they have.
    """
    with _lock:
        _ends.append((host, port))
    return host, port


def disown_connections(end: End) -> None:
    """Forget connections that are about to be closed."""
    with _lock, contextlib.suppress(ValueError):  # a child owns none
        _ends.remove(end)


def _close_connections() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was that of the folder, or is not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _is_owned(int(name)):
                os.close(int(name))


def _is_owned(descriptor: int) -> bool:
    one = socket.socket(fileno=descriptor)
    try:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        return ("", one.getsockname()[1]) in _ends or one.getpeername()[:2] in _ends
    finally:
        one.detach()


def _in_child() -> None:
    if _ends:
        _close_connections()
    _ends.clear()
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
    for file in list(_files):
        file.close()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
