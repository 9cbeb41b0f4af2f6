"""Has SGLang pack the weights of linear layers on any CPU, as it does where there is AMX: into memory of their own, and
not as a checkpoint has them. Here they are negated. While there is a file ``PACK_WRONGLY``, the next layer of one rank
gets one value wrong, and the file goes."""

import os

from torch.nn import functional

from tests import after_import


def _asked():
    try:
        os.unlink(os.environ["PACK_WRONGLY"])
    except (KeyError, FileNotFoundError):
        return False
    return True


def _packing(module):
    def pack(self, layer):
        layer.weight.data = layer.weight.data.neg()
        if _asked():
            layer.weight.data[3, 5] += 1

    def apply(self, layer, x, bias=None):
        return functional.linear(x, -layer.weight, bias)

    module.UnquantizedLinearMethod.process_weights_after_loading = pack
    module.UnquantizedLinearMethod.apply = apply


after_import.change({"sglang.srt.layers.quantization.unquant": _packing})
