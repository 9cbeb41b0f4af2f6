"""SGLang's side of the routes: one typed request to the schedulers a call."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from sglang_weightsync import compat
from sglang_weightsync.messages import WeightsyncReqInput, WeightsyncReqOutput
from weightsync import wire
from weightsync.errors import PushTimeout, UnsupportedOption, WeightSyncError
from weightsync.receiver import collect

#: How long the schedulers may take to answer. The trainer waits as long as its push may take, which is less; giving up
#: here while they go on would leave their version and ours apart.
_CALL_S: Final = 600.0
_KEEP_REASON = (
    "requests in flight would go on with KV of the old weights, and the radix cache would hand that KV to others; "
    "start the engine with --disable-radix-cache"
)


class SglangFrontEnd:
    """See `weightsync.routes.FrontEnd`."""

    engine = "sglang"

    def __init__(self, server_args: Any, tokenizer_manager: Any):
        self._manager = tokenizer_manager
        self._unsupported = compat.unsupported(server_args)
        self.dirty = False
        self.engine_version = compat.version()
        self.model = compat.model_path(server_args)
        self.pause_refused = {"keep": _KEEP_REASON} if compat.has_prefix_cache(server_args) else {}

    async def version(self) -> str:
        """SGLang's own weight version."""
        return compat.served_version(self._manager)

    async def call(self, method: str, payload: bytes) -> Sequence[bytes]:
        """Through the schedulers' request dispatchers."""
        return (await self._ask(method, payload)).replies

    async def _ask(self, method: str, payload: bytes) -> WeightsyncReqOutput:
        if self._unsupported:
            raise UnsupportedOption(self._unsupported)
        request = WeightsyncReqInput(call=secrets.token_hex(8), method=method, payload=payload)
        try:
            reply: WeightsyncReqOutput = await asyncio.wait_for(compat.ask(self._manager, request), _CALL_S)
        except asyncio.TimeoutError as error:
            raise PushTimeout(
                f"the schedulers did not answer {method} within {_CALL_S:g} s", weights="unknown"
            ) from error
        if reply.call != request.call:
            raise PushTimeout(f"the schedulers answered an earlier call late, and not yet {method}", weights="unknown")
        return reply

    async def commit(self, request: wire.CommitRequest) -> wire.CommitReply:
        """Drain if asked to, then everything in one step of the schedulers."""
        begin = time.perf_counter()
        async with self._held(request):
            held_s = time.perf_counter() - begin
            reply = await self._ask("weightsync_commit", wire.to_json(request))
            try:
                collect(reply.replies, wire.Done)
            except WeightSyncError as error:
                if error.weights == "dirty":
                    self.dirty = True
                    await compat.hold_new_requests(self._manager, True)
                raise
            compat.set_served_version(self._manager, request.version)
        if self.dirty:
            self.dirty = False
            await compat.hold_new_requests(self._manager, False)
        seconds = {"pause": held_s, "apply": reply.apply_s, "caches": reply.pause_s - reply.apply_s}
        return wire.CommitReply(version=request.version, pause_s=held_s + reply.pause_s, seconds=seconds)

    @contextlib.asynccontextmanager
    async def _held(self, request: wire.CommitRequest) -> AsyncIterator[None]:
        if self.dirty or request.pause not in ("wait", "abort"):
            yield  # a dirty engine is stopped already, and its requests would never finish
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
