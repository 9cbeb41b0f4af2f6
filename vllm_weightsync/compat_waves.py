"""Replicas of a mixture of experts in vLLM, which take every step together, and how a push stops them.

A replica that steps waits in each layer of experts until all others take the same step, so none may stop or start
alone. vLLM lets them step in *waves*. A replica that was asked to pause goes on, with dummy steps if it has nothing
else to do, until all have been asked: they find that out in one all-reduce, and stop after the same step. A hold is
such a pause. What users request during a hold is only remembered (`compat_pause`).

The calls of several servers may reach one replica in another order than the others: one may be asked to resume and then
to hold, another first to hold. With vLLM's own resume, which waits for the others in an all-reduce, both would wait for
ever. Here nothing waits for another replica but steps:

- Replicas that have stopped go on when all of them may and one has a reason to. Each registers in a store when it may
  (neither a push holds it nor users have frozen it), and when it has a reason (users have not paused it, or requests
  are to finish before their pause is complete). They decide in rounds: the last that registers decides that all go, a
  replica that may no longer decides that all stay. Until then each answers calls.
- A replica that begins a wave in order to stop has the others woken: after a hold that came too late they may be idle.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
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
    "dp_rank",
    "dp_size",
    "dp_store",
)
#: An attribute of an engine core that a push holds; see `compat_pause`.
HELD: Final = "_weightsync_held"
#: A replica's `_Registration`, while it has stopped and may go on, and the number of its next round.
_REGISTRATION: Final = "_weightsync_registration"
_NEXT_ROUND: Final = "_weightsync_next_round"
_GO, _STAY = b"go", b"stay"
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


def review(core: Any) -> None:
    """Stop or go on, after anything that this depends on has changed."""
    if not core.ignore_start_dp_wave:  # which says whether the replicas have agreed to stop
        core.pending_pause = core.is_scheduler_paused()  # also while a push holds it
        if core.pending_pause:
            _step(core)
    elif not core.engines_running:
        _register(core)


def _is_held(core: Any) -> bool:
    return HELD in core.__dict__


def _is_complete(core: Any) -> bool:
    """Whether the pause of a replica without work is complete: nothing is left that has to finish first."""
    return _is_held(core) or not core.scheduler.has_unfinished_requests()


def _register(core: Any) -> None:
    """Register a replica that has stopped, or withdraw it."""
    from vllm.v1.core.sched.interface import PauseState

    registration: _Registration | None = core.__dict__.get(_REGISTRATION)
    state = core.scheduler.pause_state
    if _is_held(core) or state == PauseState.PAUSED_ALL:
        if registration is not None:
            registration.withdraw()
        return
    reason = state == PauseState.UNPAUSED or core.scheduler.has_unfinished_requests()
    if registration is None:
        _Registration(core, reason)
    elif reason:
        registration.give_reason()


class _Registration:
    """A replica's part in the rounds, from when it may go on until it goes or may no longer.

    In the queue of its calls it says that all go.
    """

    def __init__(self, core: Any, reason: bool):
        self._core, self._reason = core, reason
        self._round: int = core.__dict__.get(_NEXT_ROUND, 0)
        #: Held to change what both the replica and the thread that waits for the others use.
        self._lock = threading.Lock()
        core.__dict__[_REGISTRATION] = self
        threading.Thread(target=self._await_others, name="weightsync-go-on", daemon=True).start()

    def give_reason(self) -> None:
        with self._lock:
            given, self._reason = self._reason, True
            round_ = self._round
        if not given:
            _count(self._core, self._core.dp_store, round_, may=0, reasons=1)

    def withdraw(self) -> None:
        """Have all stay; if they go by now, go."""
        self._end()
        if decide(self._core.dp_store, self._round, _STAY) == _GO:
            self._go()

    def all_go(self) -> None:
        """Go, unless this replica has noticed before that all do."""
        if self._is_open():
            self._end()
            self._go()

    def _is_open(self) -> bool:
        return self._core.__dict__.get(_REGISTRATION) is self

    def _end(self) -> None:
        with self._lock:
            del self._core.__dict__[_REGISTRATION]
        self._core.__dict__[_NEXT_ROUND] = self._round + 1

    def _go(self) -> None:
        self._core.ignore_start_dp_wave = False
        _step(self._core)
        review(self._core)

    def _await_others(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType

        try:
            store = self._core.dp_store.clone()  # whoever waits for a store blocks its other users in this process
            while not self._all_go_in_this_round(store):
                with self._lock:
                    if not self._is_open():
                        return
                    self._round += 1
        except RuntimeError as error:
            # Mostly another replica has died, and vLLM ends the engine. If not, no replica would ever go on.
            logger.error("the store in which replicas agree to go on cannot be reached: %s", error)
            self._core.input_queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
        else:
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, self))

    def _all_go_in_this_round(self, store: Any) -> bool:
        """Count this replica in its round, and wait until that is decided."""
        with self._lock:
            round_, reason = self._round, self._reason
        _count(self._core, store, round_, may=1, reasons=int(reason))
        store.wait([key(round_, "decided")], _EVER)
        return bool(store.get(key(round_, "decided")) == _GO)


def key(asked: int | str, what: str) -> str:
    """The name in the store of something about a round, or about a question of `compat_agreement`."""
    return f"weightsync/{asked}/{what}"


def _count(core: Any, store: Any, round_: int, *, may: int, reasons: int) -> None:
    """Count what a replica says in a round; if all may go on and one has a reason, decide that all go."""
    # Reasons first: whoever then sees that all may go on sees the reasons of all.
    store.add(key(round_, "reasons"), reasons)
    if store.add(key(round_, "may"), may) == core.dp_size and store.add(key(round_, "reasons"), 0):
        decide(store, round_, _GO)


def decide(store: Any, asked: int | str, decision: bytes) -> bytes:
    """Decide a round or question, unless it is decided; return what was decided first."""
    first: bytes = store.compare_set(key(asked, "decided"), "", decision.decode())
    return first


def _step(core: Any) -> None:
    from vllm.v1.engine import EngineCoreOutputs

    if not core.engines_running and core.has_coordinator:
        # The coordinator, which is client -1, wakes the others.
        core.output_queue.put_nowait((-1, EngineCoreOutputs(start_wave=core.current_wave)))
    core.engines_running = True


def install() -> None:
    """Replace pause and resume of these replicas."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine.core import DPEngineCoreProc

    handle, has_work = DPEngineCoreProc._handle_client_request, DPEngineCoreProc.has_work
    notify, sync = DPEngineCoreProc._notify_idle_state_callbacks, DPEngineCoreProc._has_global_unfinished_reqs
    add = DPEngineCoreProc.add_request
    if getattr(DPEngineCoreProc, _INSTALLED, False):
        return

    @functools.wraps(handle)
    def _handle_client_request(self: Any, request_type: Any, request: Any) -> None:
        if isinstance(request, _Registration):
            request.all_go()
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
        if _is_complete(self):
            notify(self)

    @functools.wraps(sync)
    def _has_global_unfinished_reqs(self: Any, local_unfinished: bool) -> bool:
        self.engines_running = bool(sync(self, local_unfinished))
        if self.ignore_start_dp_wave:
            review(self)
        return bool(self.engines_running)

    @functools.wraps(DPEngineCoreProc._pause_complete)
    def _pause_complete(self: Any) -> bool:
        review(self)
        return not self.has_work() and _is_complete(self)

    @functools.wraps(DPEngineCoreProc.resume_scheduler)
    def _resume_scheduler(self: Any) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        review(self)

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
