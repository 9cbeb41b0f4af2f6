"""Fake tensors: they stand for checkpoint tensors, have no data, and know which slice of which tensor they are."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from weightsync.tensors.layout import WIDER, dtype_name

aten: Final = torch.ops.aten

#: Operations that copy values to other memory and change nothing else.
COPIES: Final = (aten.clone.default, aten.lift_fresh_copy.default)
#: Copies that only change the shape, and the views of the same values that replace them.
RESHAPES: Final[dict[Any, Any]] = {
    aten._unsafe_view.default: aten.view.default,
    aten._reshape_copy.default: aten.view.default,
    aten.view_copy.default: aten.view.default,
}
#: Views by place in memory, not by index: of a copy they cannot be applied to the original.
_BY_PLACE: Final = (aten.as_strided.default, aten._reshape_alias.default)


class Unrecordable(Exception):
    """The loader did something that cannot be recorded for any parameter."""


class Record(Protocol):
    """The recorder, as fake tensors know it."""

    thread: int
    """The identity of the recorded thread."""
    broken: str
    """Why the recording must not be used; empty if it may."""
    made: list[tuple[frozenset[str], weakref.ref[FakeTensor]]]
    """Every fake tensor, with the names of the checkpoint tensors that it stands for."""


class FakeTensor(torch.Tensor):
    """A checkpoint tensor, or a result of operations on one, without data.

    The loader sees the shape, strides and dtype of ``seen``, on the rank's device. ``slice`` is the part of the
    checkpoint tensor (a meta tensor) that the values come from, after casts to ``dtypes``; None if they are computed.
    """

    seen: torch.Tensor
    slice: torch.Tensor | None
    checkpoint_names: frozenset[str]  # not names, which older versions of torch have
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
        self.recorder, self.checkpoint_names, self.seen = recorder, names, seen
        self.slice, self.dtypes = slice_, dtypes
        recorder.made.append((names, weakref.ref(self)))
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = next(leaf for leaf in tensors_in(args, kwargs or {}) if isinstance(leaf, FakeTensor))
        # The recorder sees its own thread only: writes of another one would go unnoticed.
        where = "in another thread" if threading.get_ident() != found.recorder.thread else "after the load"
        found.recorder.broken = f"it uses {min(found.checkpoint_names)} {where}"
        raise Unrecordable(found.recorder.broken)

    def follow(self, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a view or a copy of this, as ``func`` returns it: one fake tensor or a list of them."""
        seen = func(self.seen, *rest, **kwargs)
        slice_: Any = None
        if self.slice is self.seen and func not in RESHAPES:
            slice_ = seen
        elif self.slice is not None and func not in _BY_PLACE and not (func is aten.view.dtype and self.dtypes):
            try:
                slice_ = RESHAPES.get(func, func)(self.slice, *rest, **kwargs)
            except RuntimeError:
                slice_ = None  # the slice cannot be viewed in this shape without a copy
        if isinstance(seen, torch.Tensor):
            return self.like(seen, slice_)
        slices = [None] * len(seen) if slice_ is None else slice_
        return [self.like(one, part) for one, part in zip(seen, slices, strict=True)]

    def like(
        self, seen: torch.Tensor, slice_: torch.Tensor | None, dtypes: tuple[torch.dtype, ...] | None = None
    ) -> FakeTensor:
        """Another fake tensor for the same checkpoint tensors."""
        return FakeTensor(
            self.recorder, self.checkpoint_names, seen, slice_, self.dtypes if dtypes is None else dtypes, self.device
        )


def tensors_in(values: Iterable[Any], named: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """The tensors among the arguments of an operation, also in lists; many times as fast as torch's own function."""
    found: list[torch.Tensor] = []
    for value in (*values, *named.values()) if named else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += (leaf for leaf in value if isinstance(leaf, torch.Tensor))
    return found


def one_cast(dtypes: Sequence[torch.dtype]) -> bool:
    """Whether casting through all ``dtypes`` in order equals one cast from the first to the last."""
    first = dtypes[0]
    for dtype, following in itertools.pairwise(dtypes[1:]):
        if dtype not in (first, following) and (dtype_name(first), dtype_name(dtype)) not in WIDER:
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
