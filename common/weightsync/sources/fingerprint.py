"""Reads a module's state faster than ``state_dict()``, which takes milliseconds, and checks that it is unchanged."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

State = dict[str, torch.Tensor]

#: Tensors of other types may have more state than their memory.
_PLAIN = {torch.Tensor, nn.Parameter}
#: Methods that change what ``state_dict()`` holds if a class overrides them.
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")
_default_state: dict[type[nn.Module], bool] = {}


def state_of(module: nn.Module) -> State | None:
    """What ``module.state_dict()`` holds, in its order; None if a submodule customises its state."""
    found: State = {}
    return found if _collect(module, "", found) else None


class Fingerprint:
    """Everything that a module holds at this moment. Does not keep parameters alive that the module replaces.

    Raises `RuntimeError` for a tensor without strides or memory.
    """

    def __init__(self, module: nn.Module):
        parts = list(module.modules())
        #: Dictionaries that may grow or shrink, including hooks and attributes, which can change what the state is.
        sized: list[Any] = [holder for part in parts for holder in _dictionaries(part)]
        #: Most are empty, and for these a check for emptiness is faster: they are rarely in the cache.
        self._empty, self._sized = [holder for holder in sized if not holder], [holder for holder in sized if holder]
        self._sizes = list(map(len, self._sized))
        #: Dictionaries of submodules, which may be large: their keys and values in one row.
        self._branches = [part._modules for part in parts if part._modules]
        self._names, self._children = list(_chained(self._branches)), list(_values(self._branches))
        held: list[dict[str, Any]] = [holder for part in parts for holder in (part._parameters, part._buffers)]
        links = [(holder, key) for holder in held for key in holder]
        present = [(holder, key) for holder, key in links if holder[key] is not None]
        self._present, tensors = _columns(present), [holder[key] for holder, key in present]
        self._tensors = list(map(weakref.ref, tensors))
        self._absent = _columns([(holder, key) for holder, key in links if holder[key] is None])
        self._identities = Identities(tensors)

    def holds(self) -> bool:
        """Whether the module is unchanged: same parts, hooks and parameters, in the same memory.

        Has no per-tensor Python cost.
        """
        try:
            tensors = list(map(operator.getitem, *self._present))  # takes half the time of dict.get
        except KeyError:
            return False
        return (
            all(map(operator.is_not, tensors, itertools.repeat(None)))
            and all(map(operator.is_, tensors, map(_dereference, self._tensors)))
            and all(map(operator.is_, map(dict.get, *self._absent), itertools.repeat(None)))
            and not any(self._empty)
            and list(map(len, self._sized)) == self._sizes
            and list(_chained(self._branches)) == self._names
            and all(map(operator.is_, _values(self._branches), self._children))
            and self._identities.hold(tensors)
        )


_chained: Final[Any] = itertools.chain.from_iterable


def _values(branches: list[dict[str, nn.Module | None]]) -> Iterator[nn.Module | None]:
    found: Iterator[nn.Module | None] = _chained(map(dict.values, branches))
    return found


def _dictionaries(part: nn.Module) -> tuple[Any, ...]:
    hooks = part._state_dict_hooks, part._state_dict_pre_hooks
    return part._modules, part._parameters, part._buffers, *hooks, part.__dict__


def _columns(links: list[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    return [holder for holder, _ in links], [key for _, key in links]


_dereference: Final[Any] = weakref.ref.__call__
#: What identifies a tensor's memory and view: the address, which implies the device, shape, strides, dtype, sign flag.
_PROPERTIES: Final[tuple[Any, ...]] = (
    torch.Tensor.data_ptr,
    torch.Tensor.size,
    torch.Tensor.stride,
    operator.attrgetter("dtype"),
    torch.Tensor.is_neg,
)


class Identities:
    """The address, shape, strides, dtype and sign flag of each of these tensors, which are not kept alive.

    Raises `RuntimeError` for a tensor without strides or memory.
    """

    def __init__(self, tensors: list[torch.Tensor]):
        self._all = list(_identities(tensors))
        self._addresses = [address for address, *_ in self._all]
        self._guards = _guards(tensors)

    def hold(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the same for as many tensors, without any Python for each. Raises as the class does."""
        if self._guards is not None and self._guards.check(*tensors):
            return list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
        # Compared one at a time: a list of so many new tuples would trigger the garbage collector.
        return all(map(operator.eq, _identities(tensors), self._all))


def _identities(tensors: list[torch.Tensor]) -> Iterator[tuple[object, ...]]:
    # All properties of one tensor before the next, because tensors are rarely in the cache.
    return zip(*(map(read, tensors) for read in _PROPERTIES), strict=True)


def _guards(tensors: list[torch.Tensor]) -> Any:
    """What compares all but the addresses in a quarter of the time, by a part of torch's compiler; None if it has none.

    It may also find a difference where there is none, such as in inference mode.
    """
    try:
        from torch._C._dynamo import guards

        made: Any = guards.TensorGuards
        sizes, strides = [list(tensor.size()) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        return made(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except Exception:  # it is no public part, and may be another one in a later torch
        return None


def are_plain(values: list[Any]) -> bool:
    """Whether all values are tensors without state beyond their memory."""
    return set(map(type, values)) <= _PLAIN


def fingerprint_of(module: nn.Module) -> Fingerprint | None:
    """The module's fingerprint now; None if a submodule customises its state, or a buffer has no strides or memory."""
    if state_of(module) is None:
        return None
    try:
        return Fingerprint(module)
    except (RuntimeError, TypeError):
        return None


def _collect(part: nn.Module, prefix: str, found: State) -> bool:
    """Add the state of ``part`` to ``found``; False if a submodule customises its state."""
    if (
        not _has_default_state(type(part))
        or part._state_dict_hooks
        or part._state_dict_pre_hooks
        or "state_dict" in part.__dict__
    ):
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
    return all(child is None or _collect(child, f"{prefix}{name}.", found) for name, child in part._modules.items())


def _has_default_state(kind: type[nn.Module]) -> bool:
    if kind not in _default_state:
        _default_state[kind] = all(getattr(kind, name) is getattr(nn.Module, name) for name in _METHODS)
    return _default_state[kind]
