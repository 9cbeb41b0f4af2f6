"""vLLM's front end: the routes in the API server, and the steps of a commit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from argparse import Namespace
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import State

from vllm_weightsync import (
    compat,
    compat_agreement,
    compat_config,
    compat_lora,
    compat_models,
    compat_transfer,
    compat_workers,
)
from weightsync.engine import metrics, refusals, servers
from weightsync.engine.front_end import FrontEnd
from weightsync.engine.rank_calls import COMMIT_CALL_S, Calls, restored, settle
from weightsync.engine.rank_methods import needs_pushable
from weightsync.engine.relayed import Relay
from weightsync.engine.routes import HealthGuard, admin_routes
from weightsync.errors import (
    ApplyFailed,
    EngineUnreachable,
    PushTimeout,
    UnsupportedOption,
    WeightSyncError,
    changed_nothing,
)
from weightsync.protocol import auth, http
from weightsync.protocol.lockstep import Lockstep

logger = logging.getLogger(__name__)

#: Seconds: the engine core answers within a step, unless it is loading weights.
_LOOK_S = 2.0
#: Seconds: a trainer is waiting for the error.
_TELL_S = 0.5
#: Seconds that a commit gets at least: a message cannot ask for less.
_LEAST_S = 0.01
_KEEP_REASON = refusals.old_kv("prefix cache", "--no-enable-prefix-caching")


class EndpointPlugin:
    """vLLM's ``EndpointPlugin``: attaches the routes, then learns the engine client they act through."""

    name = "weightsync"
    required_tasks = None

    def __init__(self) -> None:
        self._found: FrontEnd | servers.Elsewhere | None = None
        self._others: asyncio.Server | None = None
        if left_out := compat_config.switched_off():
            logger.warning(
                "vLLM does not load these installed plugins, because VLLM_PLUGINS does not name them: %s",
                ", ".join(left_out),
            )

    def attach_router(self, app: Starlette) -> None:
        """Add the admin routes; without a key there are none."""
        app.router.routes.append(admin_routes(self._front_end, auth.engine_token()))
        app.router.routes.insert(0, HealthGuard(lambda: self._found))

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Remember the engine; a render-only server has none."""
        if engine_client is None:
            return
        several = (getattr(args, "api_server_count", 1) or 1) > 1
        lacking = compat.lacks_server_index(engine_client) if several else ""
        compat_transfer.give(
            engine_client, lambda: Relay(self._front_end(), auth.engine_token(), several_servers=several)
        )
        if several and not lacking and compat.server_index(engine_client) > 0:
            self._found = servers.Elsewhere(servers.meeting_point(os.getppid()))
            return
        front = VllmFrontEnd(engine_client, lacking)
        models = getattr(state, "openai_serving_models", None)
        front.lora = compat_lora.served(engine_client, models, several_servers=several)
        await front.hold_from_start()
        self._found = found = FrontEnd(front, metrics.of_server())
        if several and not lacking:
            self._others = await servers.answer_others(found, servers.meeting_point(os.getppid()))

    def _front_end(self) -> FrontEnd | servers.Elsewhere:
        if self._found is None:
            raise UnsupportedOption("this server has no engine to update")
        return self._found


class VllmFrontEnd:
    """See `weightsync.engine.engine_front_end.EngineFrontEnd`."""

    engine = "vllm"

    def __init__(self, engine_client: Any, lacking: str = ""):
        self._client = engine_client
        self.engine_version = compat.VLLM.version()
        config = engine_client.vllm_config
        self.model = str(config.model_config.model)
        self.pause_refused = {"keep": _KEEP_REASON} if compat.has_prefix_cache(engine_client) else {}
        self.waits = compat.waits_for_initial_weights(engine_client)
        self._version = ""
        self.asleep: tuple[str, ...] = ()
        self.lora: compat_lora.VllmLora | str = "it has no list of adapters that requests name; push to a server's URL"
        self.lockstep: Lockstep | None = None
        self._unsupported = lacking or compat.VLLM.check(compat.SERVER) or compat_config.unsupported(config)
        if not self._unsupported:
            self.lockstep = compat.lockstep(engine_client)
        self.off = {} if self._unsupported else compat_config.left_as_it_is(config)
        if reason := compat.VLLM.check(compat_models.DEEP):
            self.off['verify="deep"'] = reason
        if reason := compat.VLLM.check(compat_transfer.NAMES):
            self.off["--weight-transfer-config"] = reason
        if not self._unsupported and not compat.can_ask_core():
            self._unsupported = (
                "weightsync's general plugin is not loaded: VLLM_PLUGINS must name weightsync, and `pip install` must "
                "have installed it with its entry points"
            )
        if self._unsupported:
            logger.error("%s; pushes will be refused", self._unsupported)
        elif untested := compat.VLLM.untested():
            logger.warning("%s", untested)
            self.off["tests"] = untested

    @property
    def busy(self) -> str:
        """See `EngineFrontEnd`: an API server's calls wait for nobody."""
        return ""

    async def hold_from_start(self) -> None:
        """Stop an engine that waits for its first push."""
        if self.waits and compat.can_ask_core():
            await self._hold("keep", refusals.FIRST_PUSH)
        elif self.waits:
            await compat.pause(self._client)

    async def version(self) -> str:
        """vLLM's own weight version; the last known one while the engine core is loading, or frozen."""
        with contextlib.suppress(PushTimeout):
            self._version = str(await self._answer(self._client.get_weight_version(), "get_weight_version", _LOOK_S))
        return self._version

    async def _answer(self, call: Awaitable[Any], what: str, timeout_s: float = COMMIT_CALL_S) -> Any:
        return await compat.answer(self._client, call, what, timeout_s)

    async def _hold(self, mode: str, refused: str = "", timeout_s: float = COMMIT_CALL_S) -> None:
        await compat.hold(self._client, mode, refused, timeout_s)

    async def call(self, method: str, payload: bytes) -> Sequence[str]:
        """See `EngineFrontEnd`; calls the worker methods of the general plugin."""
        # Check before any worker is called: a call of an unknown method would leave replies in vLLM's queues.
        if self._unsupported:
            raise UnsupportedOption(self._unsupported)
        if needs_pushable(method):
            await self._check_awake()
        return await compat.call_workers(self._client, compat_workers.CALL, method, payload.decode())

    async def _check_awake(self) -> None:
        # Sleeping KV does not matter: it is dropped anyway.
        self.asleep = tuple(await compat.asleep(self._client, COMMIT_CALL_S))
        if "weights" in self.asleep:
            raise UnsupportedOption(
                "the memory of this vLLM's weights sleeps, and cannot be written: wake it first, with "
                'POST /wake_up?tags=weights or LLM.wake_up(tags=["weights"])'
            )

    async def commit(self, request: http.CommitRequest, call: Calls, stopped: bool) -> http.CommitReply:
        """See `EngineFrontEnd`: pause, reload, drop caches, set the version, resume."""
        request = await self._begun(request)
        begin = mark = time.perf_counter()
        seconds: dict[str, float] = {}
        paused, failed = stopped, None
        try:
            if not stopped:
                await self._pause(request)
            paused, mark = True, time.perf_counter()
            seconds["pause"] = mark - begin
            await self._load(request, call)
        except Exception as error:
            failed = await self._failed(request.push, error)
            if not changed_nothing(failed):
                await self._abort_users_of(request.lora)
            if not paused or not changed_nothing(failed):
                if failed is error:
                    raise
                raise failed from error
        seconds["apply"] = time.perf_counter() - mark
        mark = time.perf_counter()
        try:
            # Also after a drain: an engine that a user has paused may hold requests that do not finish.
            await self._drop_caches(stopped or failed is not None or request.pause != "keep", request.pause)
            if failed is None:
                await self._set_version(request)
            seconds["caches"] = time.perf_counter() - mark
            mark = time.perf_counter()
            if failed is None or not stopped:
                await compat.let_go(self._client, COMMIT_CALL_S)
        except Exception as error:
            raise ApplyFailed(f"vLLM failed half-way through the commit ({error})", weights="dirty") from error
        if failed is not None:
            raise failed
        end = time.perf_counter()
        seconds["resume"] = end - mark
        return http.CommitReply(request.version, end - begin, seconds, self.asleep)

    async def _abort_users_of(self, lora: str | msgspec.UnsetType) -> None:
        """Ranks may hold different versions of an adapter: whatever runs with it must not go on after the next push."""
        if lora is msgspec.UNSET or isinstance(self.lora, str):
            return
        self.lora.withdraw(lora)
        try:
            await self._hold("abort", timeout_s=_TELL_S)
        except Exception as error:
            logger.error("requests with the adapter %r were not aborted: %s", lora, error)

    async def _set_version(self, request: http.CommitRequest) -> None:
        if request.lora is not msgspec.UNSET:
            assert not isinstance(self.lora, str), "an adapter was prepared"
            self.lora.serve(request.lora, request.version, request.push)
            return
        await self._answer(self._client.update_weight_version(request.version), "update_weight_version")
        self._version = request.version

    async def withdraw(self, push: str) -> None:
        """See `EngineFrontEnd`: engines in lockstep with this one need not wait for it."""
        if self.lockstep is None:
            return
        with contextlib.suppress(Exception):
            # What is decided stays so.
            votes = (self._all(step, push, yes=False, timeout_s=_TELL_S) for step in compat_agreement.STEPS)
            await asyncio.wait_for(asyncio.gather(*votes), _TELL_S)

    async def _begun(self, request: http.CommitRequest) -> http.CommitRequest:
        """Wait until all engines in lockstep are asked to commit; the request, with the time that is left."""
        if self.lockstep is None:
            return request
        start = time.monotonic()
        try:
            begun = await self._all(compat_agreement.BEGIN, request.push, timeout_s=refusals.drain_s(request))
        except Exception as error:
            raise ApplyFailed(
                f"vLLM could not agree with the engines in lockstep, and nothing was changed: {error}",
                weights="unchanged",
            ) from error
        if not begun:
            raise UnsupportedOption(refusals.NOT_IN_LOCKSTEP)
        left_s = request.timeout_s - (time.monotonic() - start)
        return msgspec.structs.replace(request, timeout_s=max(left_s, _LEAST_S))

    async def _load(self, request: http.CommitRequest, call: Calls) -> None:
        payload = http.to_json(request)
        try:
            settle(await call("weightsync_commit", payload, COMMIT_CALL_S))
        except WeightSyncError as error:
            raise await restored(error, call, payload) from error
        if not await self._all(compat_agreement.APPLIED, request.push):
            raise await restored(ApplyFailed(refusals.OTHER_FAILED, weights="dirty"), call, payload)

    async def _failed(self, push: str, error: Exception) -> Exception:
        """The error of a commit that failed here or in an engine in lockstep: all serve the version before, or none."""
        if self.lockstep is None:
            return error
        unchanged = changed_nothing(error)
        try:
            await self._all(compat_agreement.APPLIED, push, yes=False)
            if await self._all(compat_agreement.RESTORED, push, yes=unchanged) or not unchanged:
                return error
        except Exception as second:
            return ApplyFailed(f"{error}; {second}", weights="dirty")
        return ApplyFailed(f"{error}; the engines in lockstep with this one could not load it", weights="dirty")

    async def _all(self, step: str, push: str, *, yes: bool = True, timeout_s: float = COMMIT_CALL_S) -> bool:
        """Whether all engines in lockstep say yes."""
        if self.lockstep is None:
            return yes
        return await compat.agree(self._client, push, step, yes=yes, timeout_s=timeout_s)

    async def stay_stopped(self, why: str) -> None:
        """Hold the engine core; a request to resume it raises ``why``."""
        try:
            await self._hold("", why, _TELL_S)
        except Exception as error:  # it stays held, and gets the reason as soon as it handles calls again
            logger.error("vLLM's engine core does not know yet why it stays stopped: %s", error)

    async def _pause(self, request: http.CommitRequest) -> None:
        # "retract": vLLM keeps the requests, and recomputes their KV, which is dropped below.
        mode = "keep" if request.pause == "retract" else request.pause
        try:
            await self._hold(mode, timeout_s=refusals.drain_s(request))
        except PushTimeout as error:
            await compat.let_go(self._client, COMMIT_CALL_S)
            raise refusals.still_in_flight(request) from error
        except EngineUnreachable:
            raise
        except Exception as error:  # one replica may have failed: the others are held
            await compat.let_go(self._client, COMMIT_CALL_S)
            raise ApplyFailed(f"vLLM did not pause, and nothing was changed: {error}", weights="unchanged") from error

    async def _drop_caches(self, drop_running: bool, pause: http.PauseMode) -> None:
        dropped = await compat.reset_prefix_cache(
            self._client, reset_running_requests=drop_running, reset_connector=True
        )
        if not dropped and pause != "keep":
            raise ApplyFailed("vLLM did not drop the prefix cache of the old weights; push again", weights="dirty")
        await self._answer(self._client.reset_encoder_cache(), "reset_encoder_cache")
