"""SGLang's front end: every call is one typed request to the schedulers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from sglang_weightsync import compat, compat_config, compat_groups, compat_lora
from sglang_weightsync.messages import ENDS, HOLD, LABEL, LOAD, UNDO, WeightsyncReqInput, WeightsyncReqOutput
from weightsync.engine import refusals
from weightsync.engine.rank_calls import COMMIT_CALL_S, Calls, any_failed, collect, settle, went_back
from weightsync.errors import ApplyFailed, TransferFailed, UnsupportedOption, WeightSyncError, changed_nothing
from weightsync.protocol import http
from weightsync.protocol.lockstep import Lockstep

logger = logging.getLogger(__name__)
_COMMITS = ("weightsync_commit", *ENDS.values())
_KEEP_REASON = refusals.old_kv("radix cache", "--disable-radix-cache")
_STAGES_REASON = (
    'the stages of a pipeline (--pp-size) cannot be stopped while they hold requests; use "wait" or "abort"'
)

_WORKERS_REASON = "its tokenizer workers (--tokenizer-worker-num) do not share their lists of adapters; start one"


class Tokenizers(Protocol):
    """What passes clients' requests to the schedulers."""

    several: bool
    """Whether answers reach clients by other processes, so that nothing may generate while the label is set."""

    def close_at_start(self, why: str) -> None:
        """Before HTTP is served: as `close`, and let nobody think that the engine is ready before `open`."""

    async def close(self, why: str) -> None:
        """Keep new requests from the schedulers; ``why`` is a sentence."""

    async def open(self) -> None:
        """Let requests through again."""

    def version(self) -> str:
        """The label of the served weights."""

    def set_version(self, version: str) -> None:
        """Set the label of new responses; the schedulers have set theirs."""

    def reply_to(self) -> str:
        """The address at which replies of schedulers are heard that cannot answer otherwise."""

    async def ask(self, request: WeightsyncReqInput) -> list[WeightsyncReqOutput]:
        """Send a request to the schedulers; returns the reply of each group. It has no deadline of its own."""

    def drained(self, *, abort: bool) -> contextlib.AbstractAsyncContextManager[None]:
        """Hold new requests back, and wait for those in flight, which ``abort`` ends.

        Requests that cannot finish because a user has paused the engine are not waited for.
        """


class SglangFrontEnd:
    """See `weightsync.engine.engine_front_end.EngineFrontEnd`."""

    engine = "sglang"
    busy = ""

    def __init__(self, server_args: Any, tokenizers: Tokenizers):
        self._tokenizers = tokenizers
        self._unsupported = compat_config.unsupported(server_args)
        self.engine_version = compat.SGLANG.version()
        self.model = compat.model_path(server_args)
        self.pause_refused = {"keep": _KEEP_REASON} if compat.has_prefix_cache(server_args) else {}
        self._has_stages = compat_config.has_stages(server_args)
        if self._has_stages:
            self._unsupported = self._unsupported or compat.SGLANG.check(compat_groups.STAGES)
            self.pause_refused = {"retract": _STAGES_REASON, "keep": _STAGES_REASON}
        #: What keeps requests from the stages of a dirty pipeline.
        self._drain: contextlib.AbstractAsyncContextManager[None] | None = None
        self.waits = compat.waits_for_initial_weights(server_args)
        if self.waits:
            tokenizers.close_at_start(refusals.FIRST_PUSH)
        self._groups = compat_config.groups(server_args)
        self.off = {} if self._unsupported else compat_config.left_as_it_is(server_args)
        if reason := compat.SGLANG.check(compat.DEEP):
            self.off['verify="deep"'] = reason
        if not self._unsupported and (untested := compat.SGLANG.untested()):
            logger.warning("%s", untested)
            self.off["tests"] = untested
        self.asleep: tuple[str, ...] = ()
        self.lora: compat_lora.SglangLora | str = _WORKERS_REASON
        self.lockstep: Lockstep | None = None
        #: The replies to the last commit, of each group.
        self._last: list[WeightsyncReqOutput] = []

    async def version(self) -> str:
        """SGLang's own weight version."""
        return self._tokenizers.version()

    async def call(self, method: str, payload: bytes) -> Sequence[bytes]:
        """See `EngineFrontEnd`; goes through the schedulers' request dispatchers."""
        if self._unsupported:
            raise UnsupportedOption(self._unsupported)
        reply_to = self._tokenizers.reply_to() if self._has_stages else ""
        request = WeightsyncReqInput(call=secrets.token_hex(8), method=method, payload=payload, reply_to=reply_to)
        outputs = sorted(await self._tokenizers.ask(request), key=lambda output: output.group)
        if any(output.call != request.call for output in outputs):
            raise TransferFailed("the schedulers answered another call; push again", weights="unknown")
        self.asleep = tuple(sorted({tag for output in outputs for tag in output.asleep}))
        if method in _COMMITS:  # one at a time; other calls may come in between
            self._last = outputs
        return [reply for output in outputs for reply in output.replies]

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """See `EngineFrontEnd`: drain if asked to, then do the rest between two steps of the schedulers."""
        async with self._adapters_held(request):
            return await self._commit(request, call, stopped)

    async def _commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        begin = time.perf_counter()
        async with self._held(request, stopped):
            held_s = time.perf_counter() - begin
            if self._groups > 1 or self._tokenizers.several:
                pause_s = await self._apply_together(request, call)
            else:
                pause_s = await self._apply(request, call)
        if stopped:
            await self._tokenizers.open()
            if self._drain is not None:
                drained, self._drain = self._drain, None
                await drained.__aexit__(None, None, None)
        apply_s = max(output.apply_s for output in self._last)
        seconds = {"pause": held_s, "apply": apply_s, "caches": pause_s - apply_s}
        return http.CommitReply(request.version, held_s + pause_s, seconds, self.asleep)

    async def withdraw(self, push: str) -> None:
        """Nothing to do: no engine is in lockstep with it."""

    async def stay_stopped(self, why: str) -> None:
        """Keep requests from the schedulers, which have stopped by themselves; resuming is refused with ``why``."""
        await self._tokenizers.close(why)

    async def _apply(self, request: http.CommitRequest, call: Calls) -> float:
        """Commit in one call of the handler; returns the seconds for which the schedulers stopped."""
        replies = await call("weightsync_commit", http.to_json(request), COMMIT_CALL_S)
        (last,) = self._last
        try:
            settle(replies)
        except WeightSyncError as error:
            if last.dirty:
                raise ApplyFailed(str(error), weights="dirty") from error
            if error.weights != "unchanged" and last.restored:
                raise went_back(error) from error
            raise
        self._set_version(request)
        return last.pause_s

    async def _apply_together(self, request: http.CommitRequest, call: Calls) -> float:
        """As `_apply`, step by step, for several groups of ranks, or several processes that label responses.

        None does a step before all have done the one before.
        """
        payload = http.to_json(request)

        async def step(method: str) -> Sequence[bytes | str]:
            return await call(method, payload, COMMIT_CALL_S)

        # A step that raises leaves the engine dirty: it is unknown what the groups hold.
        held = await step(HOLD)
        if any_failed(held):
            settle(await step(ENDS["untouched"]))
            collect(held, http.Done)
        failed = _failure(await step(LOAD))
        if failed is None:
            unlabelled = _failure(await step(LABEL))
            failed = unlabelled and ApplyFailed(str(unlabelled), weights="dirty")
        elif failed.weights != "unchanged":
            second = _failure(await step(UNDO))
            failed = went_back(failed) if second is None else ApplyFailed(f"{failed}; {second}", weights="dirty")
        event = "applied" if failed is None else "untouched" if failed.weights == "unchanged" else "broken"
        if failed is None:  # before any of them generates, whatever becomes of the others
            self._set_version(request)
        settle(await step(ENDS[event]))
        if failed is not None:
            raise failed
        return max(output.pause_s for output in self._last)

    def _set_version(self, request: http.CommitRequest) -> None:
        if request.lora is UNSET:
            self._tokenizers.set_version(request.version)
            return
        assert not isinstance(self.lora, str), "an adapter was prepared"
        self.lora.serve(request.lora, request.version, request.push)

    @contextlib.asynccontextmanager
    async def _adapters_held(self, request: http.CommitRequest) -> AsyncIterator[None]:
        """While no user changes what adapters there are, if the push is one."""
        if isinstance(self.lora, str) or isinstance(request.lora, UnsetType):
            yield
            return
        async with self.lora.alone(refusals.drain_s(request)):
            try:
                yield
            except BaseException as error:
                if not changed_nothing(error):
                    self.lora.withdraw(request.lora)
                raise

    @contextlib.asynccontextmanager
    async def _held(self, request: http.CommitRequest, stopped: bool) -> AsyncIterator[None]:
        if stopped or request.pause not in ("wait", "abort"):  # requests of a stopped engine would never finish
            yield
            return
        drained = self._tokenizers.drained(abort=request.pause == "abort")
        try:
            await asyncio.wait_for(drained.__aenter__(), refusals.drain_s(request))
        except asyncio.TimeoutError as error:
            raise refusals.still_in_flight(request) from error
        keep = False
        try:
            yield
        except BaseException as error:
            keep = self._has_stages and not changed_nothing(error)
            raise
        finally:
            if keep:
                self._drain = drained
            else:
                await drained.__aexit__(None, None, None)


def _failure(replies: Sequence[bytes | str]) -> WeightSyncError | None:
    try:
        settle(replies)
    except WeightSyncError as error:
        return error
    return None
