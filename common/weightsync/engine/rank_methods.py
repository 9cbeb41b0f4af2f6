"""The methods of a rank, by name: JSON in, JSON out. Each engine calls them by its own means."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from weightsync.engine import diagnosis
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.receiver import Busy, Receiver
from weightsync.errors import WeightSyncError, WrongState
from weightsync.protocol.diagnosis import DiagnoseRequest, RankReport
from weightsync.protocol.expected import MAKE_STANDBY, StandbyRequest
from weightsync.protocol.http import (
    UPDATE,
    AbortRequest,
    CommitRequest,
    Done,
    StatusRequest,
    UpdateRequest,
    error_reply,
    from_json,
    to_json,
)
from weightsync.protocol.rank_replies import RankReply
from weightsync.transports import registry

logger = logging.getLogger(__name__)


def _abort(receiver: Receiver, asked: AbortRequest) -> None:
    if asked.release:
        receiver.release(asked.release)
    else:
        receiver.abort(asked.push)


def _diagnose(receiver: Receiver, asked: DiagnoseRequest) -> RankReport:
    if (report := receiver.diagnosis.answer(asked)) is None:
        raise Busy("the rank has not yet finished to look at its host")
    return report


def needs_pushable(method: str) -> bool:
    """Whether ``method`` must be refused while nothing can be pushed into the engine, by its own reason."""
    return method.startswith(UPDATE) or method in ("weightsync_ready", MAKE_STANDBY, diagnosis.METHOD)


#: For each method, the type of its request, None if it has none, and its function; without a result it replies `Done`.
_METHODS: Final[dict[str, tuple[type[msgspec.Struct] | None, Callable[[Receiver, Any], object]]]] = {
    "weightsync_open": (None, lambda receiver, _: receiver.info()),
    "weightsync_expected": (None, lambda receiver, _: receiver.expected()),
    MAKE_STANDBY: (StandbyRequest, lambda receiver, asked: receiver.make_standby(asked)),
    "weightsync_status": (StatusRequest, lambda receiver, asked: receiver.status(asked.digest)),
    diagnosis.METHOD: (DiagnoseRequest, _diagnose),
    "weightsync_ready": (CommitRequest, lambda receiver, asked: receiver.ready(asked)),
    "weightsync_commit": (CommitRequest, lambda receiver, asked: receiver.apply(asked)),
    "weightsync_restore": (CommitRequest, lambda receiver, asked: receiver.restore(asked)),
    "weightsync_abort": (AbortRequest, _abort),
}


def _run(receiver: Receiver, method: str, payload: bytes | str) -> msgspec.Struct:
    if method not in _METHODS:
        return _run_of_transport(receiver, method, payload)
    kind, run = _METHODS[method]
    reply = run(receiver, from_json(payload, kind) if kind is not None else None)
    return reply if isinstance(reply, msgspec.Struct) else Done()


def _run_of_transport(receiver: Receiver, method: str, payload: bytes | str) -> msgspec.Struct:
    if method in (updates := registry.update_methods()):
        return receiver.prepare(from_json(payload, UpdateRequest), updates[method])
    if method in (setups := registry.setup_methods()):
        return receiver.join(from_json(payload, registry.handshake_of(method)), setups[method])
    raise ValueError(f"no such method: {method}")


def before_sleep(receiver: Receiver | None) -> None:
    """Have a rank whose weights are about to sleep give its standby back; ``receiver`` is None before it has any.

    Never raises, see `handle`.
    """
    try:
        if receiver is not None:
            receiver.sleep()
    except Exception as error:
        logger.warning("a second set of weights stays in memory until the next push: %s", error)


def handle(receiver: Callable[[], Receiver], method: str, payload: bytes | str) -> bytes:
    """Run one method on this rank: JSON in, JSON of a `rank_replies.RankReply` out.

    Never raises: an exception that leaves a worker method or a scheduler handler can take the engine down, and in
    vLLM's multi-process executor leaves the other ranks' replies queued for the next call.
    """
    try:
        return to_json(RankReply(body=msgspec.Raw(to_json(_run(receiver(), method, payload)))))
    except Unfinished as error:
        return to_json(RankReply(error=error_reply(WrongState(str(error))), later=True, at_once=True))
    except Busy as error:
        return to_json(RankReply(error=error_reply(WrongState(str(error))), later=True))
    except Exception as error:
        if not isinstance(error, WeightSyncError):
            logger.exception("%s failed", method)
        return to_json(RankReply(error=error_reply(error)))
