"""Stand-ins for checkpoint tensors: they have no data and know which slice of which tensor they are."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

aten: Final = torch.ops.aten

#: Operations that change nothing but where the values are.
COPIES: Final = (aten.clone.default, aten.lift_fresh_copy.default)
#: A copy that only changes how the tensor is seen, after which it is a view of the same values.
RESHAPES: Final[dict[Any, Any]] = {
    aten._unsafe_view.default: aten.view.default,
    aten._reshape_copy.default: aten.view.default,
    aten.view_copy.default: aten.view.default,
}
#: Views by place in memory and not by index: they mean nothing for what a copy was made of.
_BY_PLACE: Final = (aten.as_strided.default, aten._reshape_alias.default)
#: Casts that lose nothing.
_WIDER: Final = {
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
}


class Unrecordable(Exception):
    """The loader did something that cannot be recorded, whatever the parameter."""


class Record(Protocol):
    """What stand-ins are noted in."""

    thread: int
    """The thread that is recorded."""
    broken: str
    """Why the record is not to be used."""
    made: list[tuple[str, weakref.ref[FakeTensor]]]
    """Every stand-in that was made, by the name of a tensor that it stands for."""


class FakeTensor(torch.Tensor):
    """A checkpoint tensor, or what became of one, without data.

    The loader sees shape, strides and dtype of ``seen`` on the rank's device. ``slice`` is the part of the checkpoint
    tensor, itself a meta tensor, whose values these are after casts to ``dtypes``; None if they were computed.
    """

    seen: torch.Tensor
    slice: torch.Tensor | None
    names: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    recorder: Record

    @staticmethod
    def __new__(
        cls,
        recorder: Record,
        names: frozenset[str],
        seen: torch.Tensor,
        slice_: torch.Tensor | None,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
    ) -> FakeTensor:
        self: FakeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            seen.shape,
            strides=seen.stride(),
            storage_offset=seen.storage_offset(),
            dtype=seen.dtype,
            device=device,
        )
        self.recorder, self.names, self.seen, self.slice, self.dtypes = recorder, names, seen, slice_, dtypes
        recorder.made.append((min(names), weakref.ref(self)))
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = next(leaf for leaf in tensors_in(args, kwargs or {}) if isinstance(leaf, FakeTensor))
        # The recorder sees its own thread alone: what else that one writes would not be noticed.
        where = "in another thread" if threading.get_ident() != found.recorder.thread else "after the load"
        found.recorder.broken = f"it uses {min(found.names)} {where}"
        raise Unrecordable(found.recorder.broken)

    def follow(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a view or a copy of this is; the same shape of results as ``func`` has."""
        seen = func(self.seen, *rest, **kwargs)
        slice_: Any = None
        if self.slice is self.seen and func not in RESHAPES:
            slice_ = seen
        elif self.slice is not None and func not in _BY_PLACE and not (func is aten.view.dtype and self.dtypes):
            try:
                slice_ = RESHAPES.get(func, func)(self.slice, *rest, **kwargs)
            except RuntimeError:
                slice_ = None  # another shape than the slice can be seen in without a copy
        if isinstance(seen, torch.Tensor):
            return self.like(seen, slice_)
        slices = [None] * len(seen) if slice_ is None else slice_
        return [self.like(one, part) for one, part in zip(seen, slices, strict=True)]

    def like(
        self, seen: torch.Tensor, slice_: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] | None = None
    ) -> FakeTensor:
        """Another stand-in for the same tensors."""
        return FakeTensor(
            self.recorder, self.names, seen, slice_, self.dtypes if dtypes is None else dtypes, self.device
        )


def tensors_in(values: Iterable[Any], named: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors among arguments of an operation, those in lists too; many times as fast as torch's own way."""
    found: list[torch.Tensor] = []
    for value in (*values, *named.values()) if named else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += (leaf for leaf in value if isinstance(leaf, torch.Tensor))
    return found


def one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casting from each to the next is the same as casting from the first to the last."""
    first = dtypes[0]
    for dtype, following in itertools.pairwise(dtypes[1:]):
        if dtype not in (first, following, *_WIDER.get(first, ())):
            return False
    return True


_views: dict[Any, bool] = {}


def is_view(func: Any) -> bool:
    if func not in _views:
        returns = func._schema.returns
        _views[func] = bool(returns) and all(
            found.alias_info is not None and not found.alias_info.is_write for found in returns
        )
    return _views[func]
