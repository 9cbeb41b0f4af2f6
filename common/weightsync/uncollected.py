"""Context in which the garbage collector is off."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Final


class _Off:
    """How many contexts are entered, in all threads, and whether the collector was on before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entered, self.before = 0, False


_off: Final = _Off()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: for code that makes many lasting objects, which every collection would read.

    One collection may read every object of the process, for which an engine or a trainer stands still: 0.2 s and more.
    It is on again once no thread is in such a context: a trainer and several engines may share a process. Not for
    work in slices, whose collector is off anyway: between two slices it would stay off.
    """
    with _off.lock:
        if not _off.entered:
            _off.before = gc.isenabled()
            gc.disable()
        _off.entered += 1
    try:
        yield
    finally:
        with _off.lock:
            _off.entered -= 1
            if _off.before and not _off.entered:
                gc.enable()
