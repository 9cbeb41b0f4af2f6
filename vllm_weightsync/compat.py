"""Every name of vLLM that this package uses and vLLM does not document as stable, checked when the server starts.

Written for vLLM 0.27.1 to 0.33. If a name is missing, `VLLM.check` says so at start, and pushes are refused.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import torch

from vllm_weightsync import compat_agreement, compat_pause
from weightsync.engine.private_names import Names, PrivateNames
from weightsync.engine.rank_calls import COMMIT_CALL_S
from weightsync.errors import EngineUnreachable, PushTimeout
from weightsync.memory import arenas
from weightsync.protocol.lockstep import Lockstep

VLLM: Final = PrivateNames("vLLM", "vllm", "0.27.1", "0.33")

_WAIT: Final = "wait_for_initial_weights"
#: Seconds between two checks, during a call, whether the engine has died.
_LOOK_UP_S: Final = 0.5
#: Seconds beyond its timeout that an answer of `agree` takes at most.
_LATE_S: Final = 5.0

#: Names used in the API server, by module.
SERVER: Final[Names] = {
    "vllm.v1.engine.async_llm": (
        "AsyncLLM.pause_generation",
        "AsyncLLM.reset_encoder_cache",
        "AsyncLLM.update_weight_version",
        "AsyncLLM.get_weight_version",
        "AsyncLLM.errored",
    ),
    "vllm.v1.engine.core_client": ("AsyncMPClient.call_utility_async", "AsyncMPClient._call_utility_async"),
    "vllm.v1.engine.core": (
        "EngineCore.pause_scheduler",
        "EngineCore.resume_scheduler",
        "EngineCore.reset_prefix_cache",
        "EngineCore.collective_rpc",
        "EngineCore.is_scheduler_paused",
        "DPEngineCoreProc.add_request",
        "DPEngineCoreProc.has_work",
        "DPEngineCoreProc._handle_client_request",
        "DPEngineCoreProc._has_global_unfinished_reqs",
        "DPEngineCoreProc._notify_idle_state_callbacks",
        "DPEngineCoreProc._pause_complete",
        "DPEngineCoreProc.resume_scheduler",
    ),
    "vllm.v1.engine": ("EngineCoreOutputs.start_wave", "EngineCoreRequestType.WAKEUP"),
    "vllm.v1.core.sched.interface": ("PauseState.UNPAUSED", "PauseState.PAUSED_ALL"),
    "vllm.v1.core.sched.scheduler": ("Scheduler.pause_state", "Scheduler.set_pause_state"),
    "vllm.v1.executor.abstract": ("Executor.wake_up",),
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase.init_worker",),
}

#: Names used in a worker.
WORKER: Final[Names] = {
    "vllm.v1.worker.gpu_worker": ("Worker.reload_weights",),
    "vllm._custom_ops": ("create_onednn_scaled_mm",),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "get_layerwise_info",
        "_copy_and_restore_kernel_tensors",
        "_place_kernel_tensors",
        "LOADING_LAYERS",
    ),
}


def worker_rank(worker: Any) -> int:
    """The worker's rank among all workers of its engine; each replica has its own engine core, with ranks from 0."""
    parallel = worker.vllm_config.parallel_config
    replica = parallel.data_parallel_rank_local if _has_some(parallel) else parallel.data_parallel_index
    return int(replica * parallel.world_size + worker.rank)


def _has_some(parallel: Any) -> bool:
    """Whether the server was started for some of the replicas; these are an engine of its own."""
    return bool(parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb)


def worker_device(worker: Any) -> torch.device:
    """The device of the worker's weights."""
    return torch.device(worker.device)


def model_source(worker: Any) -> tuple[str, str | None, object]:
    """The served model's path or hub name, revision and dtype."""
    config = worker.model_config
    return config.model, config.revision, config.dtype


def model(worker: Any) -> torch.nn.Module:
    """The served model."""
    found: torch.nn.Module = worker.model_runner.get_model()
    return found


def prefix(worker: Any) -> str:
    """What vLLM puts before the names of the layers of a worker's model: empty, but for a draft model."""
    return getattr(worker, "weightsync_prefix", "")


def replicas(engine_client: Any) -> int:
    """How many replicas the engine has: all (``--data-parallel-size``), or those of a server that has only some."""
    parallel = parallel_config(engine_client)
    return int(parallel.data_parallel_size_local if _has_some(parallel) else parallel.data_parallel_size)


def lockstep(engine_client: Any) -> Lockstep | None:
    """The engine's part, if replicas of other servers take every step together with its own."""
    parallel = parallel_config(engine_client)
    own = replicas(engine_client)
    if own == parallel.data_parallel_size or not engine_client.vllm_config.model_config.is_moe:
        return None
    address = f"{parallel.data_parallel_master_ip}:{parallel.data_parallel_rpc_port}"
    if parallel.data_parallel_master_ip.startswith("127.") or parallel.data_parallel_master_ip in ("localhost", "::1"):
        address += f" in {arenas.network_id()}"
    return Lockstep(address, int(parallel.data_parallel_rank), own, int(parallel.data_parallel_size))


async def agree(engine_client: Any, push: str, step: str, *, yes: bool, timeout_s: float) -> bool:
    """Whether all engines in `lockstep` say yes in a step of `compat_agreement`. Raises as `answer`."""
    call = _call_cores(engine_client, compat_agreement.AGREE, push, step, yes, time.monotonic() + timeout_s)
    return all(await answer(engine_client, call, compat_agreement.AGREE, timeout_s + _LATE_S))


def lacks_server_index(engine_client: Any) -> str:
    """Why `server_index` cannot be told; empty if it can."""
    return VLLM.check_object(engine_client, ("engine_core.client_index",))


def server_index(engine_client: Any) -> int:
    """Which of the engine's API servers this is (``--api-server-count``)."""
    return int(engine_client.engine_core.client_index)


def parallel_config(engine_client: Any) -> Any:
    """The engine's parallel configuration, as the API server knows it."""
    return engine_client.vllm_config.parallel_config


def has_prefix_cache(engine_client: Any) -> bool:
    """Whether requests can reuse each other's KV."""
    return bool(engine_client.vllm_config.cache_config.enable_prefix_caching)


def waits_for_initial_weights(engine_client: Any) -> bool:
    """Whether the engine was told not to generate before its first push.

    The option is ``--additional-config '{"weightsync": {"wait_for_initial_weights": true}}'``. Raises `ValueError` for
    an unknown option of weightsync: with a misspelt one the engine would serve weights that were not pushed.
    """
    given = engine_client.vllm_config.additional_config
    ours = given.get("weightsync", {}) if isinstance(given, dict) else {}
    if not isinstance(ours, dict) or ours.keys() - {_WAIT} or not isinstance(ours.get(_WAIT, False), bool):
        raise ValueError(f'--additional-config: "weightsync" must be {{"{_WAIT}": true|false}}, not {ours!r}')
    return bool(ours.get(_WAIT, False))


def can_ask_core() -> bool:
    """Whether the general plugin is loaded; the engine core and the workers load the same plugins as this process."""
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, compat_pause.HOLD)


async def pause(engine_client: Any) -> None:
    """Pause as a user would; anybody may resume the engine."""
    await engine_client.pause_generation(mode="keep", clear_cache=False)


async def hold(engine_client: Any, mode: str, refused: str, timeout_s: float) -> None:
    """Stop the engine for a push, or keep it stopped; see `compat_pause`. Raises as `answer`."""
    call = _call_cores(engine_client, compat_pause.HOLD, mode, refused)
    await answer(engine_client, call, compat_pause.HOLD, timeout_s)


async def let_go(engine_client: Any, timeout_s: float) -> None:
    """End `hold`: the engine generates, or is paused if users want that. Raises as `answer`."""
    call = _call_cores(engine_client, compat_pause.LET_GO)
    await answer(engine_client, call, compat_pause.LET_GO, timeout_s)


async def asleep(engine_client: Any, timeout_s: float) -> list[str]:
    """vLLM's tags of the memory that sleeps. Raises as `answer`."""
    call = _call_cores(engine_client, compat_pause.ASLEEP)
    found: list[list[Any]] = await answer(engine_client, call, compat_pause.ASLEEP, timeout_s)
    return sorted({str(tag) for tags in found for tag in tags})


async def reset_prefix_cache(engine_client: Any, *, reset_running_requests: bool, reset_connector: bool) -> bool:
    """Drop the KV of the old weights; returns False if some is still used. Raises as `answer`."""
    call = _call_cores(engine_client, "reset_prefix_cache", reset_running_requests, reset_connector)
    return all(await answer(engine_client, call, "reset_prefix_cache", COMMIT_CALL_S))


async def _call_cores(engine_client: Any, name: str, *args: Any) -> list[Any]:
    """Call a method of the engine core of each replica; vLLM's own calls return the reply of the first one only."""
    client = engine_client.engine_core
    if replicas(engine_client) == 1:
        return [await client.call_utility_async(name, *args)]
    calls = (client._call_utility_async(name, *args, engine=engine) for engine in client.core_engines)
    return list(await asyncio.gather(*calls))


async def call_workers(engine_client: Any, name: str, method: str, payload: str) -> Sequence[str]:
    """Run ``method`` on every worker, through the wrapper's method ``name``. Raises as `answer`.

    vLLM's own call gets no timeout: its replies have no number, and after a late one every call would get the reply to
    the call before.
    """
    call = _call_cores(engine_client, "collective_rpc", name, None, (method, payload), None)
    replies: list[Sequence[str]] = await answer(engine_client, call, method, COMMIT_CALL_S)
    return [reply for replica in replies for reply in replica]


async def answer(engine_client: Any, call: Awaitable[Any], what: str, timeout_s: float) -> Any:
    """Wait for a reply of the engine core. Raises `EngineUnreachable` if it has died, `PushTimeout` if it is late.

    vLLM drops pending calls when its engine core dies, so a plain await would never return.
    """
    waiting, end = asyncio.ensure_future(call), time.monotonic() + timeout_s
    while not waiting.done() and not engine_client.errored and (left_s := end - time.monotonic()) > 0:
        await asyncio.wait({waiting}, timeout=min(left_s, _LOOK_UP_S))
    if waiting.done() and not (engine_client.errored and waiting.exception() is not None):
        return waiting.result()
    waiting.cancel()
    if engine_client.errored:
        raise EngineUnreachable(f"vLLM's engine core died during {what}", weights="unknown")
    raise PushTimeout(f"vLLM's engine core did not answer {what} within {timeout_s:g} s", weights="unknown")
