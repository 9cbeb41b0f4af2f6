"""Casts floating-point tensors on the way into an arena."""

from __future__ import annotations

import functools
import math
from typing import Final

import torch

from weightsync.errors import SourceError

#: Elements cast at a time on a CPU: few enough that torch does it in the calling thread.
ELEMENTS: Final = 1 << 15

#: What a dtype is in which an element would become infinite.
_HELD: Final = "in which the engine holds this tensor"
#: By the bytes of an element: integers of that size, of torch and unsigned ones of NumPy.
INTEGERS: Final = {2: (torch.int16, "uint16"), 4: (torch.int32, "uint32"), 8: (torch.int64, "uint64")}


class Casting:
    """Casts ``tensor``, called ``name``; see `conversion.Making`."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self._name, self._flat = name, tensor.reshape(-1)

    def restart(self) -> None:
        """Nothing is kept of the values before."""

    def write(self, which: int, start: int, target: torch.Tensor) -> int:
        """Cast elements from ``start`` on into ``target``, 1-D; see `cast`."""
        return cast(self._name, target, self._flat[start : start + len(target)])


@torch.no_grad()
def cast(name: str, target: torch.Tensor, source: torch.Tensor) -> int:
    """Cast ``source`` into ``target``, of the same shape; return how many elements of ``source`` are not finite.

    Raises `SourceError`, naming the tensor, if a finite element would become infinite.
    """
    here = target.device.type == source.device.type == "cpu"
    if not (here and target.is_contiguous() and source.is_contiguous()) or target.numel() <= ELEMENTS:
        target.copy_(source)
    else:  # one call for all pieces
        torch._foreach_copy_(torch.split(target.view(-1), ELEMENTS), torch.split(source.view(-1), ELEMENTS))
    return 0 if _is_finite(target) else not_finite(name, target, source)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    if not tensor.numel():
        return True
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        low, high = torch.aminmax(tensor)  # a NaN comes out of it too
        return math.isfinite(float(low)) and math.isfinite(float(high))
    # As integers, in which whatever is not finite is largest: among positive numbers if they have a sign, among all if
    # not. NumPy does that at the speed of memory.
    signed, unsigned = INTEGERS[tensor.itemsize]
    least = _infinity(tensor.dtype)
    bits = tensor.detach().view(-1).view(signed).numpy()
    return bool(bits.max() < least and bits.view(unsigned).max() < least + (1 << 8 * tensor.itemsize - 1))


@functools.cache
def _infinity(dtype: torch.dtype) -> int:
    """The bits of infinity, which are those of an integer that only NaNs exceed among the positive ones."""
    return int(torch.tensor(math.inf, dtype=dtype).view(INTEGERS[dtype.itemsize][0]))


def not_finite(name: str, target: torch.Tensor, source: torch.Tensor, dtype_is: str = _HELD) -> int:
    """How many elements of ``source`` are not finite. Raises as `cast`, of which ``target`` is the result."""
    before, after = (~torch.isfinite(tensor) for tensor in (source, target))
    if made := int((after & ~before).sum()):
        worst = float(source[after & ~before].abs().max())
        raise SourceError(
            f"{name}: {made} finite values, up to {worst:g}, would be infinite in {target.dtype}, {dtype_is}; scale or "
            "clamp them, or start the engine with a wider dtype"
        )
    return int(before.sum())
