"""Descriptors that a forked child must not keep.

A listening socket or a locked file shows that its owner lives. If a child process inherits it, such as a worker of a
data loader, the owner would still seem to live after it was killed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

_held: Final[set[int]] = set()
#: Held during a fork, so that none happens between opening a descriptor and recording it.
_lock: Final = threading.RLock()


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


def _in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
