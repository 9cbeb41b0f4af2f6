"""What a loader may depend on beside the tensors it is given, and a cheap check whether that has changed.

That is the environment, and the simple values that modules hold, such as maps of experts and ranks.
"""

from __future__ import annotations

import collections
import copy
import enum
import operator
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy
import torch

#: The attributes of torch in every module; `model_memory.Memory` watches parameters and submodules.
_TORCHS: Final = frozenset(torch.nn.Module().__dict__)
#: Larger lists, dictionaries and tensors are not watched: maps of experts and ranks are small.
_LARGEST_BYTES: Final = 64 << 10
_LARGEST: Final = 4096
#: After so many changes without an effect on the loader, a value is no longer watched.
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
    """Simple values of a model's modules and of the objects that these refer to, and the environment.

    Simple values are numbers, strings, and small lists, dictionaries and integer tensors, such as say which expert is
    where. ``loaded`` tells whether pushes write to a buffer. A check takes less than a microsecond for each attribute,
    in C, and some microseconds for each list, dictionary or tensor.
    """

    def __init__(self, model: torch.nn.Module, loaded: Callable[[torch.Tensor], bool]):
        self._model, self._loaded = model, loaded
        self._seen: collections.Counter[str] = collections.Counter()
        self.take()

    def take(self) -> None:
        """Take the present values as those to compare with."""
        #: For each dictionary: where it is, the watched keys, their values, its length.
        self._values: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[Any, ...], int]] = []
        #: Values that take a step of Python: where, the dictionary and key, how to compare, and with what.
        self._others: list[tuple[str, dict[str, Any], str, Callable[[Any, Any], bool], Any]] = []
        self._objects: set[int] = set()
        for name, module in self._model.named_modules():
            self._take(name, vars(module), deeper=True)
            self._take(name, module._buffers, deeper=False)
        # The same in columns, which are compared in C: mostly nothing has changed.
        links = [(held, key) for _, held, keys, *_ in self._values for key in keys]
        self._holders, self._keys = [held for held, _ in links], [key for _, key in links]
        self._kept = [value for *_, values, _ in self._values for value in values]
        sized = [(held, count) for where, held, *_, count in self._values if self._seen[where] < _HARMLESS]
        self._sized, self._counts = [held for held, _ in sized], [count for _, count in sized]
        self._environment = dict(_environment())

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
            elif (snapshot := _snapshot(value)) is not None:
                self._others.append((name, held, key, _is_unchanged, snapshot))
            elif deeper and _is_object(value):
                self._others.append((name, held, key, operator.is_, value))
                if id(value) not in self._objects:
                    self._objects.add(id(value))
                    self._take(name, vars(value), deeper=False)
        if keys or self._seen[where] < _HARMLESS:
            self._values.append((where, held, tuple(keys), tuple(held[key] for key in keys), len(held)))

    def changed(self) -> list[str]:
        """Where a value is not what it was."""
        found = [name for name, held, key, kind, snapshot in self._others if not kind(held.get(key), snapshot)]
        for where, held, keys, values, count in () if self._values_are_same() else self._values:
            try:
                same = tuple(held[key] for key in keys) == values
                if same and (len(held) == count or self._seen[where] >= _HARMLESS):
                    continue
            except Exception:
                pass  # a key is gone, or its value cannot be compared any more
            found += self._which(where, held, keys, values) or [where]
        if (now := _environment()) != (before := self._environment):
            changed = (name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
            found += (f"environment variable {os.fsdecode(name)}" for name in changed)
        return [name for name in found if self._seen[name] < _HARMLESS]

    def _values_are_same(self) -> bool:
        try:
            values = list(map(operator.getitem, self._holders, self._keys))
            return values == self._kept and list(map(len, self._sized)) == self._counts
        except Exception:
            return False  # a key is gone, or its value cannot be compared any more

    @staticmethod
    def _which(where: str, held: dict[str, Any], keys: tuple[str, ...], values: tuple[Any, ...]) -> list[str]:
        pairs = zip(keys, values, strict=True)
        changed = (key for key, value in pairs if key not in held or not _is_same(held[key], value))
        return [f"{where}.{key}" if where else key for key in changed]

    def was_harmless(self, names: list[str]) -> None:
        """Note that the loader does what it did although these changed; stop watching those that keep changing."""
        self._seen.update(names)
        self.take()


def _environment() -> Mapping[Any, Any]:
    """What `os.environ` holds; `os.environ` itself would decode all of it."""
    found: Mapping[Any, Any] = getattr(os.environ, "_data", None) or os.environ
    return found


def _is_flat(value: Any) -> bool:
    """Whether it holds plain values only: most lists and dictionaries do, and are compared in C."""
    if type(value) not in (tuple, list, dict, set, frozenset) or len(value) > _LARGEST:
        return False
    inside = (*value, *value.values()) if isinstance(value, dict) else value
    return all(type(element) in _SIMPLE for element in inside)


def _is_equal(value: Any, kept: Any) -> bool:
    try:
        same: bool = type(value) is type(kept) and value == kept
        return same
    except Exception:
        return False  # it now holds something that cannot be compared


def _is_same(value: Any, kept: Any) -> bool:
    return value is kept or _is_equal(value, kept)


def _is_unchanged(value: Any, snapshot: tuple[Any, ...]) -> bool:
    return _snapshot(value) == snapshot


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (*_OPAQUE, torch.Tensor, torch.nn.Module))


def _snapshot(value: Any) -> tuple[Any, ...] | None:
    """A tuple that is equal as long as the list, dictionary or tensor is; None for anything else or larger."""
    if isinstance(value, torch.Tensor):
        return _snapshot_of_tensor(value)
    if isinstance(value, numpy.ndarray):
        few = value.dtype.kind in "biu" and value.nbytes <= _LARGEST_BYTES
        return ("array", value.shape, value.tobytes()) if few else None
    if not isinstance(value, (tuple, list, dict, set, frozenset)) or len(value) > _LARGEST:
        return None
    try:
        return (type(value).__name__, *_parts(value))
    except _NotPlain:
        return None


def _snapshot_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...] | None:
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
    """A container holds something other than plain values."""


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (set, frozenset)):
        if not all(type(element) in _SIMPLE for element in value):
            raise _NotPlain
        yield frozenset(value)
        return
    for element in value.items() if isinstance(value, dict) else value:
        if type(element) in _SIMPLE or isinstance(element, enum.Enum):
            yield element
        elif (snapshot := _snapshot(element)) is not None:
            yield snapshot
        else:
            raise _NotPlain
