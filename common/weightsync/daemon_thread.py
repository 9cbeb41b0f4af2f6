"""A thread for calls that may never return."""

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
    """Makes calls one after the other in one thread, which does not keep the process alive as an executor's would."""

    def __init__(self, name: str):
        self._calls: _Calls = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls,), name=name, daemon=True).start()
        #: Ends the thread after the calls that were asked for; also runs when this object is collected.
        self.close = weakref.finalize(self, self._calls.put, None)

    def submit(self, call: Callable[[], _T], answer: Future[_T] | None = None) -> Future[_T]:
        """Ask for a call, whose result ``answer`` gets, by default a new future."""
        answer = Future() if answer is None else answer
        self._calls.put((answer, call))
        return answer


def _serve(calls: _Calls) -> None:
    while (request := calls.get()) is not None:
        answer, call = request
        if answer.set_running_or_notify_cancel():
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
        del request, answer, call  # what they refer to must not live until the next request
