"""Serialises the calls that several threads make to one sender."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout


class Turns:
    """A lock with a deadline. The thread that holds it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._current = ""

    @contextmanager
    def take(self, what: str, deadline: Deadline) -> Iterator[None]:
        """Hold the lock inside the context, for the call ``what``. Raises `PushTimeout` with the call in progress."""
        if not self._lock.acquire(timeout=deadline.left()):
            raise PushTimeout(
                f"{what}: another thread is in {self._current} of this sender and did not finish within "
                f"{deadline.seconds:g} s; no engine was contacted"
            )
        before, self._current = self._current, what
        try:
            yield
        finally:
            self._current = before
            self._lock.release()
