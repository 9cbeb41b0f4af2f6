"""Engines in Ray actors: ``Sender([actor])``, with any method of the actor's class as it is.

An actor holds its engine, a `vllm.LLM`, `vllm.AsyncLLM` or `sglang.Engine`, in an attribute. What a sender asks crosses
in calls of the actor (``__ray_call__``), and is answered in its process as for an engine of the trainer's own process.
Only the bytes of the weights take a transport. Source of the actor's API: Ray 2.60.
"""

from __future__ import annotations

import inspect
import secrets
import time
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

from weightsync.daemon_thread import DaemonThread
from weightsync.errors import UnsupportedOption, WeightSyncError
from weightsync.protocol import http
from weightsync.protocol.in_process import AskedByCalls, NotRunning, is_of_engine, target
from weightsync.tensors.layout import listed

Reply = tuple[int, bytes]

#: Seconds for which one call waits for a reply in an actor with coroutines, which starts no other call meanwhile.
_WAIT_S: Final = 0.02
#: Until the next such call: a share of the time since the first, and at most so many seconds. A call takes the trainer
#: and the actor about a millisecond each.
_LOOK_UP_SHARE: Final = 0.05
_LOOK_UP_S: Final = 0.05
#: Seconds after its deadline until a reply that nobody fetches is forgotten.
_KEPT_S: Final = 60.0
#: Requests that the process of an actor answers at once.
_AT_ONCE: Final = 8
#: The attribute of an actor with the replies that nobody has fetched yet, by request.
_PENDING: Final = "_weightsync_pending"
_BUSY: Final = "its actor, which runs one call at a time: what is asked waits for the call to end"


class EngineInActor:
    """See `weightsync.protocol.in_process.AskedByCalls`: the engine that ``actor`` holds."""

    of_this_process = False

    def __init__(self, actor: Any):
        import ray.util

        self.name = repr(actor)
        # Wherever the actor is, and is started again: all nodes reach each other at the addresses that Ray uses.
        self.host = ray.util.get_node_ip_address()
        self._actor = actor

    def ask(self, route: str, body: bytes, timeout_s: float) -> Reply:
        """See `weightsync.protocol.in_process.AskedByCalls`."""
        start, request = time.monotonic(), secrets.token_hex(8)
        while True:
            elapsed = time.monotonic() - start
            reply = self._call(request, route, body, max(0.0, timeout_s - elapsed))
            if reply is not None:
                return reply
            time.sleep(min(_LOOK_UP_S, elapsed * _LOOK_UP_SHARE))

    def _call(self, request: str, route: str, body: bytes, timeout_s: float) -> Reply | None:
        import ray
        import ray.exceptions

        try:
            called = self._actor.__ray_call__.remote(_answer, request, route, body, timeout_s)
        except Exception as error:  # Ray's errors are of no kind here
            why = str(error).partition("\n")[0]
            raise NotRunning(f"{why}: get its handle again, from the cluster of this process") from error
        try:
            reply: Reply | None = ray.get(called, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(_BUSY) from None
        except ray.exceptions.RayTaskError as error:  # raised in the actor
            if isinstance(error.cause, (TimeoutError, NotRunning)):
                raise error.cause from error
            raise NotRunning(f"its process could not answer: {type(error.cause).__name__}: {error.cause}") from error
        except ray.exceptions.RayError as error:
            raise NotRunning(str(error).partition("\n")[0]) from error
        return reply

    def check_caller(self) -> None:
        """See `weightsync.protocol.in_process.AskedByCalls`."""
        import ray

        if ray.get_runtime_context().get_actor_id() == self._actor._actor_id.hex():
            raise UnsupportedOption(
                f"{self.name} is the actor that pushes, and cannot answer meanwhile: give the sender the engine itself"
            )


def attach(actor: object) -> EngineInActor:
    """``weightsync.engines`` entry point: the client of the engine that ``actor``, a handle, holds.

    Raises `UnsupportedOption` if it is no actor.
    """
    from ray.actor import ActorHandle

    if not isinstance(actor, ActorHandle):
        raise UnsupportedOption(f"{actor!r:.200} is no actor of Ray: give the handle of one that holds an engine")
    return EngineInActor(actor)


# ---- in the process of the actor -------------------------------------------------------------------------------------


class _Pending(NamedTuple):
    """A reply, and when it may be forgotten."""

    reply: Future[Reply]
    until: float


_threads: Final = DaemonThread("weightsync-actor", _AT_ONCE)


def _answer(actor: object, request: str, route: str, body: bytes, timeout_s: float) -> Reply | None:
    """What the engine in ``actor`` replies; None if another call for the same ``request`` has to fetch that.

    Ray runs ``__ray_call__`` in the thread that starts an actor's calls. One with coroutines goes on starting them
    while the engine is busy. Another actor waits here for the reply, and so do its other calls.
    """
    if not _has_coroutines(type(actor)):
        return _reply(actor, route, body, timeout_s)
    pending: dict[str, _Pending] = vars(actor).setdefault(_PENDING, {})
    now = time.monotonic()
    if request not in pending:
        for old in [name for name, each in pending.items() if each.until < now and each.reply.done()]:
            del pending[old]
        reply = _threads.submit(lambda: _reply(actor, route, body, timeout_s))
        pending[request] = _Pending(reply, now + timeout_s + _KEPT_S)
    done, _ = wait([pending[request].reply], _WAIT_S)
    return pending.pop(request).reply.result() if done else None


def _has_coroutines(kind: type) -> bool:
    """Whether Ray runs an event loop for actors of a class."""
    return any(inspect.getmembers(kind, found) for found in (inspect.iscoroutinefunction, inspect.isasyncgenfunction))


def _reply(actor: object, route: str, body: bytes, timeout_s: float) -> Reply:
    try:
        return _engine_of(actor).ask(route, body, timeout_s)
    except WeightSyncError as error:
        return 422, http.to_json(http.error_reply(error))


def _engine_of(actor: object) -> AskedByCalls:
    found: dict[str, AskedByCalls] = {}
    why = ""
    for name, value in vars(actor).items():
        if is_of_engine(value):
            try:
                held = target(value)
            except UnsupportedOption as error:
                why = f": {error}"
            else:
                found |= {} if isinstance(held, str) else {name: held}
    if len(found) == 1:
        return next(iter(found.values()))
    raise UnsupportedOption(
        f"the actor of {type(actor).__name__} has {listed(found) if found else 'no engine'} among its attributes: give "
        f"one that has exactly one vllm.LLM, vllm.AsyncLLM or sglang.Engine{why}"
    )
