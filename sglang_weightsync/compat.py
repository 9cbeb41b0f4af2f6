"""Every name of SGLang that this package uses and SGLang does not document as stable, checked when the server starts.

Written for SGLang 0.5.21 to 0.5.23. If a name is missing, `SGLANG.check` says so in every process at start, and pushes
are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch

from sglang_weightsync import compat_groups, compat_pause
from weightsync import python_lock
from weightsync.engine.private_names import Names, PrivateNames

SGLANG: Final = PrivateNames("SGLang", "sglang", "0.5.21", "0.5.23")
HTTP_SETUP: Final = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
SCHEDULER_SETUP: Final = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"

#: Gives memory back until the scheduler is told to take it again.
RELEASE: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation"
)
#: Called between two looks at the queue of requests, if a scheduler has none.
IDLE: Final = "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle"

#: The names that this package uses, by module.
NEEDED: Final[Names] = {
    "sglang.srt.plugins.hook_registry": (
        "HookRegistry.register",
        "HookType.BEFORE",
        "HookType.AFTER",
        "HookType.AROUND",
    ),
    "sglang.srt.entrypoints.http_server": (
        "_setup_and_run_http_server",
        "app",
        "WAIT_WEIGHTS_READY_TIMEOUT",
    ),
    "sglang.srt.constants": ("GPU_MEMORY_TYPE_WEIGHTS",),
    "sglang.srt.managers.io_struct": (
        "BaseReq",
        "hook_custom_types",
        "PauseGenerationReqInput",
        "ContinueGenerationReqInput",
    ),
    "sglang.srt.managers.mm_schedule": ("embedding_cache",),
    "sglang.srt.managers.tokenizer_control_mixin": ("_COMMUNICATOR_SPECS",),
    "sglang.srt.managers.tokenizer_manager": (
        "TokenizerManager.auto_create_handle_loop",
        "TokenizerManager.abort_request",
        "TokenizerManager.config_value",
        "TokenizerManager.is_pause",
        "TokenizerManager.pause_generation",
        "TokenizerManager.continue_generation",
        "TokenizerManager._update_weight_version_if_provided",
    ),
    "sglang.srt.managers.scheduler": (
        "Scheduler.init_request_dispatcher",
        "Scheduler.pause_generation",
        "Scheduler.continue_generation",
        "Scheduler.flush_cache",
        "Scheduler.record_weight_version_change",
        "Scheduler.is_fully_idle",
        "Scheduler.maybe_sleep_on_idle",
    ),
    "sglang.srt.managers.scheduler_components.weight_updater": (
        "SchedulerWeightUpdaterManager._select_runners",
        "SchedulerWeightUpdaterManager.release_memory_occupation",
    ),
    "sglang.srt.mem_cache.multimodal_cache": ("MultiModalStaticCache.clear",),
    "sglang.srt.model_executor.model_runner_components.weight_updater": (
        "WeightUpdater.begin_weight_update",
        "WeightUpdater.end_weight_update",
        "WeightUpdater.load_weights_from_distributed",
        "WeightUpdater._assert_weight_cache_inactive",
        "_unsupported_derived_weight_cache_error",
    ),
    "sglang.srt.runtime_context": ("get_model", "get_parallel", "get_spec"),
    "sglang.utils": ("TypeBasedDispatcher",),
}

#: The names that ``verify="deep"`` uses too.
DEEP: Final[Names] = {
    "sglang.srt.model_executor.model_runner_components.load_model_utils": ("load_kv_cache_scales",),
    "sglang.srt.model_loader.loader": ("DefaultModelLoader._get_all_weights", "DefaultModelLoader.load_model"),
    "sglang.srt.configs.device_config": ("DeviceConfig",),
    "sglang.srt.configs.load_config": ("LoadFormat.AUTO",),
    "sglang.srt.layers.rotary_embedding.factory": ("_ROPE_DICT",),
    "sglang.srt.platforms": ("current_platform",),
    "sglang.srt.utils.common": ("reserve_rope_cache_for_long_sequences",),
    "sglang.srt.utils.offloader": ("NoopOffloader", "get_offloader", "set_offloader"),
}

#: Attributes of a scheduler, which exist only after it has been made; `_SCHEDULER_DEEP` is for ``verify="deep"``.
_SCHEDULER: Final = (
    "tp_group.rank_in_group",
    "tp_group.world_size",
    "tp_cpu_group",
    "tp_worker.model_runner.model",
    "tp_worker.model_runner.model_config.model_path",
    "weight_updater._session",
    "weight_updater.offload_tags",
    "enable_hicache_storage",
    "_engine_paused",
    "_request_dispatcher",
)
_SCHEDULER_DEEP: Final = ("tp_worker.model_runner.loader", "tp_worker.model_runner.load_config")


def hook(
    request: type,
    reply: type,
    on_http: Callable[[Any, Any], None],
    on_scheduler: Callable[[Any], None],
    on_sleep: Callable[[], None],
) -> None:
    """Register a request type and its reply type in all processes, and the hooks of this package.

    ``on_http`` is called before HTTP is served, with the server arguments and the tokenizer manager; ``on_scheduler``
    is called with every new scheduler, and ``on_sleep`` before the memory of this process's weights is given back.
    """
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.managers import io_struct, tokenizer_control_mixin
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before_http(server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> None:
        on_http(server_args, tokenizer_manager)

    def before_release(updater: Any, asked: Any) -> None:
        if not asked.tags or GPU_MEMORY_TYPE_WEIGHTS in asked.tags:
            on_sleep()

    io_struct.hook_custom_types(request, reply)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("weightsync", reply))
    HookRegistry.register(HTTP_SETUP, before_http, HookType.BEFORE)
    HookRegistry.register(SCHEDULER_SETUP, lambda result, scheduler: on_scheduler(scheduler), HookType.AFTER)
    # An idle scheduler looks for requests without end, and holds Python's lock, which a push needs.
    HookRegistry.register(IDLE, lambda *_: python_lock.rest(), HookType.AFTER)
    HookRegistry.register(RELEASE, before_release, HookType.BEFORE)
    HookRegistry.register(compat_pause.PAUSE, compat_pause.around_pause, HookType.AROUND)
    HookRegistry.register(compat_pause.CONTINUE, compat_pause.around_continue, HookType.AROUND)


def app() -> Any:
    """SGLang's HTTP server."""
    from sglang.srt.entrypoints import http_server

    return http_server.app


def app_routes() -> list[Any]:
    """The routes of SGLang's HTTP server, to append to."""
    routes: list[Any] = app().router.routes
    return routes


# --- in a scheduler process -------------------------------------------------------------------------------------------


def lacking(scheduler: Any) -> str:
    """What this scheduler lacks; empty if nothing."""
    return SGLANG.check_object(scheduler, _SCHEDULER)


def lacking_for_deep(scheduler: Any) -> str:
    """What this scheduler lacks for ``verify="deep"``; empty if nothing."""
    return SGLANG.check_object(scheduler, _SCHEDULER_DEEP, DEEP)


def not_now(scheduler: Any) -> str:
    """Why weights cannot be loaded at this moment; empty if they can."""
    if scheduler.weight_updater._session is not None:
        return "another weight-update session is open: end it with /end_weight_update first"
    return ""


def refused(scheduler: Any) -> str:
    """Why a push into this scheduler is refused, and what to do; empty if it is not."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    if GPU_MEMORY_TYPE_WEIGHTS in scheduler.weight_updater.offload_tags:
        return (
            "the memory of this SGLang's weights sleeps, and cannot be written: wake it first, with "
            f'POST /resume_memory_occupation and {{"tags": ["{GPU_MEMORY_TYPE_WEIGHTS}"]}}'
        )
    if scheduler.enable_hicache_storage:
        return (
            "a storage back end of HiCache is attached, which keeps KV of the old weights under keys without a "
            "version: detach it, or start the engine without --hicache-storage-backend"
        )
    return ""


def asleep(scheduler: Any) -> list[str]:
    """SGLang's tags of the memory that sleeps."""
    return sorted(scheduler.weight_updater.offload_tags)


def has_requests(scheduler: Any) -> bool:
    """Whether requests have yet to finish; those that wait for a user to resume this scheduler do not count."""
    paused = scheduler._engine_paused and not compat_groups.has_stages()  # a pipeline goes on if a user pauses it
    return not (paused or scheduler.is_fully_idle())


def is_idle(scheduler: Any) -> bool:
    """Whether nothing holds KV; requests that are only queued do not count."""
    return bool(scheduler.is_fully_idle(ignore_waiting=True))


def device_of(scheduler: Any) -> torch.device:
    """The device of the scheduler's weights."""
    return next(model(scheduler).parameters()).device


def model_source(runner: Any) -> tuple[str, str | None, object]:
    """The path or hub name, revision and dtype of a runner's model."""
    config = runner.model_config
    return str(config.model_path), getattr(config, "revision", None), config.dtype


def model(scheduler: Any) -> torch.nn.Module:
    """The served model."""
    found: torch.nn.Module = scheduler.tp_worker.model_runner.model
    return found


def handle(scheduler: Any, request: type, handler: Callable[[Any], Any]) -> None:
    """Make the scheduler pass requests of this type to ``handler``."""
    from sglang.utils import TypeBasedDispatcher

    scheduler._request_dispatcher += TypeBasedDispatcher([(request, handler)])


def flush_cache(scheduler: Any) -> bool:
    """Drop KV and image embeddings of the old weights; returns False if requests still hold some."""
    from sglang.srt.managers import mm_schedule

    if not scheduler.flush_cache(empty_cache=False):
        return False
    if mm_schedule.embedding_cache is None:
        return True
    mm_schedule.embedding_cache.clear()
    return len(mm_schedule.embedding_cache) == 0


def set_rank_version(scheduler: Any, version: str) -> None:
    """Set the version label of what this rank generates from now on."""
    scheduler.record_weight_version_change(new_version=version)


# --- in the process that serves HTTP ----------------------------------------------------------------------------------


def has_prefix_cache(server_args: Any) -> bool:
    """Whether requests can reuse each other's KV."""
    return not server_args.disable_radix_cache


def model_path(server_args: Any) -> str:
    """The model's path or name on the command line."""
    return str(server_args.model_path)


def waits_for_initial_weights(server_args: Any) -> bool:
    """Whether the server was told not to generate before its first push."""
    return bool(server_args.checkpoint_engine_wait_weights_before_ready)


def not_ready_from_start() -> None:
    """Before HTTP is served, keep this process from becoming ready until its ``initial_weights_loaded`` is true.

    SGLang's own option delays readiness for two minutes only, and does not keep the server from answering requests.
    """
    from sglang.srt.entrypoints import http_server

    http_server.WAIT_WEIGHTS_READY_TIMEOUT = sys.maxsize
