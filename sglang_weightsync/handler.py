"""What a scheduler rank does with our request. No exception leaves here: one would take the whole server down."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch

from sglang_weightsync import compat, gather
from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
from weightsync import wire
from weightsync.errors import ApplyFailed
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
    """One rank's handler of `WeightsyncReqInput`, called from the scheduler's loop."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._made: Receiver | None = None

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
            self._made = Receiver(SglangSink(self._scheduler))
        return self._made

    def _everywhere(self, request: WeightsyncReqInput, method: str) -> list[bytes]:
        mine = handle(self._receiver, method, request.payload)
        return gather.all_replies(mine, compat.cpu_group(self._scheduler), request.timeout_s)

    def _commit(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Every rank ready, stop, apply, drop caches, set the version, go on: between two steps of the scheduler.

        All ranks see all replies, so they decide alike. After a failure they stay stopped, and the receivers dirty.
        """
        asked = wire.from_json(request.payload, wire.CommitRequest)
        ready = self._everywhere(request, "weightsync_ready")
        if _any_failed(ready):
            return WeightsyncReqOutput(call=request.call, replies=ready)
        begin = time.perf_counter()
        compat.pause(self._scheduler, retract=asked.pause != "keep")
        mark = time.perf_counter()
        applied = self._everywhere(request, "weightsync_commit")
        done = time.perf_counter()
        if not _any_failed(applied):
            if asked.pause != "keep" and not compat.flush_cache(self._scheduler):
                failure = ApplyFailed("SGLang did not flush the cache of the old weights; push again", weights="dirty")
                applied = [_failed(failure)]
            else:
                compat.set_rank_version(self._scheduler, asked.version)
                compat.resume(self._scheduler)
        pause_s = time.perf_counter() - begin
        return WeightsyncReqOutput(call=request.call, replies=applied, pause_s=pause_s, apply_s=done - mark)


def _any_failed(replies: list[bytes]) -> bool:
    return any(wire.from_json(reply, wire.RankReply).error is not None for reply in replies)


def _failed(error: BaseException) -> bytes:
    return wire.to_json(wire.RankReply(error=error_reply(error)))
