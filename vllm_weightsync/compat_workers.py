"""Adds the worker methods to vLLM's worker wrapper, so that they do not take the slot for an extension class.

A worker gives its standby back before it sleeps, and has none until all of its memory is awake again.

Every executor calls the wrapper, which passes unknown methods on to its worker. They cannot be added to the worker's
own class: vLLM refuses an extension class that has a method of the same name.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_weightsync.rank import ASLEEP, METHODS, WorkerExtension, receiver_of, run
from weightsync.engine.rank_methods import before_sleep

#: What the routes call, as ``weightsync_call(method, payload)``. No other package has a method of this name.
CALL: Final = "weightsync_call"
#: vLLM's tags of the memory that sleeps.
_TAGS: Final = ("weights", "kv_cache")


def _call(self: Any, method: str, payload: str = "{}") -> str:
    if isinstance(self.worker, WorkerExtension):  # a class derived from it may override the method
        reply: str = getattr(self.worker, method)(payload)
        return reply
    return run(self.worker, method, payload)


def _method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Worker extensions of other packages may have a method of this name, for calls of their own.
        own = getattr(self.worker, name, None)
        return run(self.worker, name, *args, **kwargs) if own is None else own(*args, **kwargs)

    method.__name__ = name
    return method


def _sleep(self: Any, *args: Any, **kwargs: Any) -> Any:
    before_sleep(receiver_of(self.worker))
    reply = self.worker.sleep(*args, **kwargs)
    vars(self.worker)[ASLEEP] = set(_TAGS)
    return reply


def _wake_up(self: Any, tags: list[str] | None = None) -> Any:
    reply = self.worker.wake_up(tags)
    vars(self.worker).get(ASLEEP, set()).difference_update(tags or _TAGS)
    return reply


def install() -> None:
    """Add the methods to the wrapper; called in every process of vLLM, maybe more than once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    setattr(WorkerWrapperBase, CALL, _call)
    WorkerWrapperBase.sleep, WorkerWrapperBase.wake_up = _sleep, _wake_up
    for name in METHODS:
        setattr(WorkerWrapperBase, name, _method(name))
