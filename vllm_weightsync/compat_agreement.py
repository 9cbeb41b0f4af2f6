"""Agreement of vLLM engines in lockstep, whose replicas take every step together (`protocol.lockstep`).

`install` adds a method to the engine core: a yes-or-no question that the cores of all servers answer in the store that
they share. While a core waits for an answer, or its server is between two questions of a push, it counts in the store;
a replica that no longer counts has died or is frozen, and the answer is no. `compat_waves` checks the names that are
used here, which it uses too.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Final

from vllm_weightsync import compat_waves

AGREE: Final = "weightsync_agree"
#: The steps of a push, in order: all are asked to commit, all have loaded, all have loaded the version before again.
BEGIN, APPLIED, RESTORED = STEPS = ("begin", "applied", "restored")
_YES, _NO = b"yes", b"no"
#: Seconds between two counts, and after the last count until a replica is taken for dead.
_COUNT_S: Final = 1.0
_SILENT_S: Final = 20.0
#: Seconds that a replica counts at most: more than a push may take.
_LONGEST_S: Final = 90000.0
#: Seconds of the shortest wait.
_LEAST_S: Final = 0.01


def _agree(self: Any, push: str, step: str, yes: bool, until: float) -> Future[bool]:
    """Whether all replicas have said yes in this step of a push; no if one says no, or nothing before ``until``.

    ``until`` is of `time.monotonic`, in seconds. Every replica that asks gets the same answer.
    """
    answer: Future[bool] = Future()
    voice = _Voice(self, push)
    threading.Thread(target=voice.answer, args=(step, yes, until, answer), name="weightsync-agree", daemon=True).start()
    return answer


class _Voice:
    """What one replica says of a push, over a connection of its own: whoever waits for a store blocks its users."""

    def __init__(self, core: Any, push: str):
        self._core, self._push = core, push

    def answer(self, step: str, yes: bool, until: float, answer: Future[bool]) -> None:
        """Put the answer of all, or an error, into ``answer``."""
        try:
            store = self._core.dp_store.clone()
            agreed = self._agreed(store, step, yes, until)
        except Exception as error:
            answer.set_exception(error)
            return
        answer.set_result(agreed)
        if step == BEGIN and agreed:
            self._count_until_over(store)

    def _agreed(self, store: Any, step: str, yes: bool, until: float) -> bool:
        if not yes or time.monotonic() > until:  # the server no longer waits for an answer that comes late
            compat_waves.decide(store, self._about(step), _NO)
        elif store.add(self._key(step, "yes"), 1) == self._core.dp_size:
            compat_waves.decide(store, self._about(step), _YES)
        others = _Others(store, [self._count_of(rank) for rank in range(self._core.dp_size)])
        while not _is_there(store, self._key(step, "decided"), min(_COUNT_S, until - time.monotonic())):
            silent = step != BEGIN and others.silent_s() > _SILENT_S
            if silent or time.monotonic() > until:
                compat_waves.decide(store, self._about(step), _NO)
        return bool(store.get(self._key(step, "decided")) == _YES)

    def _count_until_over(self, store: Any) -> None:
        """Count while the push may still be under way here."""
        end = time.monotonic() + _LONGEST_S
        try:
            while time.monotonic() < end and not self._is_over(store):
                store.add(self._count_of(self._core.dp_rank), 1)
        except RuntimeError:  # the store has ended, and every replica with it
            return

    def _is_over(self, store: Any) -> bool:
        """Whether all have loaded, or the version before again; waits a moment."""
        if not _is_there(store, self._key(APPLIED, "decided"), _COUNT_S):
            return False
        return store.get(self._key(APPLIED, "decided")) == _YES or _is_there(
            store, self._key(RESTORED, "decided"), _COUNT_S
        )

    def _about(self, step: str) -> str:
        return f"{self._push}/{step}"

    def _key(self, step: str, what: str) -> str:
        return compat_waves.key(self._about(step), what)

    def _count_of(self, rank: int) -> str:
        return compat_waves.key(self._push, f"count of {rank}")


class _Others:
    """When the replica that has been silent longest last counted."""

    def __init__(self, store: Any, keys: list[str]):
        self._store, self._seen = store, dict.fromkeys(keys, (-1, time.monotonic()))

    def silent_s(self) -> float:
        """For how long, in seconds."""
        now = time.monotonic()
        for key, (before, _) in self._seen.items():
            if (count := self._store.add(key, 0)) != before:
                self._seen[key] = count, now
        return now - min(since for _, since in self._seen.values())


def _is_there(store: Any, key: str, timeout_s: float) -> bool:
    """Whether there is such a key, by the end of a timeout at most."""
    try:
        store.wait([key], timedelta(seconds=max(timeout_s, _LEAST_S)))
    except RuntimeError:
        return bool(store.check([key]))  # raises if the store has ended
    return True


def install() -> None:
    """Add the method to the engine core; called in every process of vLLM, maybe more than once."""
    from vllm.v1.engine.core import DPEngineCoreProc

    setattr(DPEngineCoreProc, AGREE, _agree)
