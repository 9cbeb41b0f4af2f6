"""What a scheduler rank does with our request. No exception leaves here: one would take the whole server down."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_weightsync import compat, gather
from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
from weightsync import wire
from weightsync.errors import ApplyFailed, TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.expected import expected_of
from weightsync.receiver import Receiver, error_reply, handle
from weightsync.sink import Expected

logger = logging.getLogger(__name__)


class SglangSink:
    """See `weightsync.sink.Sink`."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self.rank = compat.rank_of(scheduler)
        self.device = compat.device_of(scheduler)

    def expected(self) -> Expected:
        """The checkpoint that the engine was started with."""
        model, revision, dtype = compat.model_source(self._scheduler)
        return expected_of(model, revision=revision, dtype=dtype)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through SGLang's begin/end session."""
        compat.load(self._scheduler, weights)

    def digest(self) -> str:
        """Of every parameter and buffer."""
        return compat.digest(self._scheduler)


class Handler:
    """One rank's handler of `WeightsyncReqInput`, called from the scheduler's loop.

    Whatever a rank does in a step it does under `_exchange`: it catches its own exceptions and then takes part in the
    gather, so that no rank waits for another's reply and all decide alike.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._made: Receiver | None = None
        self._dirty = False

    def __call__(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Run it on this rank, and answer with every rank's reply."""
        try:
            if request.method == "weightsync_commit":
                return self._commit(request)
            return WeightsyncReqOutput(call=request.call, replies=self._everywhere(request, request.method))
        except Exception as error:
            logger.exception("%s failed", request.method)
            return WeightsyncReqOutput(call=request.call, replies=[_failed(error)])

    def _receiver(self) -> Receiver:
        if self._made is None:
            if reason := compat.lacking(self._scheduler):
                raise UnsupportedOption(reason)
            self._made = Receiver(SglangSink(self._scheduler))
        return self._made

    def _everywhere(self, request: WeightsyncReqInput, method: str) -> list[bytes]:
        return self._gather(handle(self._receiver, method, request.payload))

    def _exchange(self, step: Callable[[], None]) -> list[bytes]:
        try:
            step()
            mine = _DONE
        except Exception as error:
            if not isinstance(error, WeightSyncError):
                logger.exception("a step of the commit failed")
            mine = _failed(error)
        return self._gather(mine)

    def _gather(self, mine: bytes) -> list[bytes]:
        return gather.all_replies(mine, compat.cpu_group(self._scheduler))

    def _commit(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Every rank ready, stop, apply, drop caches, set the version, go on: between two steps of the scheduler.

        A rank that is not ready or cannot stop leaves all as they were. After a later failure they stay stopped.
        """
        asked = wire.from_json(request.payload, wire.CommitRequest)
        replies = self._everywhere(request, "weightsync_ready")
        if _any_failed(replies):
            return WeightsyncReqOutput(call=request.call, replies=replies)
        begin = time.perf_counter()
        replies = self._exchange(lambda: self._stop(asked))
        mark = done = time.perf_counter()
        if _any_failed(replies):
            if not self._dirty:
                compat.resume(self._scheduler)
        else:
            self._dirty = True
            replies = self._everywhere(request, "weightsync_commit")
            done = time.perf_counter()
            if not _any_failed(replies):
                replies = self._exchange(lambda: self._finish(asked))
            if not _any_failed(replies):
                self._dirty = False
                compat.resume(self._scheduler)
        pause_s = time.perf_counter() - begin
        return WeightsyncReqOutput(call=request.call, replies=replies, pause_s=pause_s, apply_s=done - mark)

    def _stop(self, asked: wire.CommitRequest) -> None:
        if reason := compat.not_now(self._scheduler):
            raise TransferFailed(f"{reason}; nothing was changed")
        compat.pause(self._scheduler, retract=asked.pause != "keep")
        if asked.pause != "keep" and not compat.is_idle(self._scheduler):
            raise TransferFailed(
                "requests hold KV that cannot be given up now (grammars being compiled, for one); nothing was changed, "
                "push again"
            )

    def _finish(self, asked: wire.CommitRequest) -> None:
        if asked.pause != "keep" and not compat.flush_cache(self._scheduler):
            raise ApplyFailed("SGLang did not flush the cache of the old weights; push again", weights="dirty")
        compat.set_rank_version(self._scheduler, asked.version)


_DONE = wire.to_json(wire.RankReply())


def _any_failed(replies: list[bytes]) -> bool:
    return any(wire.from_json(reply, wire.RankReply).error is not None for reply in replies)


def _failed(error: BaseException) -> bytes:
    return wire.to_json(wire.RankReply(error=error_reply(error)))
