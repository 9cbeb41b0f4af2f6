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
