"""The methods of a rank, by name: JSON in, JSON out, over whatever means an engine has to reach its ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from weightsync.errors import WeightSyncError
from weightsync.receiver import Receiver
from weightsync.transports.registry import ENGINE_ENDS
from weightsync.wire import (
    AbortRequest,
    CommitRequest,
    Done,
    InitNcclGroup,
    RankReply,
    RegisterNixl,
    StatusRequest,
    UpdateRequest,
    error_reply,
    from_json,
    to_json,
)

logger = logging.getLogger(__name__)

#: What announces a push -> by which transport its bytes come.
UPDATE_METHODS: Final = {f"update_weights_via_{name}": name for name in ENGINE_ENDS}


def _run(receiver: Receiver, method: str, payload: bytes | str) -> msgspec.Struct:
    if method == "weightsync_open":
        return receiver.info()
    if method == "weightsync_status":
        return receiver.status(from_json(payload, StatusRequest).digest)
    if method == "init_nccl_group":
        return receiver.join(from_json(payload, InitNcclGroup))
    if method == "register_nixl":
        return receiver.join(from_json(payload, RegisterNixl))
    if method in UPDATE_METHODS:
        return receiver.prepare(from_json(payload, UpdateRequest), UPDATE_METHODS[method])
    if method == "weightsync_ready":
        receiver.ready(from_json(payload, CommitRequest))
    elif method == "weightsync_commit":
        receiver.apply(from_json(payload, CommitRequest))
    elif method == "weightsync_restore":
        receiver.restore(from_json(payload, CommitRequest))
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
