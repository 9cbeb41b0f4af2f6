"""The base of both roles that a trainer's ranks have in a call of the `Sender`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import Weights, WeightSyncError
from weightsync.sources import Source
from weightsync.trainer.reading import Reading

#: Seconds that the other ranks wait for the outcome past their deadline, and seconds by which rank 0's deadline is
#: earlier: only rank 0 knows which rank is missing, and it may still have to ask the engines how a commit ended.
GRACE_S: Final = 1.0
_EARLIER_S: Final = 0.5
_T = TypeVar("_T")

Act = Callable[[Source | None, Deadline], _T]
"""What a call does with the engines; runs in rank 0."""


def earlier(deadline: Deadline) -> float:
    """Seconds by which rank 0's deadline is earlier than the others'."""
    return min(_EARLIER_S, deadline.seconds / 10)


class Ranks(ABC):
    """This process's role in a trainer of several processes."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._session = ""
        #: What this rank sends in a push.
        self._source: Source | None = None

    def run(
        self,
        what: str,
        kind: Any,
        deadline: Deadline,
        act: Act[_T],
        open_model: Callable[[], Source] | None,
        engines: Callable[[Deadline], Mapping[str, Weights]],
        reading: Reading,
    ) -> _T:
        """Run ``act`` in rank 0; every rank returns its result, of type ``kind``, or raises the same error.

        ``open_model`` opens what this rank sends, which is read as ``reading`` says. ``engines`` returns what each
        engine serves, for an error that does not say so. The earliest of the ranks' deadlines holds for all of them.
        """
        try:
            failure: Exception | None = None
            try:
                self._source = reading.run(open_model) if open_model is not None else None
            except Exception as error:
                failure = error
            return self._take_part(what, kind, deadline, failure, act, engines, reading)
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
        reading: Reading,
    ) -> _T:
        """As `run`; ``failure`` is what ``open_model`` raised, if it did."""

    def _greeting_name(self, rank: int) -> str:
        return f"{self._session or 'build'}/{rank}"

    @abstractmethod
    def close(self) -> None:
        """Release memory and connection; idempotent."""
