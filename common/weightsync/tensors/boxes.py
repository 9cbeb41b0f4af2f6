"""Boxes of tensors: a range of indices in every dimension; and views that are boxes of other tensors."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weightsync.protocol.codec import Shape
from weightsync.protocol.http import TensorSpec


class Box(NamedTuple):
    """Part of a tensor: the first index (``start``) and the size (``shape``) in each of its dimensions."""

    start: Shape
    shape: Shape

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.start, self.shape, strict=True))}]"


def whole(spec: TensorSpec) -> Box:
    """The box that is all of a tensor."""
    return Box((0,) * len(spec.shape), spec.shape)


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether the box lies in a tensor of ``shape``."""
    return len(box.start) == len(box.shape) == len(shape) and all(
        min(a, n) >= 0 and a + n <= size for a, n, size in zip(box.start, box.shape, shape, strict=True)
    )


def is_within(inner: Box, outer: Box) -> bool:
    """Whether the first of two boxes of a tensor lies in the second."""
    pairs = zip(*inner, *outer, strict=True)
    return all(b <= a and a + n <= b + m for a, n, b, m in pairs)


def relative(part: Box, of: Box) -> Box:
    """A box of a tensor as a box of ``of``, another one that it lies in."""
    return Box(tuple(a - b for a, b in zip(part.start, of.start, strict=True)), part.shape)


def hull(one: Box, other: Box) -> Box:
    """The smallest box that contains both boxes; an empty one lies in any box."""
    if 0 in one.shape or 0 in other.shape:
        return other if 0 in one.shape else one
    start = tuple(map(min, one.start, other.start))
    ends = (max(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return Box(start, tuple(end - a for a, end in zip(start, ends, strict=True)))


def overlap(one: Box, other: Box) -> Box | None:
    """What lies in both boxes; None if that is nothing."""
    low = tuple(map(max, one.start, other.start))
    high = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))


def innermost(shape: Sequence[int], box: Box) -> int:
    """The last dimension in which a box is smaller than its tensor; -1 if it is the whole tensor."""
    return max((at for at, (size, all_) in enumerate(zip(box.shape, shape, strict=True)) if size != all_), default=-1)


def runs(shape: Sequence[int], itemsize: int, box: Box) -> Iterator[tuple[int, int]]:
    """The contiguous runs of a box that is not empty: (offset in a contiguous tensor of ``shape``, bytes), in order."""
    inner = innermost(shape, box)
    if inner < 0:
        yield 0, math.prod(shape) * itemsize
        return
    steps = [math.prod(shape[at + 1 :]) * itemsize for at in range(len(shape))]
    nbytes = box.shape[inner] * steps[inner]
    outer = (range(a, a + n) for a, n in zip(box.start[:inner], box.shape[:inner], strict=True))
    for index in itertools.product(*outer):
        yield sum(map(operator.mul, (*index, box.start[inner]), steps)), nbytes


def joined(boxes: Sequence[Box]) -> list[Box]:
    """The same elements in fewer boxes: neighbours that are equal but for one dimension become one. None overlap."""
    found = sorted(boxes)
    for dim in reversed(range(len(found[0].start) if found else 0)):
        ends: dict[tuple[tuple[int, ...], tuple[int, ...], int], Box] = {}
        for box in sorted(found, key=lambda box: box.start[dim]):
            others = (*box.start[:dim], *box.start[dim + 1 :]), (*box.shape[:dim], *box.shape[dim + 1 :])
            before, end = ends.pop((*others, box.start[dim]), None), box.start[dim] + box.shape[dim]
            start = box.start if before is None else before.start
            size = end - start[dim]
            ends[(*others, end)] = Box(start, (*box.shape[:dim], size, *box.shape[dim + 1 :]))
        found = sorted(ends.values())
    return found


def narrowed(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The box of ``tensor`` with this start and shape, as a view."""
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


class LocalBox(NamedTuple):
    """A box of the whole tensor that lies at index ``at`` of a process's local tensor."""

    box: Box
    at: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The elements of the box, as a view of the local tensor."""
        return narrowed(local, self.at, self.box.shape)

    def within(self, inner: Box) -> LocalBox:
        """A box in this one."""
        return LocalBox(inner, tuple(a + b - c for a, b, c in zip(self.at, inner.start, self.box.start, strict=True)))


class FlatBox(NamedTuple):
    """A box of the whole tensor, of which a process's local tensor (1-D) has the elements from ``first`` on.

    ``strides`` are those of the whole tensor, laid out contiguously.
    """

    box: Box
    strides: tuple[int, ...]
    first: int

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The elements of the box, as a view of the local tensor."""
        at = sum(map(operator.mul, self.box.start, self.strides)) - self.first
        return local.as_strided(self.box.shape, self.strides, int(local.storage_offset()) + at)

    def within(self, inner: Box) -> FlatBox:
        """A box in this one."""
        return self._replace(box=inner)


def boxes_of_range(shape: Sequence[int], low: int, high: int) -> list[Box]:
    """The boxes of the elements ``low`` to ``high`` of a contiguous tensor of ``shape``: in each dimension at most two.

    The elements up to the first whole slice, the whole slices, and the elements after the last one.
    """
    if low >= high:
        return []
    if len(shape) < 2:
        return [Box((low,) * len(shape), (high - low,) * len(shape))]
    size = math.prod(shape[1:])
    first, last = -(-low // size), high // size
    if first > last:  # within one slice
        return _behind(last, boxes_of_range(shape[1:], low - last * size, high - last * size))
    before = _behind(first - 1, boxes_of_range(shape[1:], low - (first - 1) * size, size)) if low % size else []
    rest = (0,) * (len(shape) - 1)
    slices = [Box((first, *rest), (last - first, *shape[1:]))] if first < last else []
    return [*before, *slices, *_behind(last, boxes_of_range(shape[1:], 0, high - last * size))]


def _behind(index: int, boxes: Sequence[Box]) -> list[Box]:
    """Boxes of the slice number ``index`` as boxes of the tensor."""
    return [Box((index, *box.start), (1, *box.shape)) for box in boxes]


class Cut(NamedTuple):
    """A view that is a box of its base tensor.

    ``dims`` has the base tensor's dimension for each dimension of the view, None for one that the view adds.
    """

    box: Box
    dims: tuple[int | None, ...]

    def local(self, boxes: Sequence[LocalBox | FlatBox]) -> tuple[LocalBox | FlatBox, ...]:
        """Intersections of the view with a process's local boxes, as boxes of the base tensor."""
        found = []
        for one in boxes:
            if (common := overlap(one.box, self.box)) is not None:
                found.append(one.within(common))
        return tuple(found)

    def seen(self, box: Box) -> Box:
        """A box of the base tensor, in the view's dimensions."""
        start = tuple(0 if d is None else box.start[d] - self.box.start[d] for d in self.dims)
        return Box(start, tuple(1 if d is None else box.shape[d] for d in self.dims))

    def turned(self, part: torch.Tensor) -> torch.Tensor:
        """Elements ``part`` of a box of the base tensor, in the view's dimensions."""
        sizes = [1 if d is None else part.shape[d] for d in self.dims]
        strides = [1 if d is None else part.stride(d) for d in self.dims]
        return part.as_strided(sizes, strides, part.storage_offset())


def cut_of(shape: Sequence[int], view: Sequence[int], stride: Sequence[int], offset: int) -> Cut | None:
    """The view of a contiguous tensor of ``shape`` as a `Cut`, given the view's shape, stride and offset in elements.

    Its dimensions may be in any order, and dimensions of size 1 may be dropped or added. None for any other view, such
    as one that joins or splits dimensions.
    """
    if 0 in view:
        return Cut(Box((0,) * len(shape), (0,) * len(shape)), (None,) * len(view))
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    start = []
    for step in steps:
        at, offset = divmod(offset, max(1, step))
        start.append(at)
    sizes, dims = [1] * len(shape), list[int | None]()
    by_step = {step: d for d, (step, size) in enumerate(zip(steps, shape, strict=True)) if size > 1}
    for size, step in zip(view, stride, strict=True):
        if size == 1:
            dims.append(None)
            continue
        dim = by_step.pop(step, None)
        if dim is None or start[dim] + size > shape[dim]:
            return None
        sizes[dim] = size
        dims.append(dim)
    return None if offset else Cut(Box(tuple(start), tuple(sizes)), tuple(dims))
