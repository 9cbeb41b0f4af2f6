"""Boxes of tensors: parts that begin and end somewhere in every dimension, and views that are such parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightsync.protocol.codec import Shape
from weightsync.protocol.http import TensorSpec


class Box(NamedTuple):
    """Part of a tensor, in elements: ``start`` and ``shape`` in every dimension of the whole tensor."""

    start: Shape
    shape: Shape

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{a + n}' for a, n in zip(self.start, self.shape, strict=True))}]"


def whole(spec: TensorSpec) -> Box:
    """All of a tensor."""
    return Box((0,) * len(spec.shape), spec.shape)


def is_inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether that is a part of a tensor of this shape."""
    return len(box.start) == len(box.shape) == len(shape) and all(
        min(a, n) >= 0 and a + n <= size for a, n, size in zip(box.start, box.shape, shape, strict=True)
    )


def hull(one: Box, other: Box) -> Box:
    """The smallest box that both are in; one without elements is in any."""
    if 0 in one.shape or 0 in other.shape:
        return other if 0 in one.shape else one
    start = tuple(map(min, one.start, other.start))
    ends = (max(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    return Box(start, tuple(end - a for a, end in zip(start, ends, strict=True)))


def narrowed(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The box of a tensor that starts there and has that shape, a view."""
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


class LocalBox(NamedTuple):
    """A box of the whole, which lies at ``at`` in the local tensor."""

    box: Box
    at: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Its elements, a view."""
        return narrowed(local, self.at, self.box.shape)


class Cut(NamedTuple):
    """A view that is a box of the tensor it looks at: ``dims`` are that one's dimensions in the view's order, None for
    one that the view has besides."""

    box: Box
    dims: tuple[int | None, ...]

    def local(self, boxes: Sequence[LocalBox]) -> tuple[LocalBox, ...]:
        """What of it lies in local boxes, as boxes of the tensor that is looked at."""
        found = []
        for (start, shape), at in boxes:
            low = tuple(map(max, start, self.box.start))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, shape, *self.box, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                inner = Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))
                found.append(LocalBox(inner, tuple(a + b - c for a, b, c in zip(at, low, start, strict=True))))
        return tuple(found)

    def seen(self, box: Box) -> Box:
        """A box of the tensor, as one of the view."""
        start = tuple(0 if d is None else box.start[d] - self.box.start[d] for d in self.dims)
        return Box(start, tuple(1 if d is None else box.shape[d] for d in self.dims))

    def turned(self, part: torch.Tensor) -> torch.Tensor:
        """The elements of such a box, with the view's dimensions."""
        sizes = [1 if d is None else part.shape[d] for d in self.dims]
        strides = [1 if d is None else part.stride(d) for d in self.dims]
        return part.as_strided(sizes, strides, part.storage_offset())


def cut_of(shape: Sequence[int], view: Sequence[int], stride: Sequence[int], offset: int) -> Cut | None:
    """The view of a contiguous tensor of ``shape`` as a `Cut`: its dimensions in any order, those of one element
    dropped or added; None if it is anything else, as where dimensions were joined or split."""
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
