"""What a scheduler rank does with our request. No exception leaves here: one would take the whole server down.

A commit happens inside one call of the handler on every rank. Ranks exchange the outcome of each step over their gloo
group, so that all decide alike. Retract, begin, load, end, flush, version and continue lie between two steps of the
scheduler; to wait and to abort, the tokenizer manager is drained first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_weightsync import compat, compat_loading, compat_pause, gather
from sglang_weightsync.adapter import SglangAdapter
from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
from weightsync.engine.private_names import check_deep
from weightsync.engine.rank_calls import all_unchanged, any_failed
from weightsync.engine.rank_methods import handle
from weightsync.engine.receiver import Receiver
from weightsync.errors import ApplyFailed, TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.protocol import http
from weightsync.protocol.states import TOGETHER, Machine, TogetherState

logger = logging.getLogger(__name__)


class Handler:
    """One rank's handler of `WeightsyncReqInput`, called from the scheduler's loop.

    Whatever a rank does in a step it does under `_exchange`: it catches its own exceptions and then takes part in the
    gather, so that no rank waits for another's reply and all decide alike. What all are in is `states.TOGETHER`'s to
    say.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._made: Receiver | None = None
        self._together: Machine[TogetherState] = Machine(TOGETHER, "serving", "the schedulers")

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
            self._made = Receiver(SglangAdapter(self._scheduler))
        return self._made

    def _everywhere(self, request: WeightsyncReqInput, method: str) -> list[bytes]:
        def receiver() -> Receiver:
            found = self._receiver()
            if method.startswith(http.UPDATE) or method == "weightsync_ready":
                self._check(method, request.payload)
            return found

        return self._gather(handle(receiver, method, request.payload))

    def _check(self, method: str, payload: bytes) -> None:
        """Raise `UnsupportedOption` for what SGLang would refuse or get wrong once a push is under way."""
        if reason := compat.refused(self._scheduler) or compat_loading.refused(self._scheduler):
            raise UnsupportedOption(reason)
        if method.startswith(http.UPDATE):
            check_deep(payload, lambda: compat.lacking_for_deep(self._scheduler))

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

        A rank that is not ready or cannot stop leaves all as they were. After a later failure they stay stopped, unless
        all could be brought back.
        """
        asked = http.from_json(request.payload, http.CommitRequest)
        replies = self._everywhere(request, "weightsync_ready")
        if any_failed(replies):
            return WeightsyncReqOutput(call=request.call, replies=replies)
        begin = time.perf_counter()
        replies = self._exchange(lambda: self._stop(asked))
        if any_failed(replies):
            if self._together.state == "serving":
                compat_pause.let_go(self._scheduler)
            return WeightsyncReqOutput(call=request.call, replies=replies)
        mark, before = time.perf_counter(), self._together.state
        self._together.move("load")
        event = "broken"
        try:
            replies = self._everywhere(request, "weightsync_commit")
            done = time.perf_counter()
            if not any_failed(replies):
                replies = self._exchange(lambda: self._finish(asked, asked.version))
                event = "broken" if any_failed(replies) else "applied"
            elif not any_failed(self._brought_back(request, asked, replies)):
                event = "untouched"
        finally:
            self._together.move(event)
        if self._together.state == "serving":
            compat_pause.let_go(self._scheduler)
        else:
            # Requests that were to keep their KV cannot: SGLang's watchdog takes a paused batch for a hung one.
            compat_pause.hold(self._scheduler, retract=True)
        return WeightsyncReqOutput(
            call=request.call,
            replies=replies,
            pause_s=time.perf_counter() - begin,
            apply_s=done - mark,
            restored=event == "untouched",
            dirty=(before, self._together.state) == ("serving", "dirty"),
            asleep=compat.asleep(self._scheduler),
        )

    def _brought_back(
        self, request: WeightsyncReqInput, asked: http.CommitRequest, replies: list[bytes]
    ) -> list[bytes]:
        """After a commit that failed on some rank: what came of loading the version before on every one."""
        if not all_unchanged(replies):
            restored = self._everywhere(request, "weightsync_restore")
            if any_failed(restored):
                return restored
        return self._exchange(lambda: self._finish(asked, ""))

    def _stop(self, asked: http.CommitRequest) -> None:
        if reason := compat.not_now(self._scheduler):
            raise TransferFailed(f"{reason}; nothing was changed")
        compat_pause.hold(self._scheduler, retract=asked.pause != "keep")
        if asked.pause != "keep" and not compat.is_idle(self._scheduler):
            raise TransferFailed(
                "requests hold KV that cannot be given up now (grammars being compiled, for one); nothing was changed, "
                "push again"
            )

    def _finish(self, asked: http.CommitRequest, version: str) -> None:
        if asked.pause != "keep" and not compat.flush_cache(self._scheduler):
            raise ApplyFailed("SGLang did not flush the caches of the old weights; push again", weights="dirty")
        if version:
            compat.set_rank_version(self._scheduler, version)


_DONE = http.to_json(http.RankReply())


def _failed(error: BaseException) -> bytes:
    return http.to_json(http.RankReply(error=http.error_reply(error)))
