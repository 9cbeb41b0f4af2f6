"""Trainers that flatten parameters and cut the result into equal parts: FSDP1 and DeepSpeed's ZeRO-3.

Nothing is gathered: what this process holds of a parameter is a range of its elements, and every range consists of a
few boxes. The names of torch and DeepSpeed that are used here are private; they exist in torch 2.5 to 2.13, and in
DeepSpeed 0.19.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.sources.stand_in import StandIn
from weightsync.tensors.boxes import FlatBox, boxes_of_range

#: What wrappers add to the names of parameters.
_ADDED: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_FSDP: Final = "FullyShardedDataParallel"
_DEEPSPEED: Final = "DeepSpeedEngine"


class FlatPart(StandIn):
    """This process's part of a parameter of ``shape``: ``held`` (1-D) has its elements from ``first`` on."""

    def __init__(self, held: torch.Tensor, shape: tuple[int, ...], first: int, key: object):
        super().__init__(held, shape, key)
        self._first = first

    @cached_property
    def boxes(self) -> tuple[FlatBox, ...]:
        """The boxes of the parameter that this part consists of."""
        found = boxes_of_range(self.shape, self._first, self._first + self.held.numel())
        return tuple(FlatBox(box, self.stride(), self._first) for box in found)


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers have added to it."""
    for added in _ADDED:
        name = name.replace(added, "")
    return name


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP1 has wrapped this very module."""
    return type(module).__name__ == _FSDP


def is_deepspeed(module: nn.Module) -> bool:
    """Whether this is DeepSpeed's wrapper of a module."""
    return any(kind.__name__ == _DEEPSPEED for kind in type(module).__mro__)


def is_flattened(module: nn.Module) -> bool:
    """Whether FSDP1 or ZeRO-3 has sharded a part of this module."""
    return any(map(is_fsdp, module.modules())) or any(hasattr(found, "ds_tensor") for found in module.parameters())


def flat_state(module: nn.Module) -> dict[str, Any] | None:
    """The state of a module that FSDP1 or ZeRO-3 has sharded: `FlatPart` and plain tensors; None for any other.

    Raises `SourceError`, naming the parameter, for one whose part is not in memory.
    """
    if not is_flattened(module):
        return None
    wrapped = [(name, part) for name, part in module.named_modules() if is_fsdp(part)]
    found = {name: part for prefix, fsdp in wrapped for name, part in _of_fsdp(prefix, fsdp).items()}
    return _with_others(module, found)


def _with_others(module: nn.Module, found: dict[str, Any]) -> dict[str, Any]:
    """Add the parameters that FSDP1 has not flattened, which are those ``found``, and the buffers that are saved."""
    flat = {id(found.key[0]) for found in found.values()}
    for raw, parameter in module.named_parameters(remove_duplicate=False):
        if (name := plain_name(raw)) not in found and id(parameter) not in flat:
            found[name] = _of_zero(name, parameter)
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                found[_joined(prefix, key)] = buffer
    return found


def _of_fsdp(prefix: str, fsdp: Any) -> dict[str, FlatPart]:
    """The parameters that one FSDP1 wrapper has flattened, by name."""
    if (handle := fsdp._handle) is None:
        return {}
    flat, found = handle.flat_param, dict[str, FlatPart]()
    padded = zip(itertools.accumulate(flat._numels_with_padding, initial=0), flat._is_padding_mask, strict=False)
    shard = getattr(flat, "_local_shard", flat).data  # until the first forward pass the parameter itself is the shard
    starts = [start for start, padding in padded if not padding]
    for number, (name, shape) in enumerate(zip(flat._fqns, flat._shapes, strict=True)):
        if not flat._contiguities[number]:
            raise SourceError(f"{name}: it was not contiguous when FSDP1 flattened it; make it so before that")
        if not handle.uses_sharded_strategy:
            local, first = flat.data[starts[number] :][: math.prod(shape)], 0
        elif (info := flat._shard_param_infos[number]).in_shard:
            local, first = shard[info.offset_in_shard :][: info.numel_in_shard], info.intra_param_start_idx
        else:
            local, first = shard[:0], 0
        if _is_replaced(handle, number):
            raise SourceError(f"{name}: its .data was replaced, which FSDP1 notices only later; copy into it instead")
        if flat._param_extensions[number] is not None:
            raise SourceError(f"{name}: FSDP1 with tensor parallelism hides what this process holds; use fully_shard")
        found[plain_name(name)] = FlatPart(local.detach(), tuple(shape), first, (flat, name))
    for shared in flat._shared_param_infos:
        first_name = _joined(shared.prim_module_name, shared.prim_param_name)
        found[_joined(shared.module_name, shared.param_name)] = found[first_name]
    return {_joined(prefix, name): part for name, part in found.items()}


def _is_replaced(handle: Any, number: int) -> bool:
    """Whether a user has given a parameter other memory: FSDP1 takes that over only when it next uses it."""
    info, flat = handle.flat_param._param_infos[number], handle.flat_param
    if not handle._use_orig_params or (handle.uses_sharded_strategy and not handle.is_sharded(flat)):
        return False
    parameter = getattr(info.module, info.param_name)
    own = {one.untyped_storage()._cdata for one in (flat.data, getattr(flat, "_local_shard", flat))}
    return bool(parameter.numel()) and parameter.untyped_storage()._cdata not in own


def _joined(prefix: str, name: str) -> str:
    return plain_name(f"{prefix}.{name}" if prefix else name)


def _of_zero(name: str, parameter: Any) -> Any:
    """What this process holds of a parameter of a module under ZeRO-3."""
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    if hasattr(part, "ds_quant_scale"):
        raise SourceError(f"{name}: ZeRO-3 holds it quantised; switch zero_quantized_nontrainable_weights off")
    if part.status.name != "AVAILABLE":
        raise SourceError(f"{name}: ZeRO-3 has moved this process's part to a disk; bring it back before the push")
    first = torch.distributed.get_rank(parameter.ds_process_group) * part.numel()
    held = min(max(parameter.ds_numel - first, 0), part.numel())
    return FlatPart(part.data[:held], tuple(parameter.ds_shape), first, (parameter,))
