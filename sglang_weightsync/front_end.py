"""SGLang's side of the routes: one typed request to the schedulers a call."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sglang_weightsync import compat
from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
from weightsync import wire
from weightsync.calls import COMMIT_CALL_S, Calls, settle
from weightsync.errors import ApplyFailed, PushTimeout, TransferFailed, UnsupportedOption, WeightSyncError

_KEEP_REASON = (
    "requests in flight would go on with KV of the old weights, and the radix cache would hand that KV to others; "
    "start the engine with --disable-radix-cache"
)


class SglangFrontEnd:
    """See `weightsync.replica.FrontEnd`."""

    engine = "sglang"

    def __init__(self, server_args: Any, tokenizer_manager: Any):
        self._manager = tokenizer_manager
        self._unsupported = compat.unsupported(server_args)
        self.engine_version = compat.version()
        self.model = compat.model_path(server_args)
        self.pause_refused = {"keep": _KEEP_REASON} if compat.has_prefix_cache(server_args) else {}
        self.waits = compat.waits_for_initial_weights(server_args)
        if self.waits:
            compat.hold_from_start(tokenizer_manager)
        self._last = WeightsyncReqOutput(call="", replies=[])

    async def version(self) -> str:
        """SGLang's own weight version."""
        return compat.served_version(self._manager)

    async def call(self, method: str, payload: bytes) -> Sequence[bytes]:
        """Through the schedulers' request dispatchers."""
        if self._unsupported:
            raise UnsupportedOption(self._unsupported)
        request = WeightsyncReqInput(call=secrets.token_hex(8), method=method, payload=payload)
        reply: WeightsyncReqOutput = await compat.ask(self._manager, request)
        if reply.call != request.call:
            raise TransferFailed("the schedulers answered another call; push again", weights="unknown")
        self._last = reply
        return reply.replies

    async def commit(self, request: wire.CommitRequest, call: Calls, stopped: bool) -> wire.CommitReply:
        """Drain if asked to, then everything in one step of the schedulers."""
        begin = time.perf_counter()
        async with self._held(request, stopped):
            held_s = time.perf_counter() - begin
            try:
                settle(await call("weightsync_commit", wire.to_json(request), COMMIT_CALL_S))
            except WeightSyncError as error:
                if error.weights == "unchanged":
                    raise
                if self._last.restored:
                    raise ApplyFailed(
                        f"{error}; the version before was loaded again on every rank", weights="unchanged"
                    ) from error
                await compat.hold_new_requests(self._manager, True)
                raise
            compat.set_served_version(self._manager, request.version)
        if stopped:
            await compat.release_first(self._manager)
        last = self._last
        seconds = {"pause": held_s, "apply": last.apply_s, "caches": last.pause_s - last.apply_s}
        return wire.CommitReply(version=request.version, pause_s=held_s + last.pause_s, seconds=seconds)

    @contextlib.asynccontextmanager
    async def _held(self, request: wire.CommitRequest, stopped: bool) -> AsyncIterator[None]:
        if stopped or request.pause not in ("wait", "abort"):
            yield  # an engine that is stopped already has requests that would never finish
            return
        drained = compat.drained(self._manager, abort=request.pause == "abort")
        try:
            await asyncio.wait_for(drained.__aenter__(), request.timeout_s)
        except asyncio.TimeoutError as error:
            raise PushTimeout(
                f"requests in flight did not finish within {request.timeout_s:g} s (pause={request.pause!r}); "
                "nothing was changed"
            ) from error
        try:
            yield
        finally:
            await drained.__aexit__(None, None, None)
