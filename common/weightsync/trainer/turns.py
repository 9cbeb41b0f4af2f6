"""Threads of one trainer that use one sender: one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weightsync.deadline import Deadline
from weightsync.errors import PushTimeout


class Turns:
    """Whose turn it is. A thread that has it may take it again."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._doing = ""

    @contextmanager
    def take(self, what: str, deadline: Deadline) -> Iterator[None]:
        """Inside, it is the turn of this thread, for ``what``. Raises `PushTimeout`, naming what others are doing."""
        if not self._lock.acquire(timeout=deadline.left()):
            raise PushTimeout(
                f"{what}: another thread is in {self._doing} of this sender, and was not done with it within "
                f"{deadline.seconds:g} s; no engine was asked for anything"
            )
        before, self._doing = self._doing, what
        try:
            yield
        finally:
            self._doing = before
            self._lock.release()
