"""The routes in vLLM's API server, and the commit as vLLM does it."""

from __future__ import annotations

import asyncio
import logging
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import State

from vllm_weightsync import compat
from vllm_weightsync.extension import WorkerExtension
from weightsync import security, wire
from weightsync.client import START_LINES
from weightsync.errors import ApplyFailed, PluginNotLoaded, PushTimeout, UnsupportedOption
from weightsync.receiver import collect
from weightsync.routes import admin_routes

logger = logging.getLogger(__name__)

_KEEP_REASON = (
    "requests in flight would go on with KV of the old weights, and the prefix cache would hand that KV to others; "
    "start the engine with --no-enable-prefix-caching"
)


class EndpointPlugin:
    """vLLM's ``EndpointPlugin``: attaches the routes, then learns the engine client they act through."""

    name = "weightsync"
    required_tasks = None

    def __init__(self) -> None:
        self._front: VllmFrontEnd | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the admin routes; without a key there are none."""
        app.router.routes.append(admin_routes(self._engine, security.engine_token()))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Remember the engine; a render-only server has none."""
        if engine_client is not None:
            self._front = VllmFrontEnd(engine_client)

    def _engine(self) -> VllmFrontEnd:
        if self._front is None:
            raise UnsupportedOption("this server has no engine to update")
        return self._front


class VllmFrontEnd:
    """See `weightsync.routes.FrontEnd`."""

    engine = "vllm"

    def __init__(self, engine_client: Any):
        self._client = engine_client
        self.engine_version = compat.version()
        self.model = str(engine_client.vllm_config.model_config.model)
        self.pause_refused = {"keep": _KEEP_REASON} if compat.has_prefix_cache(engine_client) else {}
        self.dirty = False
        self._unsupported = compat.check(compat.SERVER)
        if self._unsupported:
            logger.error("%s; pushes will be refused", self._unsupported)

    async def version(self) -> str:
        """vLLM's own weight version."""
        return str(await self._client.get_weight_version())

    async def call(self, method: str, payload: bytes) -> Sequence[str]:
        """Through the worker extension."""
        self._check_loaded()
        return await compat.call_workers(self._client, method, payload.decode())

    def _check_loaded(self) -> None:
        # Before any worker is called: a call that workers do not know would upset vLLM's own bookkeeping of replies.
        extension = compat.extension_class(self._client)
        if extension is None or not issubclass(extension, WorkerExtension):
            raise PluginNotLoaded(
                "the routes are loaded, the worker extension is not. Start it as: "
                f"{START_LINES['vllm'].format(model=self.model)} (or derive your own extension class from it)"
            )
        if self._unsupported:
            raise UnsupportedOption(self._unsupported)
        if compat.parallel_config(self._client).data_parallel_size > 1:
            raise UnsupportedOption(
                "internal data parallelism is not supported: start one server per replica and name them all"
            )

    async def commit(self, request: wire.CommitRequest) -> wire.CommitReply:
        """Pause, reload, drop caches, set the version, resume."""
        payload = wire.to_json(request)
        collect(await self.call("weightsync_ready", payload), wire.Done)
        begin = time.perf_counter()
        seconds: dict[str, float] = {}
        await self._pause(request)
        seconds["pause"] = time.perf_counter() - begin
        # Requests that a failed commit left frozen may hold KV of either version.
        drop_running, self.dirty = self.dirty or request.pause == "retract", True
        try:
            await self._apply(request, payload, seconds, drop_running)
        except ApplyFailed:
            raise
        except Exception as error:
            raise ApplyFailed(
                f"vLLM failed half-way through the commit ({error}); it stays paused until a full push commits",
                weights="dirty",
            ) from error
        self.dirty = False
        mark = time.perf_counter()
        await self._client.resume_generation()
        end = time.perf_counter()
        seconds["resume"] = end - mark
        return wire.CommitReply(version=request.version, pause_s=end - begin, seconds=seconds)

    async def _pause(self, request: wire.CommitRequest) -> None:
        if self.dirty:
            return  # paused already; to wait for requests would run them on weights that are half new
        # "retract": vLLM keeps the requests, and dropping their KV below makes it recompute them.
        mode = "keep" if request.pause == "retract" else request.pause
        try:
            await asyncio.wait_for(
                self._client.pause_generation(mode=mode, clear_cache=False), timeout=request.timeout_s
            )
        except asyncio.TimeoutError as error:
            await self._client.resume_generation()
            raise PushTimeout(
                f"requests in flight did not finish within {request.timeout_s:g} s (pause={request.pause!r}); "
                "nothing was changed"
            ) from error

    async def _apply(
        self, request: wire.CommitRequest, payload: bytes, seconds: dict[str, float], drop_running: bool
    ) -> None:
        mark = time.perf_counter()
        collect(await self.call("weightsync_commit", payload), wire.Done)
        seconds["apply"] = time.perf_counter() - mark
        mark = time.perf_counter()
        dropped = await self._client.reset_prefix_cache(reset_running_requests=drop_running, reset_connector=True)
        if not dropped and request.pause != "keep":
            raise ApplyFailed("vLLM did not drop the prefix cache of the old weights; push again", weights="dirty")
        await self._client.reset_encoder_cache()
        await self._client.update_weight_version(request.version)
        seconds["caches"] = time.perf_counter() - mark
