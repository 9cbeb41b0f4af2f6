"""Context in which the garbage collector is off."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final

_lock: Final = threading.Lock()
#: How many contexts are entered, in all threads, and whether the collector was on before the first.
_entered = 0
_enabled = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: for code that makes many lasting objects, which every collection would read.

    One collection may read every object of the process, for which an engine or a trainer stands still: 0.2 s and more.
    It is on again once no thread is in such a context: a trainer and several engines may share a process. Not for
    threads beside an engine's loop, which switches the collector itself.
    """
    global _entered, _enabled
    with _lock:
        if not _entered:
            _enabled = gc.isenabled()
            gc.disable()
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if _enabled and not _entered:
                gc.enable()
