"""As `compat`: whether the weights of a scheduler's model may lie elsewhere after each push."""

from __future__ import annotations

from typing import Any, Final

from sglang_weightsync import compat
from weightsync.engine.adapter import Movable, no_room
from weightsync.engine.exchange.pairs import Rules

#: Attributes of a scheduler that are used for its standby.
_SCHEDULER: Final = (
    *("server_args.enable_torch_compile", "server_args.tp_size", "server_args.dp_size", "server_args.pp_size"),
    "server_args.nnodes",
)
#: Packages of objects that hold no weights.
_APART: Final = ("sglang.srt.configs.", "sglang.srt.distributed.", "transformers.", "torch.distributed.", "logging")


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
    return Movable(max(ranks, 1), Rules(apart=_is_apart), lambda: no_room(compat.asleep(scheduler)))


def _is_apart(found: object) -> bool:
    return type(found).__module__.startswith(_APART)
