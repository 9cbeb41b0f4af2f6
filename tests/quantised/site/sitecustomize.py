"""Has SGLang compute with block FP8 on any CPU, as it does on a GPU but for the kernel.

Its own path for CPUs needs a matrix unit (AMX), and packs weights for it.
"""

from tests import after_import


def _linear(input, weight, block_size, weight_scale, input_scale=None, bias=None, **_):
    from dequantised import dequantised
    from torch.nn import functional

    return functional.linear(input, dequantised(weight, weight_scale, block_size, input.dtype), bias)


def _dequantising(module):
    module._is_cpu = False
    module.dispatch_w8a8_block_fp8_linear = lambda *_, **__: _linear


after_import.change({"sglang.srt.layers.quantization.fp8": _dequantising})
