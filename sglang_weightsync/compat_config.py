"""As `compat`: settings of an engine with which pushes are refused, or which a push does not reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from weightsync.engine import refusals
from weightsync.engine.private_names import missing_below


def unsupported(server_args: Any) -> str:
    """Why pushes are refused, with the setting and what to do; empty if they are not."""
    return next(_reasons(server_args), "")


def _reasons(args: Any) -> Iterator[str]:
    if gone := missing_below(args, _ASKED):
        yield refusals.unknown("SGLang's server arguments lack", gone)
        return
    if args.enable_dp_attention:
        yield "--enable-dp-attention: its ranks neither stop nor load together; start the engine without it"
    if args.nnodes > 1 and args.pp_size > 1:
        yield (
            f"--nnodes {args.nnodes} with --pp-size {args.pp_size}: stages on another host cannot answer; start the "
            "engine with --pp-size 1, or on one host"
        )
    if args.weight_cache_mode != "off":
        yield (
            f"--weight-cache-mode {args.weight_cache_mode}: the weights are shared with other engines; start it with "
            "--weight-cache-mode off"
        )
    if args.enable_eplb or args.elastic_ep_backend not in (None, "none"):
        backend = f"--elastic-ep-backend {args.elastic_ep_backend}"
        yield refusals.moving_experts("--enable-eplb" if args.enable_eplb else backend)
    yield from _kv_elsewhere(args)


def _kv_elsewhere(args: Any) -> Iterator[str]:
    """Settings with which KV or embeddings of the old weights stay where a push cannot drop them."""
    if args.disaggregation_mode != "null" or args.enable_pd_role_switch:
        mode = f"--disaggregation-mode {args.disaggregation_mode}"
        yield refusals.travelling_kv(mode if args.disaggregation_mode != "null" else "--enable-pd-role-switch")
    if args.decoupled_spec_role != "null":
        yield f"--decoupled-spec-role {args.decoupled_spec_role}: the other half keeps its weights; start it without"
    for name in ("encoder_only", "language_only", "enable_mm_global_cache"):
        if getattr(args, name):
            yield (
                f"--{name.replace('_', '-')}: embeddings of the old weights would stay in other processes; start it "
                "without"
            )
    for name in ("enable_lmcache", "enable_flexkv", "enable_unified_cache_external_linker"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')}: {_KEEPS}; start it without"
    if args.hicache_storage_backend is not None:
        yield f"--hicache-storage-backend {args.hicache_storage_backend}: {_KEEPS}; start it without a storage back end"
    if args.radix_cache_backend is not None:
        yield f"--radix-cache-backend {args.radix_cache_backend}: {_UNKNOWN}; start it without"


_KEEPS = "KV of the old weights stays there under keys without a version"
_UNKNOWN = "it is not known to drop all KV of the old weights"
_ASKED = (
    "dp_size",
    "enable_dp_attention",
    "pp_size",
    "nnodes",
    "tokenizer_worker_num",
    "weight_cache_mode",
    "enable_eplb",
    "elastic_ep_backend",
    "disaggregation_mode",
    "enable_pd_role_switch",
    "decoupled_spec_role",
    "encoder_only",
    "language_only",
    "enable_mm_global_cache",
    "enable_lmcache",
    "enable_flexkv",
    "enable_unified_cache_external_linker",
    "hicache_storage_backend",
    "radix_cache_backend",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "model_path",
)


def has_stages(args: Any) -> bool:
    """Whether the engine is a pipeline of several stages (``--pp-size``)."""
    return int(args.pp_size) > 1


def has_workers(args: Any) -> bool:
    """Whether several tokenizer workers serve HTTP (``--tokenizer-worker-num``)."""
    return int(args.tokenizer_worker_num) > 1


def groups(server_args: Any) -> int:
    """How many groups of ranks answer for themselves, see `compat_groups`."""
    return int(server_args.dp_size * server_args.pp_size)


def has_own_checkpoint(draft: str | None, target: str) -> bool:
    """Whether a draft model has its own checkpoint; otherwise its weights are in the target's (NEXTN, MTP)."""
    return draft is not None and os.path.realpath(draft) != os.path.realpath(target)


def left_as_it_is(server_args: Any) -> dict[str, str]:
    """What a push does not reach: the reasons by name."""
    if not has_own_checkpoint(server_args.speculative_draft_model_path, server_args.model_path):
        return {}
    option = f"--speculative-draft-model-path ({server_args.speculative_algorithm})"
    return {"draft model": refusals.draft_model(option)}
