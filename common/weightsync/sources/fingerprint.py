"""The state of a module without ``state_dict()``, which takes milliseconds, and a glance at whether it is as it was."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

State = dict[str, torch.Tensor]

#: Other kinds of tensors may be more than their memory.
_PLAIN = {torch.Tensor, nn.Parameter}
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_known: dict[type[nn.Module], bool] = {}


def state_of(module: nn.Module) -> State | None:
    """What ``module.state_dict()`` holds, in its order; None where a part of the module has its own idea of that."""
    found: State = {}
    return found if _add(module, "", found) else None


class Fingerprint:
    """All that a module holds, as it is when this is made. Parameters that it exchanges for others are not kept alive.

    Raises `RuntimeError` for a tensor without strides or memory.
    """

    def __init__(self, module: nn.Module):
        parts = list(module.modules())
        held: list[Any] = [each for part in parts for each in (part._modules, part._parameters, part._buffers)]
        #: Where something may be added or taken away; hooks, and attributes that hide methods, say what the state is.
        sized = [*held, *(each for part in parts for each in _hooks(part))]
        #: Most of them are empty, of which less need be known: they are rarely in the cache.
        self._empty, self._sized = [each for each in sized if not each], [each for each in sized if each]
        self._sizes = list(map(len, self._sized))
        links = [(each, key) for each in held for key in each]
        there = [(each, key) for each, key in links if each[key] is not None]
        self._there, values = _columns(there), [each[key] for each, key in there]
        self._values = list(map(weakref.ref, values))
        self._absent = _columns([(each, key) for each, key in links if each[key] is None])
        self._are_tensors = [isinstance(value, torch.Tensor) for value in values]
        self._seen = list(self._look(values))

    def _look(self, values: list[Any]) -> Iterator[tuple[object, ...]]:
        return identities(list(itertools.compress(values, self._are_tensors)))

    def holds(self) -> bool:
        """Whether all is where and what it was. Runs no Python for each tensor."""
        values = list(map(dict.get, *self._there))
        return (
            all(map(operator.is_not, values, itertools.repeat(None)))
            and all(map(operator.is_, values, map(_called, self._values)))
            and all(map(operator.is_, map(dict.get, *self._absent), itertools.repeat(None)))
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            # One by one: so many at once would bring the garbage collector.
            and all(map(operator.eq, self._look(values), self._seen))
        )


def _hooks(part: nn.Module) -> tuple[Any, ...]:
    return part._state_dict_hooks, part._state_dict_pre_hooks, part.__dict__


def _columns(links: list[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    return [holder for holder, _ in links], [key for _, key in links]


_called: Final[Any] = weakref.ref.__call__
#: What is seen of a tensor: not its values, and its device by the address.
_LOOKS: Final[tuple[Any, ...]] = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    torch.Tensor.is_neg,
)


def identities(tensors: list[torch.Tensor]) -> Iterator[tuple[object, ...]]:
    """What is seen of each. Raises `RuntimeError` for one without strides or memory."""
    # All of one tensor before the next, for they are rarely in the cache.
    return zip(*(map(look, tensors) for look in _LOOKS), strict=True)


def are_plain(values: list[Any]) -> bool:
    """Whether these are tensors that are no more than their memory."""
    return set(map(type, values)) <= _PLAIN


def fingerprint_of(module: nn.Module) -> Fingerprint | None:
    """What the module is now; None where a part of it has its own idea of that, or a tensor no memory."""
    if state_of(module) is None:
        return None
    try:
        return Fingerprint(module)
    except RuntimeError:
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
