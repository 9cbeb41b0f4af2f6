"""Sharded tensors, of which this process holds a part: DTensors, flat parts, plain tensors with their position."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeGuard

import torch

from weightsync.errors import SourceError
from weightsync.sources.flat import FlatPart
from weightsync.tensors.boxes import Box, FlatBox, LocalBox
from weightsync.tensors.held import HeldShards

Span = tuple[int, int]
#: Supported kinds of placement that split, by name; FSDP2 makes the second of a dimension that TP has split already.
_SPLITS: Final = ("Shard", "_StridedShard")


@dataclass(frozen=True)
class LocalShard:
    """This process's part of a tensor: ``tensor`` is the box that begins at index ``start`` of a whole of ``shape``.

    For trainers that split tensors without DTensor: every rank pushes a mapping of names to `LocalShard`. Ranks that
    hold the same part must hold the same values.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    """Whether this is a DTensor. There is none unless its module is imported already; importing it takes a while."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def is_sharded(tensor: object) -> bool:
    """Whether this process may hold a part only: of a DTensor, or of a `FlatPart`."""
    return isinstance(tensor, FlatPart) or is_dtensor(tensor)


def check_placements(name: str, tensor: Any) -> None:
    """Raise `SourceError`, naming the tensor, unless its placements are replicated or split, without partial sums."""
    for placement in tensor.placements:
        kind = type(placement).__name__
        if placement.is_partial():
            raise SourceError(
                f"{name}: its ranks hold partial values ({placement}), whose sum no rank has; call redistribute() with "
                "Replicate() or Shard() first"
            )
        if not placement.is_replicate() and kind not in _SPLITS:
            raise SourceError(f"{name}: placement {placement} ({kind}) cannot be sent; redistribute() it as Shard()")


def local_of(tensor: Any) -> torch.Tensor:
    """This process's part of a sharded tensor, without communication or copy."""
    if isinstance(tensor, FlatPart):
        return tensor.held
    local: torch.Tensor = tensor.detach().to_local()
    return local


def boxes_of(name: str, tensor: Any) -> tuple[LocalBox | FlatBox, ...]:
    """Where the local part of a sharded tensor lies in the whole. Raises `SourceError`, naming it, if it is unknown."""
    if isinstance(tensor, FlatPart):
        return tensor.boxes
    check_placements(name, tensor)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits = tuple(
        (placement.dim % max(1, tensor.ndim), int(getattr(placement, "split_factor", 1)), mesh.size(at), coordinate[at])
        for at, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
    boxes, local_shape = local_boxes(tuple(tensor.shape), splits)
    if tuple(local_of(tensor).shape) != local_shape and boxes:
        raise SourceError(
            f"{name}: this rank's part is {list(local_of(tensor).shape)} where {tensor.placements} of "
            f"{list(tensor.shape)} make {list(local_shape)}; push a mapping of names to weightsync.LocalShard instead"
        )
    return boxes


@lru_cache(4096)
def local_boxes(
    shape: tuple[int, ...], splits: tuple[tuple[int, int, int, int], ...]
) -> tuple[tuple[LocalBox, ...], tuple[int, ...]]:
    """The boxes that one process holds of a tensor of ``shape`` after ``splits``, and the shape of its local tensor.

    A split is (dimension, factor, count, index): what is left of the dimension is cut into ``factor`` equal parts, each
    of these into ``count`` equal chunks, and the process keeps the chunk ``index`` of each part. Sizes are those of
    `torch.chunk`: the last chunks may be smaller or empty.
    """
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for dim, factor, count, which in splits:
        total = sum(b - a for a, b in spans[dim])
        wanted = [
            (low + first, low + last)
            for low, high in (_chunk(total, factor, n) for n in range(factor))
            for first, last in [_chunk(high - low, count, which)]
        ]
        spans[dim] = [piece for span in wanted for piece in _within(spans[dim], span)]
    merged = [_merged(dimension) for dimension in spans]
    boxes = []
    for chosen in itertools.product(*(list(zip(left, _offsets(left), strict=True)) for left in merged)):
        box = Box(tuple(a for (a, _), _ in chosen), tuple(b - a for (a, b), _ in chosen))
        boxes.append(LocalBox(box, tuple(at for _, at in chosen)))
    return tuple(boxes), tuple(sum(b - a for a, b in left) for left in merged)


def _chunk(total: int, count: int, which: int) -> Span:
    size = -(-total // count)
    return min(which * size, total), min((which + 1) * size, total)


def _within(spans: Sequence[Span], wanted: Span) -> Iterator[Span]:
    """The parts of ``spans`` that hold the elements ``wanted``, which are counted over all spans."""
    before = 0
    for a, b in spans:
        low, high = max(wanted[0] - before, 0), min(wanted[1] - before, b - a)
        if low < high:
            yield a + low, a + high
        before += b - a


def _merged(spans: Sequence[Span]) -> list[Span]:
    merged: list[Span] = []
    for a, b in spans:
        if merged and merged[-1][1] == a:
            merged[-1] = merged[-1][0], b
        else:
            merged.append((a, b))
    return merged


def _offsets(spans: Sequence[Span]) -> list[int]:
    return list(itertools.accumulate((b - a for a, b in spans), initial=0))[:-1]


def whole_tensor(held: HeldShards, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor in ``parts``, if this process holds all of it. Raises `SourceError`, naming it, if it does not."""
    if len(parts) != 1 or held.boxes[0].shape != held.spec.shape:
        raise SourceError(
            f"{held.spec.name}: this process holds {' '.join(map(str, held.boxes)) or 'nothing'} of "
            f"{list(held.spec.shape)}; every rank of a distributed trainer builds a Sender and calls push"
        )
    return parts[0]
