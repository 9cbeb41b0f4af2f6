"""What stands for a tensor that a module does not have as such: a part of it, or what it is computed from."""

from __future__ import annotations

import math

import torch


class StandIn:
    """Stands for a tensor of ``shape``, laid out contiguously, with the dtype and on the device of ``held``.

    ``held`` is a tensor of this process that it is made from. ``key`` is the same for all names of one tensor.
    """

    def __init__(self, held: torch.Tensor, shape: tuple[int, ...], key: object):
        self.held, self.shape, self.key = held, shape, key
        self.dtype, self.device, self.is_meta = held.dtype, held.device, held.is_meta

    def detach(self) -> StandIn:
        """This, which has no gradient."""
        return self

    def stride(self) -> tuple[int, ...]:
        """The strides of the tensor."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
