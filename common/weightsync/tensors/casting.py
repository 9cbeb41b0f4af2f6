"""Casts floating-point tensors on the way into an arena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from weightsync.errors import SourceError

#: Elements cast at a time on a CPU: few enough that torch does it in the calling thread, and that the result is still
#: in the cache when it is hashed.
_ELEMENTS: Final = 1 << 15

#: The trainer's dtypes of the tensors that are cast, by their number, where none is.
NO_CASTS: Final[Mapping[int, torch.dtype]] = {}


@torch.no_grad()
def cast(name: str, target: torch.Tensor, source: torch.Tensor) -> int:
    """Cast ``source`` into ``target``, of the same shape; return how many elements of ``source`` are not finite.

    Raises `SourceError`, naming the tensor, if a finite element would become infinite.
    """
    alike = target.is_contiguous() and source.is_contiguous()
    if not alike or target.device.type != "cpu" or source.device.type != "cpu":
        target.copy_(source)
        return _not_finite(name, target, source)
    found = 0
    for into, out_of in zip(
        torch.split(target.view(-1), _ELEMENTS), torch.split(source.view(-1), _ELEMENTS), strict=True
    ):
        into.copy_(out_of)
        found += _not_finite(name, into, out_of)
    return found


def _not_finite(name: str, target: torch.Tensor, source: torch.Tensor) -> int:
    if not source.numel():
        return 0
    # One pass over what is in the cache; a NaN comes out of it too.
    low, high = map(float, torch.aminmax(source))
    most = torch.finfo(target.dtype).max
    if -most <= low and high <= most:
        return 0
    before, after = (~torch.isfinite(tensor) for tensor in (source, target))
    if made := int((after & ~before).sum()):
        worst = float(source[after & ~before].abs().max())
        raise SourceError(
            f"{name}: {made} finite values, up to {worst:g}, would be infinite in {target.dtype}, in which the engine "
            "holds this tensor; scale or clamp them, or start the engine with a wider dtype"
        )
    return int(before.sum())
