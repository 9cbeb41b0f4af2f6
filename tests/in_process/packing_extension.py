"""A worker extension with which vLLM packs a layer wrongly, once, when a test asks for it: by one value."""

from vllm import _custom_ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod

from vllm_weightsync import WorkerExtension

#: Names of layers to pack wrongly.
ASKED = set()


def plain(layer, weight):
    """The handle by which a layer computes, and one of other weights."""
    (cell,) = layer.cpu_linear.__closure__
    return cell.cell_contents, _custom_ops.create_onednn_mm(weight.t(), 32)


def quantised(layer, weight):
    """As `plain`, for weights in int8."""
    kernel = layer.scheme.kernel
    more = layer.params_dtype, not kernel.config.is_static_input_scheme, not kernel.config.input_symmetric
    return kernel.dnnl_handler, _custom_ops.create_onednn_scaled_mm(weight.t(), layer.weight_scale, *more, 32)


def wrongly(pack, handles):
    def packing(method, layer):
        if getattr(layer, "prefix", None) not in ASKED:
            pack(method, layer)
            return
        ASKED.remove(layer.prefix)
        weight = layer.weight.data.clone()
        weight[3, 5] += 1 if weight[3, 5] <= 0 else -1
        pack(method, layer)
        own, other = handles(layer, weight)
        # Each frees by its tensor what is packed; nothing else of the layer is touched.
        own.handler_tensor, other.handler_tensor = other.handler_tensor, own.handler_tensor

    return packing


for kind, handles in ((UnquantizedLinearMethod, plain), (CompressedTensorsLinearMethod, quantised)):
    kind.process_weights_after_loading = wrongly(kind.process_weights_after_loading, handles)


class PackingExtension(WorkerExtension):
    """weightsync's, and what a test asks the workers."""

    def pack_wrongly(self, rank, layer):
        """Have a rank pack a layer wrongly when it is packed next."""
        if self.rank == rank:
            ASKED.add(layer)

    def not_packed(self):
        """What was to be packed wrongly, and has not been packed."""
        return sorted(ASKED)
