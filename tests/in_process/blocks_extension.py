"""A worker extension with which vLLM computes with block FP8 on any CPU: its own kernel needs a matrix unit (AMX)."""

from torch.nn import functional
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.platforms.interface import PlatformEnum

from tests.quantised.site.dequantised import dequantised
from vllm_weightsync import WorkerExtension


class Dequantising(CPUFp8BlockScaledMMKernel):
    """Keeps weights as the checkpoint has them."""

    @classmethod
    def is_supported(cls, compute_capability=None):
        return True, None

    @classmethod
    def can_implement(cls, config):
        return True, None

    def process_weights_after_loading(self, layer):
        pass

    def apply_weights(self, layer, x, bias=None, **_):
        found = self._get_layer_params(layer)
        scales = found.weight_scale if found.weight_scale_inv is None else found.weight_scale_inv
        return functional.linear(x, dequantised(found.weight, scales, self.weight_group_shape, x.dtype), bias)


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, Dequantising)


class BlocksExtension(WorkerExtension):
    """weightsync's, in a worker with such a kernel."""
