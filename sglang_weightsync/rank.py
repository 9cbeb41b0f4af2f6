"""The handler of our request in a scheduler rank. It never raises: an exception would end the server.

A commit is one call of the handler on every rank, between two steps of the scheduler: retract, begin, load, end, flush,
set the version, continue. After each step the ranks exchange its outcome over their gloo group, so that all ranks of a
group decide alike. For the pauses ``wait`` and ``abort`` the tokenizer manager is drained before. With several groups
(`compat_groups`) each step is a call of its own, since all groups must have done one before any does the next; so it is
with several tokenizer workers (`compat_workers`), whose label must change while nothing generates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import UNSET

from sglang_weightsync import compat, compat_groups, compat_loading, compat_pause, gather
from sglang_weightsync.adapter import adapter_of
from sglang_weightsync.messages import (
    ENDS,
    HOLD,
    IN_FLIGHT,
    LABEL,
    LOAD,
    UNDO,
    WeightsyncReqInput,
    WeightsyncReqOutput,
)
from weightsync.engine import diagnosis
from weightsync.engine.private_names import check_deep
from weightsync.engine.rank_calls import all_unchanged, any_failed
from weightsync.engine.rank_methods import before_sleep, handle, needs_pushable
from weightsync.engine.receiver import Busy, Receiver
from weightsync.errors import ApplyFailed, TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.protocol import http, rank_replies
from weightsync.protocol.states import TOGETHER, Machine, TogetherState

logger = logging.getLogger(__name__)


class Handler:
    """One rank's handler of `WeightsyncReqInput`, called from the scheduler's loop.

    Every step runs under `_exchange`, which catches exceptions and then takes part in the gather, so that no rank waits
    for the reply of another in vain. `states.TOGETHER` is the state machine of all ranks of one group together.
    """

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self._group = compat_groups.group_of()
        self._made: Receiver | None = None
        self._together: Machine[TogetherState] = Machine(TOGETHER, "serving", "the schedulers")
        self._steps: dict[str, Callable[[WeightsyncReqInput], list[bytes]]] = {
            HOLD: self._hold,
            LOAD: self._load,
            LABEL: self._label,
            UNDO: lambda request: self._undo(request, []),
            **{method: partial(self._end, event) for event, method in ENDS.items()},
        }
        #: When the schedulers were last stopped, and how long the ranks then loaded.
        self._stopped, self._apply_s = 0.0, 0.0

    def __call__(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Run the request on this rank; returns the replies of all ranks."""
        try:
            if request.method == "weightsync_commit":
                return self._commit(request)
            if request.method == IN_FLIGHT:
                return self._output(request, [], in_flight=compat.has_requests(self._scheduler))
            if (step := self._steps.get(request.method)) is not None:
                return self._committed(request, step(request))
            replies = self._everywhere(request, request.method)
            asleep = compat.asleep(self._scheduler) if self._made is not None else []  # else it may lack the names
            return self._output(request, replies, asleep=asleep)
        except Exception as error:
            logger.exception("%s failed", request.method)
            return self._output(request, [_failed(error)])

    def before_sleep(self) -> None:
        """Give the standby back: the memory of the weights sleeps next. Never raises."""
        before_sleep(self._made)

    def _output(self, request: WeightsyncReqInput, replies: list[bytes], **more: Any) -> WeightsyncReqOutput:
        return WeightsyncReqOutput(call=request.call, replies=replies, group=self._group, **more)

    def _committed(self, request: WeightsyncReqInput, replies: list[bytes], **more: Any) -> WeightsyncReqOutput:
        pause_s = time.perf_counter() - self._stopped
        asleep = compat.asleep(self._scheduler)
        return self._output(request, replies, pause_s=pause_s, apply_s=self._apply_s, asleep=asleep, **more)

    def _receiver(self) -> Receiver:
        if self._made is None:
            if reason := compat.lacking(self._scheduler):
                raise UnsupportedOption(reason)
            self._made = Receiver(adapter_of(self._scheduler))
        return self._made

    def _everywhere(self, request: WeightsyncReqInput, method: str) -> list[bytes]:
        def receiver() -> Receiver:
            found = self._receiver()
            if needs_pushable(method):
                self._check(method, request.payload)
            return found

        return self._gather(handle(receiver, method, request.payload))

    def _check(self, method: str, payload: bytes) -> None:
        """Raise `UnsupportedOption` for anything with which a push would fail, or do harm, later on."""
        now = compat.not_now(self._scheduler) if method == diagnosis.METHOD else ""
        if reason := compat.refused(self._scheduler) or compat_loading.refused(self._scheduler) or now:
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
        return gather.all_replies(mine, compat_groups.cpu_group(self._scheduler))

    def _commit(self, request: WeightsyncReqInput) -> WeightsyncReqOutput:
        """Commit between two steps of the scheduler: stop, load, drop caches, set the version, continue.

        If a rank is not ready or cannot stop, nothing changes. After a later failure the ranks stay stopped, unless all
        could load the previous version again.
        """
        before = self._together.state
        replies = self._hold(request)
        if any_failed(replies):
            self._end("untouched")
            return self._output(request, list(filter(_has_failed, replies)))  # the others have changed nothing either
        event = "broken"
        try:
            replies = self._load(request)
            if any_failed(replies):
                if not any_failed(self._undo(request, replies)):
                    event = "untouched"
            elif not any_failed(replies := self._label(request)):
                event = "applied"
        finally:
            self._end(event)
        return self._committed(
            request,
            replies,
            restored=event == "untouched",
            dirty=(before, self._together.state) == ("serving", "dirty"),
        )

    # --- the steps of a commit

    def _hold(self, request: WeightsyncReqInput) -> list[bytes]:
        """Check that every rank is ready, then stop. `_end` follows, also after a failure."""
        if self._together.allows("broken"):  # the end of the commit before never came
            self._together.move("broken")
        replies = self._everywhere(request, "weightsync_ready")
        if any_failed(replies):
            return replies
        asked, self._stopped = _asked(request), time.perf_counter()
        return self._exchange(lambda: self._stop(asked))

    def _load(self, request: WeightsyncReqInput) -> list[bytes]:
        """Load the prepared push and drop the caches."""
        begin = time.perf_counter()
        self._together.move("load")
        replies = self._everywhere(request, "weightsync_commit")
        self._apply_s = time.perf_counter() - begin
        return replies if any_failed(replies) else self._exchange(lambda: self._flush(_asked(request)))

    def _undo(self, request: WeightsyncReqInput, replies: list[bytes]) -> list[bytes]:
        """After a load that failed on some rank with ``replies``, load the previous version on all."""
        if not (replies and all_unchanged(replies)):
            restored = self._everywhere(request, "weightsync_restore")
            if any_failed(restored):
                return restored
        return self._exchange(lambda: self._flush(_asked(request)))

    def _label(self, request: WeightsyncReqInput) -> list[bytes]:
        """Set the version of what is generated from now on; an adapter has one of its own."""
        asked = _asked(request)
        if asked.lora is not UNSET:
            return self._exchange(lambda: None)
        return self._exchange(lambda: compat.set_rank_version(self._scheduler, asked.version))

    def _end(self, event: str, _: WeightsyncReqInput | None = None) -> list[bytes]:
        """Generate again unless the weights must not be served."""
        if loaded := self._together.allows(event):
            self._together.move(event)
        if self._together.state == "serving":
            compat_pause.let_go(self._scheduler)
        elif loaded:
            # Requests cannot keep their KV here: SGLang's watchdog takes a long-paused batch for a hung one.
            compat_pause.hold(self._scheduler, retract=True)
        return [_DONE]

    def _stop(self, asked: http.CommitRequest) -> None:
        if reason := compat.not_now(self._scheduler):
            raise TransferFailed(f"{reason}; nothing was changed")
        compat_pause.hold(self._scheduler, retract=asked.pause != "keep")
        if compat_groups.has_stages() and not compat.is_idle(self._scheduler):
            raise Busy("the last results are still on their way through the pipeline")
        if asked.pause != "keep" and not compat.is_idle(self._scheduler):
            raise TransferFailed(
                "requests hold KV that cannot be dropped now (while a grammar is compiled, for example); nothing was "
                "changed, push again"
            )

    def _flush(self, asked: http.CommitRequest) -> None:
        if asked.pause != "keep" and not compat.flush_cache(self._scheduler):
            raise ApplyFailed("SGLang did not flush the caches of the old weights; push again", weights="dirty")


def _has_failed(reply: bytes) -> bool:
    return any_failed([reply])


def _asked(request: WeightsyncReqInput) -> http.CommitRequest:
    return http.from_json(request.payload, http.CommitRequest)


_DONE = http.to_json(rank_replies.RankReply())


def _failed(error: BaseException) -> bytes:
    return http.to_json(rank_replies.RankReply(error=http.error_reply(error), later=isinstance(error, Busy)))
