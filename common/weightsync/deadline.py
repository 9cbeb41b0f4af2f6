"""One time budget for everything that a call waits for.

Every call of a `Sender` has one deadline. It starts before the call waits for anything, another thread's call included.
Each request tells the engine how long to wait for its ranks: a little less than the time left, so that the engine can
still report which rank did not answer. After the deadline a failed call takes at most 0.9 s more: 0.5 s for the engines
to report that a commit is still running, 0.25 s to ask for its outcome, the rest to abort the push.
"""

from __future__ import annotations

import time

from weightsync.errors import PushTimeout, WeightSyncError


class Deadline:
    """A time budget of ``seconds``, passed to every wait. Another thread may end it early, with a reason."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._reason: WeightSyncError | None = None

    def left(self) -> float:
        """Seconds left, never negative; 0 once the deadline was ended."""
        return 0.0 if self._reason else max(0.0, self._end - time.monotonic())

    def extended(self, seconds: float) -> Deadline:
        """A new deadline, ``seconds`` after this one's original end, even if this one was ended early."""
        later = Deadline(self.seconds)
        later._end = self._end + seconds
        return later

    @property
    def moment(self) -> float:
        """When the deadline passes, in seconds of this host's `time.monotonic`."""
        return self._end

    def advance(self, moment: float) -> None:
        """Bring the deadline forward to ``moment``, in seconds of `time.monotonic`; never push it back."""
        self._end = min(self._end, moment)

    def end(self, reason: WeightSyncError) -> None:
        """End the deadline now, because what is awaited will not come; the first reason is kept."""
        self._reason = self._reason or reason

    def check(self, waiting_for: str) -> None:
        """Raise once no time is left: the reason given to `end`, else `PushTimeout` that names ``waiting_for``."""
        if self._reason is not None:
            raise self._reason
        if self.left() == 0.0:
            raise PushTimeout(f"no answer within {self.seconds:g} s, waiting for {waiting_for}")
