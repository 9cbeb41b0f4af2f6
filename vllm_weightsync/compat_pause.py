"""Stopping vLLM's engine core for a push without interfering with users' pauses. `compat` checks the names.

`install` adds methods to the engine core, which the front end calls like vLLM's own utilities. A pause or resume that a
user requests during a push is remembered, and takes effect afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from vllm_weightsync import compat_agreement, compat_waves

HOLD: Final = "weightsync_hold"
LET_GO: Final = "weightsync_let_go"
ASLEEP: Final = "weightsync_asleep"


class HeldScheduler:
    """A scheduler that a push has stopped, or that must stay stopped after a failed push.

    Every pause and resume in vLLM ends in the scheduler's ``set_pause_state``, which this replaces for the time. A
    resume raises the reason ``refused`` if that is set; otherwise it takes effect when the push ends.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._set: Callable[[Any], None] = scheduler.set_pause_state
        self._requested = scheduler.pause_state
        self.ours = False
        self.refused = ""
        scheduler.set_pause_state = self._on_request

    def _on_request(self, state: Any) -> None:
        if self.ours:
            self._set(state)
            return
        if state == type(state).UNPAUSED and self.refused:
            raise RuntimeError(f"weightsync: {self.refused}")
        self._requested = state

    def pause(self, core: Any, mode: str) -> Future[Any] | None:
        """Pause as vLLM does; the future is done when every request that was to finish first has finished."""
        frozen = self._scheduler.pause_state == type(self._requested).PAUSED_ALL
        if mode == "wait" and frozen:
            mode = "keep"  # a user has frozen the requests: they finish only after that user resumes
        self.ours = True
        try:
            paused: Future[Any] | None = core.pause_scheduler(mode=mode, clear_cache=False)
        finally:
            self.ours = False
        return paused

    def freeze(self) -> None:
        """Stop everything, whatever the pause was."""
        self._set(type(self._requested).PAUSED_ALL)

    def end(self) -> None:
        """Give the scheduler back, in the state that users have requested."""
        del self._scheduler.set_pause_state
        self._set(self._requested)


def _hold(self: Any, mode: str, refused: str) -> Future[Any] | None:
    """Stop for a push with vLLM's pause ``mode``; if that is empty, stay stopped for the reason ``refused``."""
    held: HeldScheduler | None = self.__dict__.get(compat_waves.HELD)
    if held is None:
        held = self.__dict__[compat_waves.HELD] = HeldScheduler(self.scheduler)
    held.refused = refused
    if mode:
        return held.pause(self, mode)
    held.freeze()
    if compat_waves.steps_together(self):
        compat_waves.review(self)
    return None


def _let_go(self: Any) -> None:
    """End the hold."""
    held = self.__dict__.pop(compat_waves.HELD, None)
    if held is None:
        return
    held.end()
    if compat_waves.steps_together(self):
        compat_waves.review(self)


def _asleep(self: Any) -> list[str]:
    """Tags of the memory that sleeps. vLLM's own ``is_sleeping`` is also true of an engine that is only paused."""
    return sorted(self.model_executor.sleeping_tags)


def install() -> None:
    """Add the methods to the engine core; called in every process of vLLM, maybe more than once."""
    from vllm.v1.engine.core import EngineCore

    for name, method in ((HOLD, _hold), (LET_GO, _let_go), (ASLEEP, _asleep)):
        setattr(EngineCore, name, method)
    compat_waves.install()
    compat_agreement.install()
