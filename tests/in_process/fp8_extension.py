"""A worker extension with which vLLM computes with FP8 on any CPU: its own kernels need a matrix unit (AMX)."""

import torch
from torch.nn import functional
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import (
    CPUFp8BlockScaledMMKernel,
    CPUFp8PerTensorScaledMMLinearKernel,
)
from vllm.platforms.interface import PlatformEnum

from tests.quantised.site.dequantised import dequantised
from vllm_weightsync import WorkerExtension


class _AnyCPU:
    """Keeps weights as the checkpoint has them, or as they were quantised."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        pass


class Blocks(_AnyCPU, CPUFp8BlockScaledMMKernel):
    """A scale for each block."""

    def apply_weights(self, layer, x, bias=None, **_):
        found = self._get_layer_params(layer)
        scales = found.weight_scale if found.weight_scale_inv is None else found.weight_scale_inv
        return functional.linear(x, dequantised(found.weight, scales, self.weight_group_shape, x.dtype), bias)


class OneScale(_AnyCPU, CPUFp8PerTensorScaledMMLinearKernel):
    """One scale for a layer."""

    def apply_weights(self, layer, x, bias=None, **_):
        return functional.linear(x, (layer.weight.t().float() * layer.weight_scale).to(x.dtype), bias)


def quantised(weight, scale):
    """As vLLM's operator with one scale, which it does not have on a CPU."""
    most = torch.finfo(torch.float8_e4m3fn).max
    return (weight.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Blocks)
linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, OneScale)
_custom_ops.scaled_fp8_quant = quantised


class Fp8Extension(WorkerExtension):
    """weightsync's, in a worker with such kernels."""
