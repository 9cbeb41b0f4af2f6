"""Replicas of a mixture of experts in vLLM, which take every step together, and how a push stops them.

A replica that steps waits in each layer of experts until all others take the same step, so none may stop or start
alone. vLLM lets them step in *waves*. A replica that was asked to pause goes on, with dummy steps if it has nothing
else to do, until all have been asked: they find that out in one all-reduce, and stop after the same step. A hold is
such a pause. What users request during a hold is only remembered (`compat_pause`).

The calls of several servers may reach one replica in another order than the others: one may be asked to resume and then
to hold, another first to hold. With vLLM's own resume, which waits for the others in an all-reduce, both would wait for
ever. Here nothing waits for another replica but steps:

- Replicas that have stopped go on when each of them wanted to, once. They count that in a store, and until then a
  replica that wants to go on answers calls, and is as good as stopped.
- A replica that begins a wave in order to stop has the others woken: after a hold that came too late they may be idle.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

#: Attributes of a replica's engine core that are used here.
_USED: Final = (
    "engines_running",
    "pending_pause",
    "ignore_start_dp_wave",
    "current_wave",
    "has_coordinator",
    "input_queue",
    "output_queue",
    "dp_size",
    "dp_store",
)
#: How often the replicas have stopped and gone on, and whether this one wants to go on again.
_GONE_ON: Final = "_weightsync_gone_on"
_WANTS: Final = "_weightsync_wants_to_go_on"
#: This replica was let go before the replicas agreed to stop, so it wants to go on when they do.
_AGAIN: Final = "_weightsync_goes_on_again"
#: In the queue of a replica's calls: all want to go on.
_ALL_WANT: Final = "weightsync: all replicas want to go on"
_EVER: Final = timedelta(days=365)
#: An attribute of the class of these replicas.
_INSTALLED: Final = "_weightsync_installed"

logger = logging.getLogger(__name__)


def lacking() -> list[str]:
    """The attributes of an engine core that vLLM's code does not name; it makes them when it starts."""
    from vllm.v1.engine.core import DPEngineCoreProc

    methods = [
        inspect.unwrap(method)
        for kind in DPEngineCoreProc.__mro__
        for method in vars(kind).values()
        if callable(method)
    ]
    named = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    return [f"DPEngineCoreProc.{name}" for name in _USED if name not in named]


def steps_together(core: Any) -> bool:
    """Whether this engine core is a replica that takes every step together with others."""
    from vllm.v1.engine.core import DPEngineCoreProc

    return isinstance(core, DPEngineCoreProc)


def stop(core: Any) -> None:
    """Stop stepping as soon as all replicas were asked to."""
    if not core.ignore_start_dp_wave:  # which says whether they have agreed
        core.pending_pause = True
        _step(core)


def let_go(core: Any) -> None:
    """Go on after a hold. Each replica wants to once, also one that is let go before the others are held."""
    if not core.ignore_start_dp_wave:
        core.__dict__[_AGAIN] = True
    go_on(core)


def go_on(core: Any) -> None:
    """Step, unless users have frozen the scheduler, as soon as all replicas want to.

    If users have paused it otherwise, the replicas stop again when requests in flight have finished.
    """
    from vllm.v1.core.sched.interface import PauseState

    if not core.ignore_start_dp_wave:
        core.pending_pause = core.is_scheduler_paused()
    elif core.scheduler.pause_state != PauseState.PAUSED_ALL and not wants_to_go_on(core):
        core.__dict__[_WANTS] = True
        turn = core.__dict__.setdefault(_GONE_ON, 0)
        threading.Thread(target=_await_others, args=(core, turn), name="weightsync-go-on", daemon=True).start()


def wants_to_go_on(core: Any) -> bool:
    """Whether a replica that has stopped would step if the others wanted to."""
    return bool(core.__dict__.get(_WANTS))


def _has_to_finish(core: Any) -> bool:
    """Whether the replica goes on so that requests finish, here or in another one."""
    from vllm.v1.core.sched.interface import PauseState

    return wants_to_go_on(core) and core.scheduler.pause_state != PauseState.PAUSED_ALL


def _await_others(core: Any, turn: int) -> None:
    from vllm.v1.engine import EngineCoreRequestType

    wanted, all_want = f"weightsync/{turn}/wanted", f"weightsync/{turn}/all"
    try:
        if core.dp_store.add(wanted, 1) == core.dp_size:
            core.dp_store.set(all_want, "")
        core.dp_store.wait([all_want], _EVER)
    except RuntimeError as error:
        # Mostly another replica has died, and vLLM ends the engine. If not, no replica would ever go on.
        logger.error("the store in which replicas agree to go on cannot be reached: %s", error)
        core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
    else:
        core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, _ALL_WANT))


def _all_want(core: Any) -> None:
    core.__dict__[_WANTS] = False
    core.__dict__[_GONE_ON] += 1
    core.ignore_start_dp_wave = False
    core.pending_pause = core.is_scheduler_paused()  # since this replica wanted to go on
    _step(core)


def _step(core: Any) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    if not core.engines_running and core.has_coordinator:
        # The coordinator, which is client -1, wakes the others.
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))
    core.engines_running = True


def install(is_held: Callable[[Any], bool], is_ours: Callable[[Any], bool]) -> None:
    """Replace pause and resume of these replicas.

    ``is_held`` says whether a replica is held, ``is_ours`` whether the hold itself asks for the pause.
    """
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import DPEngineCoreProc

    handle, has_work = DPEngineCoreProc._handle_client_request, DPEngineCoreProc.has_work
    notify, sync = DPEngineCoreProc._notify_idle_state_callbacks, DPEngineCoreProc._has_global_unfinished_reqs
    add = DPEngineCoreProc.add_request
    if getattr(DPEngineCoreProc, _INSTALLED, False):
        return

    @functools.wraps(handle)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if request is _ALL_WANT:
            _all_want(self)
        else:
            handle(self, request_type, request)

    @functools.wraps(add)
    def _add_request(self: Any, request: Any, request_wave: int = 0) -> None:
        stopped = self.ignore_start_dp_wave and not self.engines_running
        add(self, request, request_wave)
        if stopped:
            self.engines_running = False  # vLLM begins a wave for some requests

    @functools.wraps(has_work)
    def _has_work(self: Any) -> bool:
        if self.ignore_start_dp_wave and not self.engines_running:
            return bool(self.batch_queue)  # the others take no step
        return bool(has_work(self))

    @functools.wraps(notify)
    def _notify_idle_state_callbacks(self: Any) -> None:
        if not _has_to_finish(self):
            notify(self)

    @functools.wraps(sync)
    def _has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> bool:
        unfinished = bool(sync(self, local_unfinished))
        if self.ignore_start_dp_wave and self.__dict__.pop(_AGAIN, False) and not is_held(self):
            go_on(self)
        return unfinished

    @functools.wraps(DPEngineCoreProc._pause_complete)
    def _pause_complete(self: Any) -> bool:
        if is_ours(self) or not is_held(self):
            stop(self)
        if not is_held(self):
            go_on(self)  # requests that were frozen may finish in the new pause
        return not self.has_work() and (is_held(self) or not _has_to_finish(self))

    @functools.wraps(DPEngineCoreProc.resume_scheduler)
    def _resume_scheduler(self: Any) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        if not is_held(self):
            go_on(self)

    for method in (
        _add_request,
        _handle_client_request,
        _has_global_unfinished_reqs,
        _has_work,
        _notify_idle_state_callbacks,
        _pause_complete,
        _resume_scheduler,
    ):
        setattr(DPEngineCoreProc, method.__name__, method)
    setattr(DPEngineCoreProc, _INSTALLED, True)
