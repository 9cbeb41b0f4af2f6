"""Mapping an arena takes as long as the transfer: a sender lends its own before the first push."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from weightsync.daemon_thread import DaemonThread
from weightsync.protocol.expected import Lent, StandbyRequest
from weightsync.transports.base import Borrower, EngineEnd

logger = logging.getLogger(__name__)

#: How many requests are remembered: one is asked again and again, and several may be under way.
_REMEMBERED: Final = 16


class Borrowing:
    """Maps arenas in the thread that receives pushes. What cannot be mapped, the first push maps.

    The methods belong to the engine's loop.
    """

    def __init__(self, thread: DaemonThread, end: Callable[[str], EngineEnd]):
        self._thread, self._end = thread, end
        self._asked: deque[str] = deque(maxlen=_REMEMBERED)
        #: Who has mapped what was lent last.
        self._borrower: Borrower | None = None
        self._ended = threading.Event()
        self._ended.set()
        #: Waits for so many seconds, and returns whether nothing is being mapped.
        self.wait = self._ended.wait

    def begin(self, asked: StandbyRequest) -> None:
        """Begin to map what is lent with a request, once, and only if nothing else is being mapped."""
        lent = asked.lent
        if not isinstance(lent, Lent) or asked.name in self._asked or not self._ended.is_set():
            return
        self._asked.append(asked.name)
        end = self._end(lent.transport)
        if isinstance(end, Borrower):
            self.give_back(but=lent.address)
            self._borrower = end
            self._ended.clear()
            self._thread.submit(lambda: self._borrow(end, lent))

    def give_back(self, but: str) -> None:
        """Unmap what another sender than the one at this address lent. Nothing is being mapped."""
        if self._borrower is not None:
            self._borrower.give_back(but)

    def _borrow(self, end: Borrower, lent: Lent) -> None:
        try:
            end.borrow(lent)
        except Exception as error:
            logger.info("an arena cannot be mapped before the first push: %s", error)
        finally:
            self._ended.set()
