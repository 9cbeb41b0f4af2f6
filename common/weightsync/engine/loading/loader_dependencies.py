"""What a loader may depend on beside the tensors it is given: told apart from what it was by one cheap look.

They are simple values that modules hold, maps of experts and ranks among them, and the environment.
"""

from __future__ import annotations

import collections
import copy
import enum
import operator
import os
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy
import torch

#: What torch itself keeps in every module; parameters and submodules are watched by `model_memory.Memory`.
_TORCHS: Final = frozenset(torch.nn.Module().__dict__)
#: Larger lists, dictionaries and tensors are not looked at: maps of experts and ranks are small.
_LARGEST_BYTES: Final = 64 << 10
_LARGEST: Final = 4096
#: How often something may change while the loader goes on as before, until it is no longer looked at.
_HARMLESS: Final = 3

_SIMPLE: Final = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    types.NoneType,
    torch.dtype,
    torch.device,
    torch.Size,
)
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Dependencies:
    """Simple values that a model's modules hold, and what they refer to one step further; and the environment.

    These are numbers, names, and small lists, dictionaries and tensors of integers: what says which expert is where.
    ``loaded`` tells of a buffer whether pushes write to it. A look costs less than a microsecond for each attribute
    of modules, in C, and some for each list, dictionary or tensor.
    """

    def __init__(self, model: torch.nn.Module, loaded: Callable[[torch.Tensor], bool]):
        self._model, self._loaded = model, loaded
        self._seen: collections.Counter[str] = collections.Counter()
        self.take()

    def take(self) -> None:
        """What there is now is what it is compared with from here on."""
        #: By dictionary: where it is, what it holds by which keys, and how many entries it has.
        self._values: list[tuple[str, dict[str, Any], tuple[str, ...], Any, tuple[Any, ...], int]] = []
        #: What takes a step of Python: where it is, its dictionary and key, how it is compared and with what.
        self._others: list[tuple[str, dict[str, Any], str, Callable[[Any, Any], bool], Any]] = []
        self._objects: set[int] = set()
        for name, module in self._model.named_modules():
            self._take(name, vars(module), deeper=True)
            self._take(name, module._buffers, deeper=False)
        self._environment = dict(os.environ)

    def _take(self, where: str, held: dict[str, Any], *, deeper: bool) -> None:
        keys: list[str] = []
        for key, value in held.items():
            name = f"{where}.{key}" if where else str(key)
            if key in _TORCHS or not isinstance(key, str) or self._seen[name] >= _HARMLESS:
                continue
            if type(value) in _SIMPLE or isinstance(value, enum.Enum):
                keys.append(key)
            elif isinstance(value, torch.Tensor) and self._loaded(value):
                continue
            elif _is_flat(value):
                self._others.append((name, held, key, _is_equal, copy.copy(value)))
            elif (made := _made_of(value)) is not None:
                self._others.append((name, held, key, _is_made_so, made))
            elif deeper and _is_object(value):
                self._others.append((name, held, key, operator.is_, value))
                if id(value) not in self._objects:
                    self._objects.add(id(value))
                    self._take(name, vars(value), deeper=False)
        if keys or self._seen[where] < _HARMLESS:
            get = operator.itemgetter(*keys) if len(keys) > 1 else lambda held: tuple(held[key] for key in keys)
            self._values.append((where, held, tuple(keys), get, get(held), len(held)))

    def changed(self) -> list[str]:
        """Where something is not what it was."""
        found = [name for name, held, key, kind, made in self._others if not kind(held.get(key), made)]
        for where, held, keys, get, values, count in self._values:
            try:
                if get(held) == values and (len(held) == count or self._seen[where] >= _HARMLESS):
                    continue
            except Exception:
                pass  # something is gone, or is now something that cannot be compared
            found += self._which(where, held, keys, values) or [where]
        if dict(os.environ) != self._environment:
            names = os.environ.keys() | self._environment.keys()
            changed = (name for name in names if os.environ.get(name) != self._environment.get(name))
            found += (f"environment variable {name}" for name in changed)
        return [name for name in found if self._seen[name] < _HARMLESS]

    @staticmethod
    def _which(where: str, held: dict[str, Any], keys: tuple[str, ...], values: tuple[Any, ...]) -> list[str]:
        pairs = zip(keys, values, strict=True)
        changed = (key for key, value in pairs if type(held.get(key)) is not type(value) or held[key] != value)
        return [f"{where}.{key}" if where else key for key in changed]

    def was_harmless(self, names: list[str]) -> None:
        """These have changed, and the loader does what it did. What changes all the time is looked at no more."""
        self._seen.update(names)
        self.take()


def _is_flat(value: Any) -> bool:
    """Whether it holds plain values and nothing else: most lists and dictionaries do, and are compared in C."""
    if type(value) not in (tuple, list, dict, set, frozenset) or len(value) > _LARGEST:
        return False
    inside = (*value, *value.values()) if isinstance(value, dict) else value
    return all(type(one) in _SIMPLE for one in inside)


def _is_equal(value: Any, kept: Any) -> bool:
    try:
        same: bool = type(value) is type(kept) and value == kept
        return same
    except Exception:
        return False  # it holds something by now that cannot be compared


def _is_made_so(value: Any, made: tuple[Any, ...]) -> bool:
    return _made_of(value) == made


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (*_OPAQUE, torch.Tensor, torch.nn.Module))


def _made_of(value: Any) -> tuple[Any, ...] | None:
    """Something that is equal as long as a list, dictionary or tensor is; None for all others, and what is large."""
    if isinstance(value, torch.Tensor):
        return _made_of_tensor(value)
    if isinstance(value, numpy.ndarray):
        few = value.dtype.kind in "biu" and value.nbytes <= _LARGEST_BYTES
        return ("array", value.shape, value.tobytes()) if few else None
    if not isinstance(value, (tuple, list, dict, set, frozenset)) or len(value) > _LARGEST:
        return None
    try:
        return (type(value).__name__, *_parts(value))
    except _NotPlain:
        return None


def _made_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.nbytes > _LARGEST_BYTES:
        return None
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
        return None
    if tensor.device.type == "cpu":
        return ("tensor", tuple(tensor.shape), tensor.numpy().tobytes())
    # Reading it would wait for the device, and fail where the engine's memory sleeps.
    version = 0 if tensor.is_inference() else tensor._version
    return ("tensor", tuple(tensor.shape), tensor.data_ptr(), version)


class _NotPlain(Exception):
    """Something else than plain values is in there."""


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (set, frozenset)):
        if not all(type(one) in _SIMPLE for one in value):
            raise _NotPlain
        yield frozenset(value)
        return
    for one in value.items() if isinstance(value, dict) else value:
        if type(one) in _SIMPLE or isinstance(one, enum.Enum):
            yield one
        elif (made := _made_of(one)) is not None:
            yield made
        else:
            raise _NotPlain
