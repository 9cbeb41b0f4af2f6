"""The handler of our request in a scheduler rank. It never raises: an exception would end the server.

A commit is one call of the handler on every rank, between two steps of the scheduler: retract, begin, load, end, flush,
set the version, continue. After each step the ranks exchange its outcome over their gloo group, so that all decide
alike. For the pauses ``wait`` and ``abort`` the tokenizer manager is drained before.
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

    Every step runs under `_exchange`, which catches exceptions and then takes part in the gather, so that no rank waits
    for the reply of another in vain. `states.TOGETHER` is the state machine of all ranks together.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._made: Receiver | None = None
        self._together: Machine[TogetherState] = Machine(TOGETHER, "serving", "the schedulers")

    def __call__(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Run the request on this rank; returns the replies of all ranks."""
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
        """Raise `UnsupportedOption` for anything with which a push would fail, or do harm, later on."""
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
        """Commit between two steps of the scheduler: stop, load, drop caches, set the version, continue.

        If a rank is not ready or cannot stop, nothing changes. After a later failure the ranks stay stopped, unless all
        could load the previous version again.
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
            elif not any_failed(self._restore(request, asked, replies)):
                event = "untouched"
        finally:
            self._together.move(event)
        if self._together.state == "serving":
            compat_pause.let_go(self._scheduler)
        else:
            # Requests cannot keep their KV here: SGLang's watchdog takes a long-paused batch for a hung one.
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

    def _restore(self, request: WeightsyncReqInput, asked: http.CommitRequest, replies: list[bytes]) -> list[bytes]:
        """After a commit that failed on some rank, load the previous version on all; returns their replies."""
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
                "requests hold KV that cannot be dropped now (while a grammar is compiled, for example); nothing was "
                "changed, push again"
            )

    def _finish(self, asked: http.CommitRequest, version: str) -> None:
        if asked.pause != "keep" and not compat.flush_cache(self._scheduler):
            raise ApplyFailed("SGLang did not flush the caches of the old weights; push again", weights="dirty")
        if version:
            compat.set_rank_version(self._scheduler, version)


_DONE = http.to_json(http.RankReply())


def _failed(error: BaseException) -> bytes:
    return http.to_json(http.RankReply(error=http.error_reply(error)))
