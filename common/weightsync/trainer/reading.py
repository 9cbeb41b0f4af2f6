"""In which thread a push reads the trainer's tensors, and when it has read them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, Literal, TypeVar

from weightsync.errors import TransferFailed

_T = TypeVar("_T")
_Call = tuple[Future[Any], Callable[[], Any]]

How = Literal["copied", "sent", "in place"]
"""How a push read the trainer's tensors: it copied them before any engine was asked, or read them while it sent them,
or the engines read them in place until they had committed."""


class Reading:
    """Reads in the thread that drives the push: that of `sender.Sender.push`."""

    #: Whether the tensors are to be read as early as can be, since somebody waits for that alone.
    early: ClassVar[bool] = False
    #: Whether they may have changed since they were read, so that they cannot be read once more.
    over = False

    def __init__(self) -> None:
        self.how: How = "sent"

    def run(self, call: Callable[[], _T]) -> _T:
        """Make a call that reads the tensors."""
        return call()

    def finish(self) -> None:
        """Note that the tensors are not read any more, or are from now on read in place."""


class HandedReading(Reading):
    """Reads in the thread that calls `serve`, for a push that another thread drives.

    A trainer's tensors, and the code that makes them, may depend on the thread: on its CUDA device and stream, for
    example.
    """

    early = True

    def __init__(self) -> None:
        super().__init__()
        #: True for each call, then False. The call is kept apart: Ctrl-C loses what a queue has just returned.
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._asked: _Call | None = None
        self._lock = threading.Lock()
        self._finished = self._gone = False

    def run(self, call: Callable[[], _T]) -> _T:
        """As `Reading.run`. Raises `TransferFailed` if that thread was interrupted, and calls here after `finish`."""
        if self._finished:
            return call()
        answer: Future[_T] = Future()
        self._asked = answer, call
        self._turns.put(True)
        if self._gone:
            self._refuse()
        return answer.result()

    def finish(self) -> None:
        """As `Reading.finish`; `serve` returns."""
        self._finished, self.over = True, self.how != "in place"
        self._turns.put(False)

    def serve(self) -> None:
        """Make the calls of `run`, until `finish`."""
        try:
            while self._turns.get():
                self._serve_one()
        finally:
            self._gone = True
            self._refuse()

    def _serve_one(self) -> None:
        assert self._asked is not None, "there is one for each turn"
        answer, call = self._asked
        try:
            result = call()
        except BaseException as error:
            self._asked = None
            answer.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._asked = None
            answer.set_result(result)

    def _refuse(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            asked[0].set_exception(TransferFailed("push_async was interrupted before it had read the tensors"))
