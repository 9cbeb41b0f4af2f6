"""What the ranks of a trainer have in common, whichever part they take in a call of the `Sender`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import Weights, WeightSyncError
from weightsync.sources import Source
from weightsync.trainer.ranks.messages import Messages

#: How long after their deadline the others wait for rank 0 to say how it ended. Rank 0 knows who is missing and should
#: be the one to say so, may still have to ask the engines what became of a commit, and so ends that much earlier.
GRACE_S: Final = 1.0
EARLIER_S: Final = 0.5
#: How long rank 0 lets the others hear how it ended before it closes: the store may end with it.
HEARD_S: Final = 2.0
LOOK_S: Final = 0.002
_T = TypeVar("_T")

Act = Callable[[Source | None, Deadline], _T]
"""What rank 0 does with the engines."""


class Ranks(ABC):
    """This process's part among the ranks of its trainer."""

    def __init__(self) -> None:
        self._messages = Messages()
        self._session = ""
        #: What this rank has to send, in a push.
        self._source: Source | None = None

    def run(
        self,
        what: str,
        kind: Any,
        deadline: Deadline,
        act: Act[_T],
        offer: Callable[[], Source] | None,
        engines: Callable[[Deadline], Mapping[str, Weights]],
    ) -> _T:
        """Have rank 0 ``act``, and every rank return what that returns, which is of type ``kind``, or raise the same.

        ``offer`` opens what this rank has to send. ``engines`` are what they serve if nothing has happened to them. The
        first of the ranks' deadlines is that of all.
        """
        try:
            failure: Exception | None = None
            try:
                self._source = offer() if offer is not None else None
            except Exception as error:
                failure = error
            return self._take_part(what, kind, deadline, failure, act, engines)
        except WeightSyncError as error:
            if not error.engines:
                now = engines(deadline).items()
                error.settle({url: max(error.weights, state, key=errors.SEVERITY.index) for url, state in now})
            raise
        finally:
            self._source = None

    @abstractmethod
    def _take_part(
        self,
        what: str,
        kind: Any,
        deadline: Deadline,
        failure: Exception | None,
        act: Act[_T],
        engines: Callable[[Deadline], Mapping[str, Weights]],
    ) -> _T:
        """As `run`; ``failure`` is what kept this rank from opening what it has to send."""

    def _key(self, rank: int) -> str:
        return f"{self._session or 'build'}/{rank}"

    @abstractmethod
    def close(self) -> None:
        """Release memory and connection; idempotent."""
