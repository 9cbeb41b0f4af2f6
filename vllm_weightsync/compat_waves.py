"""Replicas of a mixture of experts in vLLM, which take every step together, and how a push stops them.

A replica that steps waits in each layer of experts until all others take the same step, so none may stop or start
alone. vLLM lets them step in *waves*. A replica that was asked to pause goes on, with dummy steps if it has nothing
else to do, until all have been asked: they find that out in one all-reduce, and stop after the same step. A hold is
such a pause. Where this differs from vLLM:

- Pauses and resumes that users request during a hold are only remembered (`compat_pause`).
- Replicas wait for each other in steps alone. vLLM's resume waits in an all-reduce of its own; if one replica is asked
  to resume and to pause in another order than the others, all wait for ever. Here a resume begins a wave, and the
  replicas find out in it whether to go on.
- A replica that begins a wave has the others woken. When a hold that came too late is ended, some may be idle, and some
  may have been asked to pause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

#: Attributes of a replica's engine core that are used here.
_USED: Final = (
    "engines_running",
    "pending_pause",
    "ignore_start_dp_wave",
    "current_wave",
    "has_coordinator",
    "output_queue",
)


def lacking() -> list[str]:
    """The attributes of an engine core that vLLM's code does not name; it makes them when it starts."""
    from vllm.v1.engine.core import DPEngineCoreProc

    methods = [method for kind in DPEngineCoreProc.__mro__ for method in vars(kind).values()]
    named = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    return [f"DPEngineCoreProc.{name}" for name in _USED if name not in named]


def steps_together(core: Any) -> bool:
    """Whether this engine core is a replica that takes every step together with others."""
    from vllm.v1.engine.core import DPEngineCoreProc

    return isinstance(core, DPEngineCoreProc)


def has_stopped(core: Any) -> bool:
    """Whether all replicas have agreed to stop, and this one has."""
    return bool(core.ignore_start_dp_wave and not core.engines_running)


def go_on(core: Any) -> None:
    """Do as the scheduler's state says: step, or stop together with the others, which get the same call."""
    core.ignore_start_dp_wave = False
    core.pending_pause = core.is_scheduler_paused()
    _begin(core)


def _begin(core: Any) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    if not core.engines_running and core.has_coordinator:
        # The coordinator, which is client -1, wakes the others. Those that are held do not hear it.
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))
    core.engines_running = True


def install(is_held: Callable[[Any], bool]) -> None:
    """Replace pause and resume of these replicas; ``is_held`` says whether users' requests are only remembered."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import DPEngineCoreProc

    def _pause_complete(self: Any) -> bool:
        if is_held(self):
            return not self.has_work()
        self.pending_pause = True
        _begin(self)
        return False

    def resume_scheduler(self: Any) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        if not is_held(self):
            go_on(self)

    for method in (_pause_complete, resume_scheduler):
        setattr(DPEngineCoreProc, method.__name__, method)
