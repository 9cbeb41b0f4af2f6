"""Quantises a tensor on its way into an arena, piece by piece, as the buckets are filled."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from weightsync.tensors.casting import ELEMENTS, INTEGERS, cast, not_finite
from weightsync.tensors.formats import Format
from weightsync.tensors.layout import DTYPES

Pieces = tuple[torch.Tensor, ...] | list[torch.Tensor]

#: Pieces of `ELEMENTS` which are made together, one call for each step: few enough to stay in a cache, and so many
#: that threads seldom wait for Python's lock.
_TOGETHER: Final = 32
#: Elements whose scales are computed together on a CPU, and elsewhere, where that takes as much memory again.
_AHEAD: Final = 1 << 21
_AHEAD_ON_DEVICE: Final = 1 << 24
#: What a dtype is in which a weight would become infinite.
_OF_SCALES: Final = "of which the engine's checkpoint has the scales"
#: What `write` makes, by its number: the values, their scales, and the shape of the tensor.
_VALUES, _SCALES, _SHAPE = range(3)
#: Added to a float32, it leaves the nearest integer in the lowest bits: of two that are as near, the even one. torch's
#: own rounding would start threads.
_NEAREST: Final = 3.0 * (1 << 22)


class Quantising:
    """Makes of ``tensor``, called ``name``, what crosses in the format ``how``, whose ``work`` is known.

    Scales are computed as far as values are written: then the tensor is read for the second time from the cache.
    """

    def __init__(self, name: str, tensor: torch.Tensor, how: Format):
        self._name, self._how, self._shape = name, how, torch.tensor(tensor.shape)
        columns, (tall, wide) = tensor.shape[-1], how.block
        groups = tensor.shape[:-2].numel() if any(how.block) else 1
        self._source = tensor.resolve_neg().reshape(-1, columns)
        #: Rows of a group, rows and columns of a block, and how many of these a group has each way.
        self._rows = len(self._source) // groups
        self._tall, self._wide = tall or self._rows, wide or columns
        self._down, self._across = -(-self._rows // self._tall), -(-columns // self._wide)
        work = DTYPES[how.work]
        shape = 2, groups * self._down, self._across
        self._scales, self._factors = torch.empty(shape, dtype=work, device=tensor.device)
        self._integers = how.weights[0] == "int"
        on_cpu = tensor.device.type == "cpu"
        self._ahead = _AHEAD if on_cpu else _AHEAD_ON_DEVICE
        self._piece = most = max(1, (ELEMENTS if on_cpu else _AHEAD_ON_DEVICE) // columns)
        #: About as many rows, of which a block has a whole number; 0 if there is no such number.
        self._even = next((rows for rows in range(min(most, self._tall), most // 2, -1) if not self._tall % rows), 0)
        self.restart()

    def restart(self) -> None:
        """The tensor has other values now."""
        #: How many rows of blocks have scales, and how many elements of these are not finite.
        self._known = self._not_finite = 0
        #: Whether values could be beyond the limits of the format.
        self._beyond = False

    def write(self, which: int, start: int, target: torch.Tensor) -> int:
        """Write ``target``, 1-D: what the format has in this place, from element ``start`` on.

        Returns how many elements are not finite of those whose scales were computed for it. Raises `SourceError`,
        naming the tensor, if a finite one would become infinite in the dtype of the work.
        """
        before = self._not_finite
        if which == _VALUES:
            pieces = self._pieces(start, target)
            while some := list(itertools.islice(pieces, _TOGETHER)):
                self._make(*zip(*some, strict=True))
        elif which == _SHAPE:
            target.copy_(self._shape[start : start + len(target)])
        else:
            self._know(len(self._scales))
            scales = self._scales.view(-1)[start : start + len(target)]
            if target.dtype.itemsize == 1:
                target.copy_(scales)  # powers of two
            else:
                cast(self._name + self._how.names[_SCALES], target, scales)
        return self._not_finite - before

    def _pieces(self, start: int, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Parts of the tensor, their factors, and where in ``target`` their values go."""
        packed, at, end = self._how.packed, start, start + len(target)
        columns = self._source.shape[1] // packed
        while at < end:
            row, column = divmod(at, columns)
            group, inside = divmod(row, self._rows)
            band = group * self._down + inside // self._tall
            whole, piece = min(end - at, (self._rows - inside) * columns) // (self._tall * columns), self._piece
            if self._tall == 1 or not self._even or column or inside % self._tall:
                whole = 0
            self._know(band + max(1, whole))
            if whole:  # rows of blocks: each call of torch is for all of them
                rows, length, piece = whole * self._tall, columns, self._even
            elif column or end - at < columns:
                rows, length = 1, min(columns - column, end - at)
            else:
                left = self._known - row if self._tall == 1 else self._tall - inside % self._tall
                rows, length = min((end - at) // columns, left, self._rows - inside), columns
            part = slice(column * packed, (column + length) * packed)
            source = self._source[row : row + rows, part]
            factors = self._factors[row : row + rows] if self._tall == 1 else self._factors[band : band + max(1, whole)]
            if self._tall == 1 < self._across and length == columns:
                source, factors = source.reshape(rows, self._across, self._wide), factors.unsqueeze(2)
            elif self._across > 1:
                factors = factors.unsqueeze(2).expand(-1, -1, self._wide).flatten(1)[:, part]
            pieces = torch.unsafe_split(source, piece)
            # Those of a row of blocks share its factors.
            by = torch.unsafe_split(factors, piece if self._tall == 1 else 1)
            shared = (one for one in by for _ in range(len(pieces) // len(by)))
            into = target[at - start :][: rows * length].view(rows, length)
            yield from zip(pieces, shared, torch.unsafe_split(into, piece), strict=True)
            at += rows * length

    def _make(self, source: Pieces, factors: Pieces, target: Pieces) -> None:
        made = self._limited(source, factors)
        if self._integers:
            made = self._as_integers(made, target[0].dtype)
        if self._tall == 1 < self._across:  # they may have been groups
            made = [one.view(into.shape) for one, into in zip(made, target, strict=True)]
        torch._foreach_copy_(target, made)

    def _limited(self, source: Pieces, factors: Pieces) -> Pieces:
        """The values before they are rounded, within the limits of the format; in float32 if these are integers."""
        how, work = self._how, self._scales.dtype
        if torch.promote_types(source[0].dtype, work) != work:
            source = [piece.to(work) for piece in source]
        made: Pieces = torch._foreach_div(source, factors) if how.divides else torch._foreach_mul(source, factors)
        if how.zero_point:
            torch._foreach_add_(made, 0.0)
        if self._integers:
            made = [piece.to(torch.float32) for piece in made]
        if self._integers or self._beyond:
            torch._foreach_clamp_min_(made, how.limits[0])
            torch._foreach_clamp_max_(made, how.limits[1])
        return made

    def _as_integers(self, values: Pieces, dtype: torch.dtype) -> Pieces:
        """Round values in float32 to integers of a byte; packed ones have no sign, and begin in the lowest bits."""
        packed, bits = self._how.packed > 1, self._how.weights[1]
        torch._foreach_add_(values, _NEAREST + (1 << bits - 1 if packed else 0))
        made = [piece.view(torch.int32).to(torch.uint8) for piece in values]
        if packed and bits == 4:
            pairs = [piece.view(torch.int16) for piece in made]
            made = [(pair | pair >> 4).to(torch.uint8) for pair in pairs]
        return [piece.view(dtype) for piece in made]

    def _know(self, bands: int) -> None:
        """Compute the scales of at least so many rows of blocks."""
        while self._known < bands:
            group, down = divmod(self._known, self._down)
            count = min(self._down - down, max(1, self._ahead // (self._tall * self._source.shape[1])))
            first = group * self._rows
            rows = self._source[first + down * self._tall : first + min(self._rows, (down + count) * self._tall)]
            largest = self._largest(rows).to(self._scales.dtype)
            scales, factors = self._how.scaling(self._how, largest)
            finite = math.isfinite(float(largest.amax()))
            if not finite:
                self._not_finite += not_finite(self._name, rows.to(self._scales.dtype), rows, _OF_SCALES)
            # Otherwise the largest value of a block is close to the format's limit, and no rounding passes it.
            self._beyond |= not finite or float(scales.amin()) < torch.finfo(self._scales.dtype).tiny
            known = slice(self._known, self._known + count)
            self._scales[known], self._factors[known] = scales, factors
            self._known += count

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        """The largest magnitude in each block of these rows: as integers, among which NaN is largest of all."""
        bits = rows.view(INTEGERS[rows.itemsize][0])
        if self._tall == 1:
            return _magnitudes(bits.reshape(-1, self._across, self._wide), 2).view(rows.dtype)
        if not len(rows) % self._tall and self._tall * rows.shape[1] <= self._ahead:
            bands = _magnitudes(bits.view(-1, self._tall, rows.shape[1]), 1)
        else:
            step = max(1, self._ahead // rows.shape[1])
            bands = torch.stack(
                [
                    functools.reduce(torch.maximum, (_magnitudes(part, 0) for part in torch.split(band, step)))
                    for band in torch.split(bits, self._tall)
                ]
            )
        padded = torch.nn.functional.pad(bands, (0, self._across * self._wide - rows.shape[1]))
        return padded.view(-1, self._across, self._wide).amax(2).view(rows.dtype)


def _magnitudes(bits: torch.Tensor, dimension: int) -> torch.Tensor:
    """The largest numbers along a dimension, without their sign, as integers."""
    most = torch.iinfo(bits.dtype).max
    if bits.device.type != "cpu":
        return (bits & most).amax(dimension)
    # In the calling thread, at the speed of memory. Among numbers with a sign the largest is that of the positive ones,
    # among those without that of the negative ones, if there are any; else it is the other.
    signed = bits.numpy()
    both = signed.max(dimension), signed.view(INTEGERS[bits.itemsize][1]).max(dimension).view(signed.dtype)
    return torch.from_numpy(np.maximum(*(one & most for one in both)))
