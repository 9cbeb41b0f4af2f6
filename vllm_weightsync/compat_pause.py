"""As `compat`, which checks the names: vLLM's engine core, where requests are scheduled and memory is put to sleep.

`install` gives every engine core methods that the front end calls as vLLM's own utilities. They let a push stop the
engine without taking part in the pauses of others: what a user orders meanwhile is remembered, and holds afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

HOLD: Final = "weightsync_hold"
LET_GO: Final = "weightsync_let_go"
ASLEEP: Final = "weightsync_asleep"
_ATTRIBUTE: Final = "_weightsync_held"


class HeldScheduler:
    """A scheduler that a push has stopped, or that must not go on after one that failed.

    Every way to pause and to resume in vLLM ends in the scheduler's ``set_pause_state``: while this is there, it is
    answered here. ``refused`` says why nobody may resume; where it is empty, whoever does is heard when the push ends.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._set: Callable[[Any], None] = scheduler.set_pause_state
        self._ordered = scheduler.pause_state
        self._ours = False
        self.refused = ""
        scheduler.set_pause_state = self._order

    def _order(self, state: Any) -> None:
        if self._ours:
            self._set(state)
            return
        if state == type(state).UNPAUSED and self.refused:
            raise RuntimeError(f"weightsync: {self.refused}")
        self._ordered = state

    def pause(self, core: Any, mode: str) -> Future[Any] | None:
        """Pause as vLLM does it; the future is done when no request is in flight that was to finish first."""
        if mode == "wait" and self._scheduler.pause_state == type(self._ordered).PAUSED_ALL:
            mode = "keep"  # somebody has frozen the requests: they finish when that one resumes
        self._ours = True
        try:
            paused: Future[Any] | None = core.pause_scheduler(mode=mode, clear_cache=False)
        finally:
            self._ours = False
        return paused

    def freeze(self) -> None:
        """Nothing runs any more, whatever pause it was."""
        self._set(type(self._ordered).PAUSED_ALL)

    def end(self) -> None:
        """The scheduler does again what users have ordered."""
        del self._scheduler.set_pause_state
        self._set(self._ordered)


def _hold(self: Any, mode: str, refused: str) -> Future[Any] | None:
    """Stop for a push, in vLLM's pause ``mode``; or, where that is empty, stay stopped because of ``refused``."""
    held: HeldScheduler | None = self.__dict__.get(_ATTRIBUTE)
    if held is None:
        held = self.__dict__[_ATTRIBUTE] = HeldScheduler(self.scheduler)
    held.refused = refused
    if mode:
        return held.pause(self, mode)
    held.freeze()
    return None


def _let_go(self: Any) -> None:
    """The push is over."""
    held = self.__dict__.pop(_ATTRIBUTE, None)
    if held is not None:
        held.end()


def _asleep(self: Any) -> list[str]:
    """Tags of the memory that sleeps. vLLM's own ``is_sleeping`` is true of an engine that is merely paused."""
    return sorted(self.model_executor.sleeping_tags)


def install() -> None:
    """Once or more in every process of vLLM, before an engine core is made."""
    from vllm.v1.engine.core import EngineCore

    for name, method in ((HOLD, _hold), (LET_GO, _let_go), (ASLEEP, _asleep)):
        setattr(EngineCore, name, method)
