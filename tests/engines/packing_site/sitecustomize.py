"""Has SGLang pack the weights of linear layers on any CPU, as it does where there is AMX: into memory of their own, and
not as a checkpoint has them. Here they are negated."""

from torch.nn import functional

from tests import after_import


def _packing(module):
    def pack(self, layer):
        layer.weight.data = layer.weight.data.neg()

    def apply(self, layer, x, bias=None):
        return functional.linear(x, -layer.weight, bias)

    module.UnquantizedLinearMethod.process_weights_after_loading = pack
    module.UnquantizedLinearMethod.apply = apply


after_import.change({"sglang.srt.layers.quantization.unquant": _packing})
