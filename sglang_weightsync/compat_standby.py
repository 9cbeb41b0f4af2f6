"""As `compat`: whether the weights of a scheduler may lie elsewhere after each push, and a second set of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

import torch

from sglang_weightsync import compat, compat_loading
from weightsync.engine import fresh_model
from weightsync.engine.adapter import Movable, StandbyHooks, sleeping_needs_room
from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.slices import TORCH

#: Attributes of a scheduler that are used for its standby.
_SCHEDULER: Final = (
    *("server_args.enable_torch_compile", "server_args.tp_size", "server_args.dp_size", "server_args.pp_size"),
    "server_args.nnodes",
)
#: Attributes of a runner with which its own loader loads another model.
_RUNNER: Final = ("weight_updater.get_model", "weight_updater.__dataclass_fields__")
#: Which of its methods a layer calls, as it finds out when it is first called.
_IGNORED: Final = frozenset(("_forward_method", "_original_forward_method"))
#: Of Gemma's norms: one plus their weight.
_COMPUTED: Final = frozenset(("gemma_weight",))
#: Packages of objects that hold no weights.
_APART: Final = (
    *("sglang.srt.configs.", "sglang.srt.distributed.", "transformers.", "torch.distributed.", "logging"),
    "sglang.srt.layers.layer_boundary.",  # what a layer does before and after its norms, decided when it first serves
)


def movable(scheduler: Any) -> Movable | str:
    """What is known of the model, or why its weights must stay where they are."""
    if compat.device_of(scheduler).type != "cpu":
        return "a standby is not supported on an accelerator"
    if lacking := compat.SGLANG.check_object(scheduler, _SCHEDULER):
        return lacking
    args = scheduler.server_args
    if args.enable_torch_compile:
        return "--enable-torch-compile: compiled code may know where the weights lie"
    ranks = int(args.tp_size * args.dp_size * args.pp_size) // int(args.nnodes)
    rules = Rules(_IGNORED, _is_apart, computed=_COMPUTED)
    return Movable(max(ranks, 1), rules, lambda: sleeping_needs_room(compat.asleep(scheduler)))


def hooks(scheduler: Any, runner: Any) -> StandbyHooks | str:
    """How a second model is made, and loaded by SGLang's own loader; or why there is none."""
    found = movable(scheduler)
    if isinstance(found, str):
        return found
    lacking = compat.lacking_for_deep(scheduler) or compat.SGLANG.check_object(runner, _RUNNER)
    if reason := lacking or found.lacks():
        return reason
    if getattr(runner, "lora_manager", None) is not None:
        return "--enable-lora: the layers of a second model have none for adapters around them"
    live: torch.nn.Module = runner.model
    device = compat.device_of(scheduler)

    def make(weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
        return compat_loading.fresh(runner, weights, device)

    def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        compat_loading.load(compat_loading.updater_of(runner, model), weights)

    discard = functools.partial(fresh_model.take_apart, live=live)
    settings = (*TORCH, *compat_loading.shared().settings())
    nbytes = sum(tensor.nbytes for tensor in (*live.parameters(), *live.buffers()))
    return StandbyHooks(live, nbytes, make, load, lambda: None, discard, found.ranks, found.rules, settings)


def _is_apart(found: object) -> bool:
    return type(found).__module__.startswith(_APART)
