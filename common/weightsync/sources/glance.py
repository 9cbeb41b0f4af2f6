"""The state of a module without ``state_dict()``, which takes milliseconds, and marks by which it is known again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

State = dict[str, torch.Tensor]
Marks = list[tuple[object, ...]]

#: Other kinds of tensors may be more than their memory.
_PLAIN = {torch.Tensor, nn.Parameter}
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_known: dict[type[nn.Module], bool] = {}


def state_of(module: nn.Module) -> State | None:
    """What ``module.state_dict()`` holds, in its order; None where a part of the module has its own idea of that."""
    found: State = {}
    return found if _add(module, "", found) else None


def marks_of(state: Mapping[str, torch.Tensor]) -> Marks | None:
    """Equal for two states of the same names with the same memory, seen in the same way; None where that has no end."""
    try:
        return [(name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in state.items()]
    except RuntimeError:  # no strides, or no memory
        return None


def _add(part: nn.Module, prefix: str, found: State) -> bool:
    if not _usual(type(part)) or part._state_dict_hooks or part._state_dict_pre_hooks or "state_dict" in part.__dict__:
        return False
    for name, parameter in part._parameters.items():
        if parameter is not None:
            if type(parameter) not in _PLAIN:
                return False
            found[prefix + name] = parameter
    for name, buffer in part._buffers.items():
        if buffer is not None and name not in part._non_persistent_buffers_set:
            if type(buffer) not in _PLAIN:
                return False
            found[prefix + name] = buffer
    return all(child is None or _add(child, f"{prefix}{name}.", found) for name, child in part._modules.items())


def _usual(kind: type[nn.Module]) -> bool:
    if kind not in _known:
        _known[kind] = all(getattr(kind, name) is getattr(nn.Module, name) for name in _METHODS)
    return _known[kind]
