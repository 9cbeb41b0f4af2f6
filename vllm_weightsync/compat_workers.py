"""The worker methods on vLLM's worker wrapper, so that they need no slot for an extension class.

Every executor calls methods of the wrapper, which hands those that it lacks to its worker. The worker's own class will
not do: vLLM refuses an extension class that shares a name with it.
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
        # Other packages have worker extensions with a method of this name: their own calls go there.
        own = getattr(self.worker, name, None)
        return run(self.worker, name, *args, **kwargs) if own is None else own(*args, **kwargs)

    method.__name__ = name
    return method


def install() -> None:
    """Once or more in every process of vLLM, before a worker is made."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    setattr(WorkerWrapperBase, CALL, _call)
    for name in METHODS:
        setattr(WorkerWrapperBase, name, _method(name))
