"""First calls of torch's functions on a CPU, made by one thread before an engine builds its model.

MKL chooses the kernel of a function in its first call. If two threads make that call at once, one may compute with a
kernel of low accuracy (https://github.com/pytorch/pytorch/issues/188792, MKL 2024.2): an engine would compute with
rotary tables that no other engine has, until it ends, and ``verify="deep"`` would refuse every push into it.
"""

from __future__ import annotations

from typing import Final

import torch

#: What torch computes with MKL's vector library.
_FUNCTIONS: Final = ["acos", "asin", "atan", "cos", "erf", "erfc", "exp", "log", "log10", "sin", "sqrt", "tan", "tanh"]


def make_first_calls() -> None:
    """Call each function with one element, in which no second thread takes part. It takes less than a millisecond."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
