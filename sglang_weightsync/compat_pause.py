"""Stopping SGLang for a push without interfering with users' pauses. `compat` checks the names.

A pause or resume that a user requests during a push is remembered, and takes effect afterwards. While the engine has
weights that it must not serve, it cannot be resumed: the HTTP server refuses the request, and a scheduler, which an
exception would end, logs it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

PAUSE: Final = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
CONTINUE: Final = "sglang.srt.managers.scheduler.Scheduler.continue_generation"
_ATTRIBUTE: Final = "_weightsync_held"


class _Held:
    """The hold of a push on a scheduler; ``paused``: users want it paused."""

    def __init__(self, scheduler: Any):
        self.paused = bool(scheduler._engine_paused)


def _held(scheduler: Any) -> _Held | None:
    found: _Held | None = scheduler.__dict__.get(_ATTRIBUTE)
    return found


def around_pause(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Hook around `Scheduler.pause_generation`."""
    if (held := _held(scheduler)) is not None:
        held.paused = True
    return original(scheduler, *args)


def around_continue(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Hook around `Scheduler.continue_generation`."""
    if _held(scheduler) is None:
        return original(scheduler, *args)
    logger.error("not resumed: a push failed while it was loading here; push a full version")
    return None


def hold(scheduler: Any, *, retract: bool) -> None:
    """Stop generating for a push; with ``retract``, requests in flight drop their KV and recompute it later."""
    from sglang.srt.managers.io_struct import PauseGenerationReqInput

    held = _held(scheduler) or _Held(scheduler)
    paused = held.paused
    scheduler.__dict__[_ATTRIBUTE] = held
    scheduler.pause_generation(PauseGenerationReqInput(mode="retract" if retract else "in_place"))
    held.paused = paused


def let_go(scheduler: Any) -> None:
    """End `hold`: generate again, unless users want the scheduler paused."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput

    held = scheduler.__dict__.pop(_ATTRIBUTE, None)
    if held is not None and not held.paused:
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))


# --- in the process that serves HTTP ----------------------------------------------------------------------------------


class Gate:
    """Lets requests through a tokenizer manager, or not. ``closed`` is the reason why not; empty if users decide."""

    def __init__(self, tokenizer_manager: Any):
        self._manager = tokenizer_manager
        self._pause, self._continue = tokenizer_manager.pause_generation, tokenizer_manager.continue_generation
        self._paused = False
        self.closed = ""
        tokenizer_manager.pause_generation = self._on_pause
        tokenizer_manager.continue_generation = self._on_continue

    @property
    def paused(self) -> bool:
        """Whether users want the engine paused."""
        return self._paused if self.closed else bool(self._manager.is_pause)

    async def _on_pause(self, *args: Any, **kwargs: Any) -> Any:
        self._paused = True
        return await self._pause(*args, **kwargs)

    async def _on_continue(self, *args: Any, **kwargs: Any) -> Any:
        if self.closed:
            from starlette.exceptions import HTTPException

            raise HTTPException(503, f"weightsync: {self.closed}")
        return await self._continue(*args, **kwargs)

    def close_at_start(self, why: str) -> None:
        """Close the gate before HTTP is served."""
        self.closed, self._manager.is_pause = why, True

    async def close(self, why: str) -> None:
        """Keep new requests from the schedulers, and refuse to resume."""
        self._paused, self.closed = self.paused, why
        await self._hold(True)

    async def open(self) -> None:
        """Open the gate; what users have requested meanwhile takes effect."""
        if self.closed:
            paused, self.closed = self._paused, ""
            await self._hold(paused)

    async def _hold(self, held: bool) -> None:
        async with self._manager.is_pause_cond:
            self._manager.is_pause = held
            self._manager.is_pause_cond.notify_all()
