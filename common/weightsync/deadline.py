"""One budget of seconds for everything that a call waits for.

A call of a `Sender` has one, which starts before anything is waited for, another thread's turn included. Each request
tells the engine how long to wait for its ranks, a little less than is left, so that the engine can still say whom it
waited for. After the deadline a failed call has 0.9 s in all: 0.5 s for the engines to say that a commit is not over,
0.25 s to ask what became of it, the rest to have them forget it.
"""

from __future__ import annotations

import time

from weightsync.errors import PushTimeout, WeightSyncError


class Deadline:
    """One budget of seconds, handed down to every wait. Another thread may end it early, with the reason."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._reason: WeightSyncError | None = None

    def left(self) -> float:
        """Seconds left, never negative."""
        return 0.0 if self._reason else max(0.0, self._end - time.monotonic())

    def extended(self, seconds: float) -> Deadline:
        """One that ends ``seconds`` after this one would have, ended early or not."""
        later = Deadline(self.seconds)
        later._end = self._end + seconds
        return later

    @property
    def moment(self) -> float:
        """When it is over, by this host's `time.monotonic`."""
        return self._end

    def advance(self, moment: float) -> None:
        """Be over by then at the latest."""
        self._end = min(self._end, moment)

    def end(self, reason: WeightSyncError) -> None:
        """Spend the budget at once: what is waited for will not come."""
        self._reason = self._reason or reason

    def check(self, waiting_for: str) -> None:
        """Raise, once the budget is spent, the reason it was ended for, else `PushTimeout` naming what was awaited."""
        if self._reason is not None:
            raise self._reason
        if self.left() == 0.0:
            raise PushTimeout(f"no answer within {self.seconds:g} s, waiting for {waiting_for}")
