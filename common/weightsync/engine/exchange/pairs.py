"""The weights of two models that an engine built alike, in pairs, and their exchange.

Both models are walked together, through everything that can be reached from them: parameters, buffers and plain
attributes, containers, other objects, closures of functions. Tensors in the same place are a pair, exchanged by their
data, so that whoever else refers to one of them sees it too; each is exchanged once, however many places it stands in.
What cannot be paired is a difference, named by its place; so is anything else that is not the same in both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from typing import Any, Final, NamedTuple, TypeVar

import torch

from weightsync.engine.exchange.swap import Link, Swap

_S = TypeVar("_S", bound=Swap)

#: What is compared. A number that differs may be of the weights, or of what the engine has seen while it served.
PLAIN: Final = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, torch.layout),
    *(type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, range, slice, torch._ops.OpOverload),
    *(torch._ops.OpOverloadPacket, types.GenericAlias, types.CodeType, frozenset),
)
#: What is known of these without their attributes.
_CONTAINERS: Final = (
    *(tuple, list, set, MutableMapping, torch.Tensor, functools.partial, types.MethodType, types.FunctionType),
)


class Unlike(Exception):
    """Two models are not alike; the text names the place and the difference."""


class Rules(NamedTuple):
    """What an engine knows of its models."""

    ignored: frozenset[str] = frozenset()
    """Names of attributes that are no weights, such as the KV cache."""
    apart: Callable[[object], bool] = lambda found: False
    """Whether an object, such as a configuration, holds no weights."""
    inner: Callable[[object], object] = lambda found: found
    """What is compared instead of an object that an engine has put around another one while it serves."""
    computed: frozenset[str] = frozenset()
    """Names of buffers that no checkpoint has and that an engine computes of weights when it loads them."""


class Pairs(Swap):
    """What is exchanged between ``live`` and ``standby``. Raises `Unlike` if they are not alike."""

    def __init__(self, live: torch.nn.Module, standby: torch.nn.Module, rules: Rules):
        super().__init__()
        self._rules = rules
        #: By identity, what each object is paired with. The objects are kept, so that no identity is used again.
        self._met: dict[int, tuple[object, object]] = {}
        self._mirrored: set[int] = set()
        todo: list[tuple[str, Any, Any]] = [("", live, standby)]
        while todo:
            place, one, other = todo.pop()
            todo += [(f"{place}.{key}" if place else str(key), *both) for key, *both in self._below(place, one, other)]
        for name, tensor in (*live.named_parameters(), *live.named_buffers()):
            if id(tensor) not in self._met and not rules.ignored.intersection(name.split(".")):
                raise Unlike(f"{name} was not found on the way through the model")

    def _below(self, place: str, one: Any, other: Any) -> Iterator[tuple[Hashable, Any, Any]]:
        """Pair two objects, and yield what each holds, by name."""
        one = self._rules.inner(one)
        if one is other and not isinstance(one, (torch.Tensor, torch.nn.Module)):
            return
        if isinstance(one, PLAIN) or isinstance(other, PLAIN):
            if type(one) is not type(other) or one != other:
                raise Unlike(f"{place} is {_short(one)} in one and {_short(other)} in the other")
            return
        if self._rules.apart(one) and not isinstance(one, (torch.Tensor, torch.nn.Module)):
            return
        if type(one) is not type(other):
            raise Unlike(f"{place} is a {type(one).__name__} in one and a {type(other).__name__} in the other")
        if id(one) in self._met or id(other) in self._mirrored:
            if self._met.get(id(one), (None, None))[1] is not other:
                raise Unlike(f"{place} is shared with another place in one of them only")
            return
        if one is other and isinstance(one, torch.nn.Module):
            raise Unlike(f"{place} is the same module in both")
        self._met[id(one)] = one, other
        self._mirrored.add(id(other))
        if isinstance(one, torch.Tensor):
            self._pair(place, one, other)
        yield from self._held(place, one, other)

    def _pair(self, place: str, one: torch.Tensor, other: torch.Tensor) -> None:
        if one is other:
            raise Unlike(f"{place} is the same tensor in both")
        for what in ("shape", "dtype", "device", "layout"):
            if getattr(one, what) != getattr(other, what):
                raise Unlike(f"{place}: its {what} is {getattr(one, what)} and {getattr(other, what)}")
        if one.layout is torch.strided and one.stride() != other.stride():
            raise Unlike(f"{place}: its strides are {one.stride()} and {other.stride()}")
        if not one.is_meta and one.numel():
            if one.data_ptr() == other.data_ptr():
                raise Unlike(f"{place} has the same memory in both")
            self.tensors.append((one, other))

    def _held(self, place: str, one: Any, other: Any) -> Iterator[tuple[Hashable, Any, Any]]:
        """What two objects of one type hold, by name."""
        for (name, item), (_, mirror) in zip(parts(one), parts(other), strict=False):  # other code is a difference
            yield name, item, mirror
        if isinstance(one, MutableMapping):
            yield from self._of_mapping(place, one, other)
        elif isinstance(one, (tuple, list)):
            yield "length", len(one), len(other)
            yield from ((number, *both) for number, both in enumerate(zip(one, other, strict=False)))
        if isinstance(one, torch.nn.Module):
            self._compare_tables(place, one, other)
        if isinstance(attributes := getattr(one, "__dict__", None), dict):
            yield from self._of_mapping(place, attributes, other.__dict__)
        elif not isinstance(one, _CONTAINERS):
            for name in slots(place, one):
                yield name, getattr(one, name, None), getattr(other, name, None)

    def _compare_tables(self, place: str, one: torch.nn.Module, other: torch.nn.Module) -> None:
        """Buffers that no checkpoint has are made anew, or noted while a model serves: they must not differ, unless
        they are computed of weights."""
        names = one._non_persistent_buffers_set & other._non_persistent_buffers_set
        for name in names - self._rules.ignored - self._rules.computed:
            left, right = one._buffers.get(name), other._buffers.get(name)
            if left is not None and right is not None and not _equal(left, right):
                raise Unlike(f"{place}.{name}, which is in no checkpoint, is not the same in both")

    def _of_mapping(self, place: str, one: Any, other: Any) -> Iterator[tuple[Hashable, Any, Any]]:
        ignored = self._rules.ignored
        keys = [key for key in one if not (isinstance(key, str) and key in ignored)]
        # What a model notes while it serves, or is loaded, is plain; what it may have made of its weights is not.
        more = {key for key in one.keys() ^ other.keys() if not isinstance(one.get(key, other.get(key)), PLAIN)}
        if more := {key for key in more if not (isinstance(key, str) and key in ignored)}:
            raise Unlike(f"{place} has {', '.join(sorted(map(str, more)))} in one of them only")
        for key in keys:
            if key in other:
                self.links.append(Link(one, key, one[key]))
                yield key, one[key], other[key]


def parts(found: Any) -> Iterator[tuple[str, Any]]:
    """What a function, a method, a partial call or a set is made of."""
    if isinstance(found, functools.partial):
        yield from (("func", found.func), ("args", found.args), ("keywords", found.keywords))
    elif isinstance(found, types.MethodType):
        yield from (("__func__", found.__func__), ("__self__", found.__self__))
    elif isinstance(found, types.FunctionType):
        yield from ((name, getattr(found, name)) for name in ("__code__", "__defaults__", "__kwdefaults__"))
        for name, cell in zip(found.__code__.co_freevars, found.__closure__ or (), strict=False):
            yield name, cell.cell_contents
    elif isinstance(found, set):
        yield "items", frozenset(found)


def slots(place: str, found: Any) -> list[str]:
    """Names of what an object without a dictionary of attributes holds. Raises `Unlike` if that is not known."""
    names = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    if not names and not isinstance(found, _CONTAINERS):
        raise Unlike(f"{place} is a {type(found).__name__}, whose content is not known")
    return names


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta:
        return one.shape == other.shape and one.is_meta == other.is_meta
    return torch.equal(*(tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def _short(found: object) -> str:
    text = repr(found)
    return text if len(text) < 60 else f"a {type(found).__name__}"


def compared(make: Callable[[], _S]) -> _S:
    """What is to be exchanged, as ``make`` finds it. Raises `Unlike` also for what it did not expect."""
    try:
        return make()
    except (Unlike, MemoryError):
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise Unlike(f"it cannot be walked through: {type(error).__name__}: {error}") from error


def lacks_memory(error: Exception) -> bool:
    """Whether an error says that there is no memory, of which there may be more later."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)
