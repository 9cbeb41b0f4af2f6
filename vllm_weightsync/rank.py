"""weightsync's methods on every vLLM worker, callable through ``collective_rpc``, and as an extension class.

Imports nothing of vLLM, so that a user's own extension class can derive from it anywhere.

The methods never raise: in the multi-process executor an exception of one rank leaves the replies of the others queued,
and the next call would get them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from weightsync.engine.private_names import check_deep
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.protocol.http import UPDATE
from weightsync.transports import registry

_ATTRIBUTE = "_weightsync_receiver"


def run(worker: Any, method: str, payload: str = "{}") -> str:
    """Run one of `METHODS` on this worker of vLLM's; the JSON of a `http.RankReply`."""

    def receiver() -> Receiver:
        found: Receiver | None = worker.__dict__.get(_ATTRIBUTE)
        if found is None:
            # vLLM is imported by now, and the worker has loaded its model.
            from vllm_weightsync.adapter import VllmAdapter

            found = worker.__dict__[_ATTRIBUTE] = Receiver(VllmAdapter(worker))
        if method.startswith(UPDATE):
            from vllm_weightsync import compat

            check_deep(payload, lambda: compat.VLLM.check(compat.DEEP))
        return found

    return handle(receiver, method, payload).decode()


class WorkerExtension:
    """For ``--worker-extension-cls``, alone or as a base of your own extension class, which may override its methods.

    The general plugin brings the same methods without it. vLLM appends it to the worker's bases and never runs its
    ``__init__``. Every method takes the JSON of a message of
    `weightsync.protocol.http` and returns that of a `http.RankReply`. None raises: when one rank raises, vLLM's
    multi-process executor leaves the other ranks' replies in their queues, and hands them to the next call.

    Beside those below it has, for every transport that is registered, ``update_weights_via_NAME``, which checks a
    `http.UpdateRequest` and starts fetching the bytes in a thread while generation goes on, and its set-up method.
    """

    def weightsync_open(self, payload: str = "{}") -> str:
        """`http.RankInfo` of this worker."""
        return run(self, "weightsync_open", payload)

    def weightsync_status(self, payload: str = "{}") -> str:
        """`http.RankStatus` of this worker, for a `http.StatusRequest`."""
        return run(self, "weightsync_status", payload)

    def weightsync_ready(self, payload: str) -> str:
        """Whether the push of a `http.CommitRequest` is staged here."""
        return run(self, "weightsync_ready", payload)

    def weightsync_commit(self, payload: str) -> str:
        """Load the staged push of a `http.CommitRequest`; the caller has paused generation."""
        return run(self, "weightsync_commit", payload)

    def weightsync_restore(self, payload: str) -> str:
        """Load the version before again, for a `http.CommitRequest` that failed on another rank."""
        return run(self, "weightsync_restore", payload)

    def weightsync_abort(self, payload: str = "{}") -> str:
        """Forget the push of a `http.AbortRequest`."""
        return run(self, "weightsync_abort", payload)


def _method(name: str) -> Callable[[WorkerExtension, str], str]:
    def method(self: WorkerExtension, payload: str) -> str:
        return run(self, name, payload)

    method.__name__, method.__qualname__ = name, f"{WorkerExtension.__name__}.{name}"
    return method


for _name in (*registry.update_methods(), *registry.setup_methods()):
    setattr(WorkerExtension, _name, _method(_name))

#: Every worker method, by name.
METHODS: Final = tuple(name for name in vars(WorkerExtension) if not name.startswith("__"))
