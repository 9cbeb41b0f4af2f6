"""Threads for calls that may never return."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class DaemonThread:
    """Makes calls in the order in which they are asked for, in one thread, or in up to ``most`` at a time.

    A process that ends does not wait for them, as it would for an executor's. Threads are started when they are needed.
    """

    def __init__(self, name: str, most: int = 1):
        self._name, self._most, self._started = name, most, 0
        self._calls: _Calls = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()
        #: Ends the threads after the calls that were asked for; also runs when this object is collected.
        self.close = weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], _T], answer: Future[_T] | None = None) -> Future[_T]:
        """Ask for a call, whose result ``answer`` gets, by default a new future. Raises `RuntimeError` once closed."""
        if not self.close.alive:
            raise RuntimeError(f"{self._name} is closed")
        answer = Future() if answer is None else answer
        self._calls.put((answer, call))
        with self._lock:
            if self._started < self._most and not self._idle.acquire(blocking=False):
                threading.Thread(target=_serve, args=(self._calls, self._idle), name=self._name, daemon=True).start()
                self._started += 1
        return answer


def _serve(calls: _Calls, idle: threading.Semaphore) -> None:
    while (request := calls.get()) is not None:
        answer, call = request
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
        del request, answer, call  # what they refer to must not live until the next request
        idle.release()
    calls.put(None)  # for the other threads
