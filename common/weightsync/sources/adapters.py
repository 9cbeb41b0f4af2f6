"""Models with LoRA adapters of PEFT: merged on the way out, one tensor at a time; the model is left alone."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any, Final

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.sources.flat import is_flattened
from weightsync.sources.stand_in import StandIn

_MERGE: Final = "merge adapters first: push model.merge_and_unload()"
#: PEFT's kinds of layers that are merged here, and the variants of LoRA, in `peft.tuners.lora`.
_KINDS: Final = ("Linear", "Embedding")
_VARIANTS: Final = ("DoraLinearVariant", "DoraEmbeddingVariant")
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
        layer.merged_adapters, layer._caches = list(layer.merged_adapters), dict(layer._caches)
        layer.merge(adapter_names=self._adapters)
        merged: torch.Tensor = base.weight.detach().contiguous()
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

    Raises `SourceError`, naming the layer, for anything but LoRA and DoRA of linear layers and embeddings.
    """
    inside, what = model.get_base_model(), type(model).__name__
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError as error:
        raise SourceError(f"{what}: this version of PEFT is too old ({error}); {_MERGE}") from error
    if (kind := getattr(model.active_peft_config.peft_type, "value", "")) != "LORA":
        raise SourceError(f"{what} has adapters of the kind {kind}; {_MERGE}")
    if is_flattened(inside):
        raise SourceError(f"{what} is sharded, and has adapters; {_MERGE}")
    named = inside.named_modules(remove_duplicate=False)
    parts = {name: part for name, part in named if isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper))}
    state: dict[str, Any] = {}
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in inside.state_dict().items():
        words = name.split(".")
        owner = next((own for own in itertools.accumulate(words[:-1], "{}.{}".format) if own in parts), None)
        if owner is None:
            state[name] = tensor
        else:
            held.setdefault(owner, {})[name.removeprefix(f"{owner}.")] = tensor
    for owner, tensors in held.items():
        part = parts[owner]
        if type(part).__name__ == "ModulesToSaveWrapper":
            found = _trained(part, tensors)
        elif type(part).__name__ in _KINDS and hasattr(part, "lora_A"):
            found = _merged(owner, part, tensors)
        else:
            raise SourceError(f"{owner} ({type(part).__name__}) is part of a PEFT adapter; {_MERGE}")
        state |= {f"{owner}.{name}": tensor for name, tensor in found.items()}
    _check_ties(state)
    return state


def _merged(name: str, layer: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a layer without LoRA would have of the ``tensors`` of one with it."""
    if layer.disable_adapters and layer.merged_adapters:
        raise SourceError(f"{name}: its adapters are disabled, but its weight still contains them; unmerge them first")
    active = [] if layer.disable_adapters else [one for one in layer.active_adapters if one in layer.scaling]
    adapters = [one for one in active if one not in layer.merged_adapters]
    for one in adapters:
        variant = type(layer.lora_variant[one]).__name__ if one in layer.lora_variant else ""
        if variant and variant not in _VARIANTS:
            raise SourceError(f"{name} has LoRA of the kind {variant}; {_MERGE}")
        if layer.lora_bias.get(one):
            raise SourceError(f"{name} has LoRA with a bias; {_MERGE}")
    found: dict[str, Any] = {key.removeprefix(_BASE): held for key, held in tensors.items() if key.startswith(_BASE)}
    if adapters:
        if type(found["weight"].detach()) is not torch.Tensor:
            raise SourceError(f"{name}.weight is sharded, and has adapters; {_MERGE}")
        found["weight"] = Merged(layer, adapters)
    return found


def _trained(wrapper: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a module that PEFT trains in full would have of the ``tensors`` of its wrapper."""
    active = not wrapper.disable_adapters and wrapper.active_adapters
    served = f"modules_to_save.{active[0]}." if active else "original_module."
    return {key.removeprefix(served): held for key, held in tensors.items() if key.startswith(served)}


def _check_ties(state: dict[str, Any]) -> None:
    """Raise `SourceError` if another name shares the memory of a weight that is merged: it would be sent unmerged."""
    merged = {found.held.untyped_storage()._cdata: name for name, found in state.items() if isinstance(found, Merged)}
    for name, found in state.items():
        if not isinstance(found, Merged) and (own := merged.get(found.untyped_storage()._cdata)) is not None:
            raise SourceError(f"{own} has adapters, and is tied to {name}; {_MERGE}")
