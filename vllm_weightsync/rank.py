"""The worker extension: weightsync's methods on every vLLM worker, callable through ``collective_rpc``.

Imports nothing of vLLM, so that a user's own extension class can derive from it anywhere.

The methods never raise: in the multi-process executor an exception of one rank leaves the replies of the others queued,
and the next call would get them.
"""

from __future__ import annotations

from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.protocol.http import UPDATE

_ATTRIBUTE = "_weightsync_receiver"


def _run(worker: WorkerExtension, method: str, payload: str) -> str:
    def receiver() -> Receiver:
        found = worker.__dict__.get(_ATTRIBUTE)
        if found is None:
            # vLLM is imported by now, and the worker has loaded its model.
            from vllm_weightsync.adapter import VllmAdapter

            found = worker.__dict__[_ATTRIBUTE] = Receiver(VllmAdapter(worker))
        if method.startswith(UPDATE):
            from vllm_weightsync.adapter import check_deep

            check_deep(payload)
        return found

    return handle(receiver, method, payload).decode()


class WorkerExtension:
    """For ``--worker-extension-cls``, alone or as a base of your own extension class.

    vLLM appends it to the worker's bases and never runs its ``__init__``. Every method takes the JSON of a message of
    `weightsync.protocol.http` and returns that of a `http.RankReply`. None raises: when one rank raises, vLLM's
    multi-process executor leaves the other ranks' replies in their queues, and hands them to the next call.
    """

    def weightsync_open(self, payload: str = "{}") -> str:
        """`http.RankInfo` of this worker."""
        return _run(self, "weightsync_open", payload)

    def weightsync_status(self, payload: str = "{}") -> str:
        """`http.RankStatus` of this worker, for a `http.StatusRequest`."""
        return _run(self, "weightsync_status", payload)

    def update_weights_via_ipc_zmq(self, payload: str) -> str:
        """Check a `http.UpdateRequest` and start fetching the bytes, in a thread; generation goes on."""
        return _run(self, "update_weights_via_ipc_zmq", payload)

    def init_nccl_group(self, payload: str) -> str:
        """Join the group of a `http.InitNcclGroup`, in a thread."""
        return _run(self, "init_nccl_group", payload)

    def update_weights_via_nccl(self, payload: str) -> str:
        """As `update_weights_via_ipc_zmq`, by broadcast in the group."""
        return _run(self, "update_weights_via_nccl", payload)

    def register_nixl(self, payload: str) -> str:
        """Make this worker's NIXL agent and connect it to the one of a `http.RegisterNixl`."""
        return _run(self, "register_nixl", payload)

    def update_weights_via_nixl(self, payload: str) -> str:
        """As `update_weights_via_ipc_zmq`, by one-sided reads."""
        return _run(self, "update_weights_via_nixl", payload)

    def weightsync_ready(self, payload: str) -> str:
        """Whether the push of a `http.CommitRequest` is staged here."""
        return _run(self, "weightsync_ready", payload)

    def weightsync_commit(self, payload: str) -> str:
        """Load the staged push of a `http.CommitRequest`; the caller has paused generation."""
        return _run(self, "weightsync_commit", payload)

    def weightsync_restore(self, payload: str) -> str:
        """Load the version before again, for a `http.CommitRequest` that failed on another rank."""
        return _run(self, "weightsync_restore", payload)

    def weightsync_abort(self, payload: str = "{}") -> str:
        """Forget the push of a `http.AbortRequest`."""
        return _run(self, "weightsync_abort", payload)
