"""Models with LoRA adapters of PEFT: merged on the way out, one tensor at a time; the model is left alone."""

from __future__ import annotations

import copy
import sys
from typing import Any, Final

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.sources.stand_in import StandIn

_MERGE: Final = "merge adapters first: push model.merge_and_unload()"
#: PEFT's kinds of layers that are merged here, in `peft.tuners.lora.layer`.
_KINDS: Final = ("Linear", "Embedding")
_BASE: Final = "base_layer."


class Merged(StandIn):
    """The weight of a layer with its active adapters, computed when it is asked for."""

    def __init__(self, layer: Any, adapters: list[str]):
        super().__init__(layer.base_layer.weight.detach(), tuple(layer.base_layer.weight.shape), layer)
        self._layer, self._adapters = layer, adapters

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """What PEFT's own ``merge()`` makes of the weight: in a copy of the layer, which shares all but this weight."""
        layer, base = copy.copy(self._layer), copy.copy(self._layer.base_layer)
        base._parameters = {**base._parameters, "weight": nn.Parameter(self.held.clone(), requires_grad=False)}
        layer._modules = {**layer._modules, "base_layer": base}
        layer.merged_adapters, layer._caches = list(layer.merged_adapters), {}
        layer.merge(adapter_names=self._adapters)
        merged: torch.Tensor = base.weight.detach()
        return merged


class MergedState(dict[str, Any]):
    """A module's state, in which each `Merged` is computed when it is taken by name."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return found.value() if isinstance(found, Merged) else found


def has_adapters(module: nn.Module) -> bool:
    """Whether PEFT has put adapters into this module, and wraps it."""
    kind: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    return kind is not None and isinstance(module, kind)


def merged_state(model: Any) -> dict[str, Any]:
    """The state of the model inside a PEFT model, with its active adapters merged.

    Raises `SourceError`, naming the layer, for anything but LoRA (also DoRA) of linear layers and embeddings.
    """
    from peft.tuners.lora.layer import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if model.active_peft_config.is_prompt_learning:
        raise SourceError(f"the model ({type(model).__name__}) has trained prompts, which no weights of a model hold")
    inside = model.get_base_model()
    state: dict[str, Any] = inside.state_dict()
    for name, part in inside.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(part, AuxiliaryTrainingWrapper):
            _unwrap(state, prefix, part)
        elif isinstance(part, LoraLayer) and type(part).__name__ in _KINDS:
            _merge(state, prefix, part)
        elif isinstance(part, BaseTunerLayer):
            raise SourceError(f"{name} ({type(part).__name__}) is part of a PEFT adapter; {_MERGE}")
    return state


def _merge(state: dict[str, Any], prefix: str, layer: Any) -> None:
    """Replace what the state has of a layer with LoRA by what the layer without it would have."""
    active = [] if layer.disable_adapters else [one for one in layer.active_adapters if one in layer.scaling]
    adapters = [one for one in active if one not in layer.merged_adapters]
    if any(layer.lora_bias.get(one) for one in adapters):
        raise SourceError(f"{prefix[:-1]} has LoRA with a bias; {_MERGE}")
    for name in [name for name in state if name.startswith(prefix)]:
        held, kept = state.pop(name), name.removeprefix(prefix)
        if kept == f"{_BASE}weight" and adapters:
            if type(held.detach()) is not torch.Tensor:
                raise SourceError(f"{prefix}weight is sharded, and has adapters; {_MERGE}")
            state[f"{prefix}weight"] = Merged(layer, adapters)
        elif kept.startswith(_BASE):
            state[prefix + kept.removeprefix(_BASE)] = held


def _unwrap(state: dict[str, Any], prefix: str, wrapper: Any) -> None:
    """Replace what the state has of a module that PEFT trains in full by what the module alone would have."""
    if type(wrapper).__name__ != "ModulesToSaveWrapper":
        raise SourceError(f"{prefix[:-1]} ({type(wrapper).__name__}) is part of a PEFT adapter; {_MERGE}")
    active = not wrapper.disable_adapters and wrapper.active_adapters
    served = f"{prefix}modules_to_save.{active[0]}." if active else f"{prefix}original_module."
    for name in [name for name in state if name.startswith(prefix)]:
        held = state.pop(name)
        if name.startswith(served):
            state[prefix + name.removeprefix(served)] = held
