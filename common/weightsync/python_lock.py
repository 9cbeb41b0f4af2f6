"""Python's lock, for a thread that works beside a loop which holds it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

#: Seconds for which a thread keeps Python's lock from others.
_SOON_S: Final = 0.0005
#: Seconds for which an idle loop leaves Python's lock to whoever has asked for it.
_REST_S: Final = 0.002


class _Asked:
    """How many threads ask for the lock to be passed soon, and what was set before the first of them did."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.threads, self.before_s = 0, 0.0


_asked: Final = _Asked()


@contextlib.contextmanager
def passed_soon() -> Iterator[None]:
    """Have every thread of this process pass Python's lock on soon.

    A thread that gives it up for a function of torch waits for it afterwards: by default up to 5 ms each time, if an
    idle engine's loop polls. A push calls many such functions. What others set meanwhile is not kept.
    """
    with _asked.lock:
        if not _asked.threads:
            _asked.before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_SOON_S, _asked.before_s))
        _asked.threads += 1
    try:
        yield
    finally:
        with _asked.lock:
            _asked.threads -= 1
            if not _asked.threads:
                sys.setswitchinterval(_asked.before_s)


def rest() -> None:
    """Called by a loop that has nothing to do: leave Python's lock for a moment to threads in `passed_soon`, if any."""
    if _asked.threads:
        time.sleep(_REST_S)
