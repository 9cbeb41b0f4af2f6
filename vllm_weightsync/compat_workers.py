"""Adds the worker methods to vLLM's worker wrapper, so that they do not take the slot for an extension class.

Every executor calls the wrapper, which passes unknown methods on to its worker. They cannot be added to the worker's
own class: vLLM refuses an extension class that has a method of the same name.
"""

from __future__ import annotations

from typing import Any, Final

from vllm_weightsync.rank import METHODS, WorkerExtension, run

#: What the routes call, as ``weightsync_call(method, payload)``. No other package has a method of this name.
CALL: Final = "weightsync_call"


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


def install() -> None:
    """Add the methods to the wrapper; called in every process of vLLM, maybe more than once."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    setattr(WorkerWrapperBase, CALL, _call)
    for name in METHODS:
        setattr(WorkerWrapperBase, name, _method(name))
