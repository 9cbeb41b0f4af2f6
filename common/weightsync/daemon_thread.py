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
        #: Ends the threads; also runs when this object is collected.
        self._close = weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], _T], answer: Future[_T] | None = None) -> Future[_T]:
        """Ask for a call, whose result ``answer`` gets, by default a new future. Raises `RuntimeError` once closed."""
        answer = Future() if answer is None else answer
        with self._lock:
            if not self._close.alive:
                raise RuntimeError(f"{self._name} is closed")
            if self._started < self._most and not self._idle.acquire(blocking=False):
                threading.Thread(target=_serve, args=(self._calls, self._idle), name=self._name, daemon=True).start()
                self._started += 1
            self._calls.put((answer, call))
        return answer

    def close(self) -> None:
        """End the threads after the calls that were asked for; idempotent."""
        with self._lock:  # a call that is asked for meanwhile stands in front of the end, or is refused
            self._close()


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
