"""Has SGLang compute with block FP8 on any CPU, as it does on a GPU but for the kernel.

Its own path for CPUs needs a matrix unit (AMX), and packs weights for it.
"""

import importlib.abc
import importlib.util
import sys

_MODULE = "sglang.srt.layers.quantization.fp8"


def _linear(input, weight, block_size, weight_scale, input_scale=None, bias=None, **_):
    from dequantised import dequantised
    from torch.nn import functional

    return functional.linear(input, dequantised(weight, weight_scale, block_size, input.dtype), bias)


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        module._is_cpu = False
        module.dispatch_w8a8_block_fp8_linear = lambda *_, **__: _linear


sys.meta_path.insert(0, _AfterImport())
