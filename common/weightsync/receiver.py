"""Engine-side driver of one rank: check, receive, apply.

`prepare` returns at once; receiving happens in a thread that never touches the model. `apply` runs in the engine's own
loop, at the engine's own bidding, when generation has stopped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch

from weightsync import errors, staging
from weightsync.errors import SEVERITY, ApplyFailed, TransferFailed, WeightSyncError
from weightsync.layout import Layout, check_manifest
from weightsync.security import check_ipc_address
from weightsync.sink import Expected, Sink
from weightsync.transports.base import EngineEnd
from weightsync.transports.ipc_zmq import EngineIpcZmq
from weightsync.wire import (
    AbortRequest,
    CommitRequest,
    Done,
    ErrorReply,
    IpcPrepare,
    RankInfo,
    RankReply,
    RankStatus,
    State,
    StatusRequest,
    from_json,
    to_json,
)

logger = logging.getLogger(__name__)

_R = TypeVar("_R")

#: How long a new push waits for the thread of an aborted one; it looks up ten times a second.
_ABORT_WAIT_S = 5.0


class Receiver:
    """One rank's side of every push. Methods are called from the engine's loop, one at a time."""

    def __init__(self, sink: Sink):
        self._sink = sink
        self._expected: Expected | None = None
        self._end: EngineEnd = EngineIpcZmq(sink.device)
        self._layout: Layout | None = None
        self._push = ""
        self._state: State = "serving"
        self._detail = ""
        self._stage: torch.Tensor | None = None
        self._cancelled, self._received = threading.Event(), threading.Event()
        self._received.set()

    def info(self) -> RankInfo:
        """Who this rank is and what memory it has."""
        device = self._sink.device
        return RankInfo(
            rank=self._sink.rank,
            pid=os.getpid(),
            device=device.type,
            device_uuid=staging.device_uuid(device),
            free_bytes=staging.free_bytes(device),
        )

    def status(self, digest: bool = False) -> RankStatus:
        """What this rank is doing."""
        return RankStatus(
            rank=self._sink.rank,
            state=self._state,
            push=self._push,
            detail=self._detail,
            digest=self._sink.digest() if digest else "",
        )

    def prepare(self, request: IpcPrepare) -> None:
        """Check the manifest, then fetch the bytes in a thread. Raises `ManifestMismatch` or `TransferFailed`."""
        check_ipc_address(request.address)
        if not self._received.is_set():
            # Its sender is gone or has given up, or it would not be asking again.
            logger.warning("push %s is superseded by %s", self._push, request.push)
            self.abort()
        if not self._received.is_set():
            raise TransferFailed(f"rank {self._sink.rank} is still busy with push {self._push}; try again")
        if self._expected is None:
            self._expected = self._sink.expected()
        check_manifest(request.manifest, self._expected.specs, self._expected.optional)
        self._layout = Layout(request.manifest)
        self._push, self._stage, self._detail = request.push, None, ""
        self._state = "dirty" if self._state == "dirty" else "receiving"
        self._cancelled, self._received = threading.Event(), threading.Event()
        thread = threading.Thread(
            target=self._receive, args=(request, self._layout, self._cancelled, self._received), daemon=True
        )
        thread.start()

    def _receive(
        self, request: IpcPrepare, layout: Layout, cancelled: threading.Event, received: threading.Event
    ) -> None:
        try:
            self._stage = self._end.receive(request, layout, self._sink.rank, cancelled)
        except Exception as error:
            # The thread has nobody to raise to: `ready` tells the engine, the transport has told the sender.
            logger.warning("push %s was not received: %s", request.push, error)
            self._detail = f"{type(error).__name__}: {error}"
        if self._state == "receiving":
            self._state = "prepared" if self._stage is not None else "serving"
        received.set()
        if self._stage is not None:
            # Not before the stage is in its place: the commit may follow at once.
            self._end.confirm(request.push)

    def ready(self, push: str) -> None:
        """Raise `TransferFailed` unless the whole of ``push`` is staged here."""
        if push != self._push or self._stage is None:
            raise TransferFailed(
                f"rank {self._sink.rank} has not prepared push {push}" + (f" ({self._detail})" if self._detail else "")
            )

    def apply(self, push: str) -> float:
        """Load the staged push; returns the seconds it took. Raises `ApplyFailed`, and the rank is then dirty."""
        self.ready(push)
        assert self._layout is not None
        assert self._stage is not None
        start = time.perf_counter()
        self._state = "applying"
        # A step that was launched before generation stopped may still be reading the weights.
        staging.synchronize(self._sink.device)
        stage, self._stage = self._stage, None
        try:
            self._sink.load((entry.spec.name, entry.view(stage)) for entry in self._layout.entries)
            # The sender takes its memory back on the reply: nothing may still be reading it.
            staging.synchronize(self._sink.device)
        except Exception as error:
            self._state, self._detail = "dirty", f"{type(error).__name__}: {error}"
            raise ApplyFailed(
                f"rank {self._sink.rank} failed while loading push {push}: {self._detail}; it does not generate "
                "until a full push commits",
                weights="dirty",
            ) from error
        self._state, self._push, self._detail = "serving", "", ""
        return time.perf_counter() - start

    def abort(self, push: str = "") -> None:
        """Forget a push that was not applied, whichever it is where ``push`` is empty."""
        if push not in ("", self._push):
            return
        self._cancelled.set()
        self._received.wait(_ABORT_WAIT_S)
        self._stage, self._push = None, ""
        if self._state in ("receiving", "prepared"):
            self._state = "serving"

    def release(self, address: str) -> None:
        """Give back what is held of a sender that has closed."""
        if self._received.is_set():
            self._end.release(address)


def _run(receiver: Receiver, method: str, payload: bytes | str) -> msgspec.Struct:
    if method == "weightsync_open":
        return receiver.info()
    if method == "weightsync_status":
        return receiver.status(from_json(payload, StatusRequest).digest)
    if method == "update_weights_via_ipc_zmq":
        receiver.prepare(from_json(payload, IpcPrepare))
    elif method == "weightsync_ready":
        receiver.ready(from_json(payload, CommitRequest).push)
    elif method == "weightsync_commit":
        receiver.apply(from_json(payload, CommitRequest).push)
    elif method == "weightsync_abort":
        asked = from_json(payload, AbortRequest)
        if asked.release:
            receiver.release(asked.release)
        else:
            receiver.abort(asked.push)
    else:
        raise ValueError(f"no such method: {method}")
    return Done()


def handle(receiver: Callable[[], Receiver], method: str, payload: bytes | str) -> bytes:
    """Run one method on this rank: JSON in, JSON of a `wire.RankReply` out.

    Never raises: an exception that leaves a worker method or a scheduler handler can take the engine down, and in
    vLLM's multi-process executor leaves the other ranks' replies queued for the next call.
    """
    try:
        return to_json(RankReply(body=msgspec.Raw(to_json(_run(receiver(), method, payload)))))
    except Exception as error:
        if not isinstance(error, WeightSyncError):
            logger.exception("%s failed", method)
        return to_json(RankReply(error=error_reply(error)))


def error_reply(error: BaseException) -> ErrorReply:
    """An error as it crosses a process."""
    if isinstance(error, WeightSyncError):
        return ErrorReply(error=type(error).__name__, message=str(error), weights=error.weights)
    return ErrorReply(error="WeightSyncError", message=f"{type(error).__name__}: {error}", weights="unknown")


def collect(replies: Sequence[bytes | str], kind: type[_R]) -> list[_R]:
    """The replies of all ranks. Raises what the worst of the failed ranks reported, with every message."""
    decoded = [from_json(reply, RankReply) for reply in replies]
    failed = [reply.error for reply in decoded if reply.error is not None]
    if failed:
        worst = max(failed, key=lambda reply: SEVERITY.index(reply.weights))
        messages = dict.fromkeys(reply.message for reply in failed)
        raise getattr(errors, worst.error)("; ".join(messages), weights=worst.weights)
    return [from_json(reply.body, kind) for reply in decoded]
