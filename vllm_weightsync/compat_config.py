"""As `compat`: settings of an engine with which pushes are refused, or which a push does not reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any, Final

from vllm_weightsync import compat_draft, compat_waves
from weightsync.engine import refusals
from weightsync.engine.private_names import missing_below

#: Connectors whose `reset_cache` reports whether all their KV is dropped.
_RESETTABLE: Final = ("OffloadingConnector", "SimpleCPUOffloadConnector")
_ASKED: Final = (
    "parallel_config.data_parallel_size",
    "parallel_config.data_parallel_index",
    "parallel_config.data_parallel_external_lb",
    "parallel_config.data_parallel_hybrid_lb",
    "parallel_config.data_parallel_master_ip",
    "parallel_config.data_parallel_rank",
    "parallel_config.data_parallel_rank_local",
    "parallel_config.data_parallel_rpc_port",
    "parallel_config.data_parallel_size_local",
    "model_config.is_moe",
    "parallel_config.enable_eplb",
    "parallel_config.enable_elastic_ep",
    "ec_transfer_config",
    "kv_transfer_config",
    "speculative_config",
)
#: Ways to draft tokens without a model.
_WITHOUT_MODEL: Final = ("ngram", "ngram_gpu", "suffix")


def switched_off() -> list[str]:
    """Installed plugins that vLLM does not load because VLLM_PLUGINS does not name them."""
    if "VLLM_PLUGINS" not in os.environ:
        return []
    allowed = os.environ["VLLM_PLUGINS"].split(",")
    return sorted(
        plugin.name
        for group in ("vllm.general_plugins", "vllm.endpoint_plugins")
        for plugin in entry_points(group=group)
        if plugin.name not in allowed
    )


def unsupported(config: Any) -> str:
    """Why pushes are refused, with the setting and what to do; empty if they are not."""
    return next(_reasons(config), "")


def _reasons(config: Any) -> Iterator[str]:
    if gone := missing_below(config, _ASKED):
        yield refusals.unknown("vLLM's configuration lacks", gone)
        return
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        yield from _replicas_of_experts(parallel)
    if parallel.enable_eplb or parallel.enable_elastic_ep:
        yield refusals.moving_experts("--enable-elastic-ep" if parallel.enable_elastic_ep else "--enable-eplb")
    if config.ec_transfer_config is not None:
        yield (
            "--ec-transfer-config: encoder outputs of the old weights would stay in other engines; start this one "
            "without it"
        )
    if (transfer := config.kv_transfer_config) is not None and transfer.kv_connector is not None:
        yield from _connectors(transfer)


def _replicas_of_experts(parallel: Any) -> Iterator[str]:
    if gone := compat_waves.lacking():
        yield refusals.unknown("vLLM's engine core lacks", gone)
    if parallel.data_parallel_rank_local is not None:
        yield (
            "VLLM_DP_RANK with a mixture of experts: the replicas of all processes take every step together, and a "
            "push into one would not stop the others; start one server for all of them, with --data-parallel-size alone"
        )


def _connectors(transfer: Any) -> Iterator[str]:
    if transfer.kv_role != "kv_both":
        yield refusals.travelling_kv(f"--kv-transfer-config (kv_role {transfer.kv_role})")
    extra = transfer.kv_connector_extra_config
    children = [(transfer.kv_connector, transfer.kv_connector_module_path, extra)]
    if transfer.kv_connector == "MultiConnector":
        children = [
            (child.get("kv_connector"), child.get("kv_connector_module_path"), child.get("kv_connector_extra_config"))
            for child in extra.get("connectors", ())
        ]
    for name, module, options in children:
        if name not in _RESETTABLE or module is not None:
            yield (
                f"--kv-transfer-config ({name}): it is not known to drop all KV of the old weights; start the engine "
                f"without it, or with one of {', '.join(_RESETTABLE)}"
            )
        spec = (options or {}).get("spec_name", "CPUOffloadingSpec")
        if name == "OffloadingConnector" and spec != "CPUOffloadingSpec":
            yield (
                f"--kv-transfer-config (OffloadingConnector with {spec}): its second tier keeps KV of the old weights; "
                "start the engine with the CPU tier alone"
            )


def left_as_it_is(config: Any) -> dict[str, str]:
    """What a push does not reach: the reasons by name."""
    speculative = config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_MODEL or not compat_draft.has_own_checkpoint(config):
        return {}
    return {"draft model": refusals.draft_model(f"--speculative-config ({speculative.method})")}
