"""What a weight in float8 stands for, where no kernel of an engine computes with it."""

import torch


def dequantised(weight, scales, block, dtype):
    """A weight in float8, times the scales of its blocks."""
    tall, wide = (torch.repeat_interleave(torch.arange(n), size) for n, size in zip(scales.shape, block, strict=True))
    rows, columns = weight.shape
    return (weight.float() * scales.float()[tall[:rows]][:, wide[:columns]]).to(dtype)
