"""Arenas that a sender lends before its first push, of which mapping them takes as much time as the transfer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weightsync.daemon_thread import DaemonThread
from weightsync.protocol.expected import Lent, StandbyRequest
from weightsync.transports.base import Borrower, EngineEnd

logger = logging.getLogger(__name__)


class Borrowing:
    """Maps them in the thread that receives pushes. What cannot be mapped, the first push maps."""

    def __init__(self, thread: DaemonThread, end: Callable[[str], EngineEnd]):
        self._thread, self._end, self._name = thread, end, ""
        self._ended = threading.Event()
        self._ended.set()
        #: Waits for so many seconds, and returns whether nothing is being mapped.
        self.wait = self._ended.wait

    def begin(self, asked: StandbyRequest) -> None:
        """Begin to map what is lent with a request; once, however often it is asked."""
        if isinstance(lent := asked.lent, Lent) and asked.name != self._name:
            self._name, end = asked.name, self._end(lent.transport)
            if isinstance(end, Borrower):
                self._ended.clear()
                self._thread.submit(lambda: self._borrow(end, lent))

    def _borrow(self, end: Borrower, lent: Lent) -> None:
        try:
            end.borrow(lent)
        except Exception as error:
            logger.info("an arena cannot be mapped before the first push: %s", error)
        finally:
            self._ended.set()
