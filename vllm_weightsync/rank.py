"""The methods of a vLLM worker, callable through ``collective_rpc``, and the extension class that has them.

Imports nothing of vLLM, so that a user's own extension class can derive from `WorkerExtension` anywhere.

The methods never raise: in the multi-process executor, an exception of one rank leaves the replies of the others queued
for the next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from weightsync.engine.first_calls import make_first_calls
from weightsync.engine.private_names import check_deep
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.protocol.http import UPDATE
from weightsync.transports import registry

_ATTRIBUTE = "_weightsync_receiver"
#: An attribute of a worker: vLLM's tags of its memory that sleeps.
ASLEEP: Final = "_weightsync_asleep"

# A worker imports this module before it builds its model, as plugin and as extension.
make_first_calls()


def run(worker: Any, method: str, payload: str = "{}") -> str:
    """Run one of `METHODS` on a vLLM worker; returns the JSON of a `rank_replies.RankReply`."""

    def receiver() -> Receiver:
        found = receiver_of(worker)
        if found is None:
            # By now vLLM is imported, and the worker has loaded its model.
            from vllm_weightsync.adapter import adapter_of

            found = worker.__dict__[_ATTRIBUTE] = Receiver(adapter_of(worker))
        if method.startswith(UPDATE):
            from vllm_weightsync import compat, compat_models

            check_deep(payload, lambda: compat.VLLM.check(compat_models.DEEP))
        return found

    return handle(receiver, method, payload).decode()


def receiver_of(worker: Any) -> Receiver | None:
    """The receiver of a worker that was asked for something already."""
    found: Receiver | None = worker.__dict__.get(_ATTRIBUTE)
    return found


class WorkerExtension:
    """For ``--worker-extension-cls``, alone or as a base of your own extension class, which may override its methods.

    The general plugin adds the same methods without it. vLLM adds this class to the worker's bases and never runs its
    ``__init__``. Every method takes the JSON of a message of `weightsync.protocol.http`, returns the JSON of a
    `rank_replies.RankReply`, and never raises.

    Beside the methods below it has two for every registered transport: ``update_weights_via_NAME``, which checks a
    `http.UpdateRequest` and receives the bytes in a thread while the engine generates, and the set-up method, if the
    transport has one.
    """

    def weightsync_open(self, payload: str = "{}") -> str:
        """`http.RankInfo` of this worker."""
        return run(self, "weightsync_open", payload)

    def weightsync_expected(self, payload: str = "{}") -> str:
        """This worker's part of an `expected.ExpectedReply`."""
        return run(self, "weightsync_expected", payload)

    def weightsync_make_standby(self, payload: str) -> str:
        """Make this worker's standby before the first push, for an `expected.StandbyRequest`."""
        return run(self, "weightsync_make_standby", payload)

    def weightsync_status(self, payload: str = "{}") -> str:
        """`http.RankStatus` of this worker, for a `http.StatusRequest`."""
        return run(self, "weightsync_status", payload)

    def weightsync_diagnose(self, payload: str) -> str:
        """`diagnosis.RankReport` of this worker, for a `diagnosis.DiagnoseRequest`."""
        return run(self, "weightsync_diagnose", payload)

    def weightsync_ready(self, payload: str) -> str:
        """Whether the push of a `http.CommitRequest` is staged here."""
        return run(self, "weightsync_ready", payload)

    def weightsync_commit(self, payload: str) -> str:
        """Load the staged push of a `http.CommitRequest`; the caller has paused generation."""
        return run(self, "weightsync_commit", payload)

    def weightsync_restore(self, payload: str) -> str:
        """Load the previous version again, after a `http.CommitRequest` that failed on another rank."""
        return run(self, "weightsync_restore", payload)

    def weightsync_abort(self, payload: str = "{}") -> str:
        """Drop the push of a `http.AbortRequest`."""
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
