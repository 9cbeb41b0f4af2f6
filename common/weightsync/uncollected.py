"""Context in which the garbage collector is off."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off: for code that makes many lasting objects, which every collection would read.

    One collection may read every object of the process, for which an engine or a trainer stands still: 0.2 s and more.
    Not for threads beside an engine's loop, which switches the collector itself.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
