"""As `compat`: what vLLM does to the weights of a model in a worker, and a second instance of the model."""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch

from vllm_weightsync import compat, compat_lora
from weightsync.engine import fresh_model
from weightsync.engine.private_names import Names
from weightsync.tensors.layout import digest_of

#: Names used in a worker for ``verify="deep"``.
DEEP: Final[Names] = {
    "vllm._custom_ops": ("onednn_scaled_mm",),
    "vllm.config": ("LoadConfig", "set_current_vllm_config"),
    "vllm.model_executor.model_loader.default_loader": (
        "DefaultModelLoader.get_all_weights",
        "DefaultModelLoader.load_model",
    ),
    "vllm.model_executor.layers.rotary_embedding": ("_ROPE_DICT",),
    "vllm.model_executor.offloader.base": ("NoopOffloader", "get_offloader", "set_offloader"),
}


def reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Load a whole checkpoint through vLLM's own layer-wise reload, which also repacks packed layers."""
    with (
        compat_lora.kept(worker),
        _packed_again(compat.model(worker), packs=compat.worker_device(worker).type == "cpu"),
    ):
        worker.reload_weights(weights_iterator=iter(weights), is_checkpoint_format=True)


def reload_model(model: Any, config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """As `reload`, for a model that no worker serves; ``config`` is vLLM's model configuration."""
    with _packed_again(model, packs=next(model.parameters()).device.type == "cpu"):
        reload_layers(model, config, weights)


def reload_layers(model: Any, config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """vLLM's layer-wise reload of a model."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    model.load_weights(iter(weights))
    layerwise.finalize_layerwise_reload(model, config)


@contextmanager
def _packed_again(model: torch.nn.Module, *, packs: bool) -> Iterator[None]:
    """Around a reload: what it forgets to pack is packed, and what it collected is discarded if it fails."""
    kernels = _take_moe_kernels(model) if packs else []
    try:
        with _scales_kept() if packs else nullcontext():
            yield
    except BaseException:
        _abandon_reload(model)
        raise
    for method, kernel in kernels:
        if method.moe_kernel is None:  # nothing was loaded into this layer
            method.moe_kernel = kernel
    retie_packed(model)


@contextmanager
def _scales_kept() -> Iterator[None]:
    """While layers are reloaded: a parameter gets the memory of the scales that were packed, instead of a copy.

    An int8 weight that vLLM has packed for a CPU refers to that memory, which its reload frees.
    """
    from vllm import _custom_ops
    from vllm.model_executor.model_loader.reload import layerwise

    pack, restore = _custom_ops.create_onednn_scaled_mm, layerwise._copy_and_restore_kernel_tensors
    packed: list[torch.Tensor] = []

    def packing(weight: torch.Tensor, scales: torch.Tensor, *more: Any) -> Any:
        packed.append(scales)
        return pack(weight, scales, *more)

    def restoring(layer: torch.nn.Module, info: Any) -> None:
        places = {scales.data_ptr() for scales in packed}
        own = {name: tensor.data for name, tensor in layer.named_parameters(recurse=False)}
        restore(layer, info)
        for name, parameter in layer.named_parameters(recurse=False):
            if name in own and own[name].data_ptr() in places:
                parameter.data = own[name]
        packed.clear()

    _custom_ops.create_onednn_scaled_mm, layerwise._copy_and_restore_kernel_tensors = packing, restoring
    try:
        yield
    finally:
        _custom_ops.create_onednn_scaled_mm, layerwise._copy_and_restore_kernel_tensors = pack, restore


def _abandon_reload(model: torch.nn.Module) -> None:
    """After a failed reload, discard what it had collected for each layer.

    vLLM does not, and the next reload would complete a layer from the weights of both.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def _take_moe_kernels(model: torch.nn.Module) -> list[tuple[Any, Any]]:
    """Make vLLM pack the experts again when they are reloaded; return the kernels, with the objects they belong to.

    On a CPU it packs them only when it first builds a layer's kernel. A reload would leave them unpacked, under a
    kernel that reads them packed.
    """
    found = []
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and (kernel := getattr(method, "moe_kernel", None)) is not None:
            found.append((method, kernel))
            method.moe_kernel = None
    return found


def retie_packed(model: torch.nn.Module) -> None:
    """Give each tied layer the packed weight of the layer that was loaded.

    vLLM's reload loads a tied weight into one of its layers only. On a CPU each layer has its own packed copy, and an
    output layer tied to the embedding would keep computing with the old one.
    """
    loaded: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.numel() == 0 or not hasattr(module, "cpu_linear"):
            continue
        first = loaded.setdefault(weight.data_ptr(), module)
        if first is not module and first.weight.shape == weight.shape:
            module.cpu_linear = first.cpu_linear


def digest(worker: Any) -> str:
    """The hash, in hex, of the weights that the worker computes with."""
    return digest_of(_weights(worker.model_runner.get_model()))


def differing(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the weights that this rank would hold otherwise if it had been started on a checkpoint of ``weights``.

    Builds a second instance of the model for the time of the call, which takes the memory of both.
    """
    config = fresh_config(worker.vllm_config)
    make = functools.partial(fresh, worker, weights, config)
    return fresh_model.differing(compat.model(worker), make, _weights, compat.worker_device(worker), discard)


def fresh(worker: Any, weights: Iterable[tuple[str, torch.Tensor]], config: Any) -> torch.nn.Module:
    """Build the model as vLLM does when it starts, from these weights instead of files, with a `fresh_config`.

    Call `discard` with it in the end.
    """
    from vllm.config import LoadConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    before = set(_compiler_hooks())
    try:
        with shared().apart(compat.worker_device(worker)), set_current_vllm_config(config):
            loader = DefaultModelLoader(LoadConfig(device=config.load_config.device))
            loader.get_all_weights = lambda model_config, model: iter(weights)
            loader.counter_before_loading_weights = time.perf_counter()  # only logged
            model: torch.nn.Module = loader.load_model(
                vllm_config=config, model_config=worker.model_config, prefix=compat.prefix(worker)
            )
    except BaseException:
        for key in _compiler_hooks().keys() - before:
            del _compiler_hooks()[key]
        raise
    return model


def _compiler_hooks() -> Any:
    """torch's table of what it calls when it has compiled a function: every model that is compiled enters itself, and
    would be kept for ever."""
    from torch._dynamo import convert_frame

    return getattr(convert_frame, "_bytecode_hooks", {})


def discard(model: torch.nn.Module) -> None:
    """Forget a model that `fresh` has made."""
    from vllm.model_executor.model_loader.reload import layerwise

    # What vLLM notes there of a layer refers to itself and to the layer, so that both would be kept for ever.
    noted = getattr(layerwise, "LAYERWISE_INFO", {})
    for module in model.modules():
        getattr(noted.pop(module, None), "__dict__", {}).clear()
        if (handle := module.__dict__.get("_bytecode_hook_handle")) is not None:
            handle.remove()


def fresh_config(live: Any) -> Any:
    """A copy of the served model's configuration, with new registries, in which layers enter their names when built."""
    config = copy.copy(live)
    config.compilation_config = copy.copy(live.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.compilation_config.enabled_custom_ops = Counter()
    config.compilation_config.disabled_custom_ops = Counter()
    config.quant_config = copy.deepcopy(live.quant_config)
    return config


def shared() -> fresh_model.Shared:
    """What models of a worker share."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.offloader.base import NoopOffloader, get_offloader, set_offloader

    return fresh_model.Shared(_ROPE_DICT, get_offloader, set_offloader, NoopOffloader)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the model by name, and every packed copy in unpacked form."""
    #: By the name of each module, that which it has without adapters.
    without, around = {"": ""}, set[str]()
    for own, module in model.named_modules():
        outer, _, last = own.rpartition(".")
        if own:
            inside = last == "base_layer" and outer in around
            prefix = without[own] = without[outer] if inside else f"{without[outer]}.{last}".lstrip(".")
        else:
            prefix = ""
        if has_adapters(module):
            around.add(own)
            continue  # what it holds itself is of adapters
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield f"{prefix}.{name}", tensor
        if packs(module):
            # The CPU back end packs linear weights into an opaque handle. Applied to the identity matrix it returns
            # the exact weight: every sum has one term that is not zero.
            yield f"{prefix}.cpu_linear", _applied_to_identity(module)
        if hasattr(kernel := getattr(getattr(module, "scheme", None), "kernel", None), "dnnl_handler"):
            yield f"{prefix}.dnnl_handler", _int8_applied_to_identity(kernel, module)


def packs(module: object) -> bool:
    """Whether a layer on a CPU computes with a packed copy of its weight, to which its function refers."""
    return bool(getattr(getattr(module, "cpu_linear", None), "__closure__", None))


def has_adapters(module: object) -> bool:
    """Whether vLLM has put this module, for LoRA adapters, around one of the model's, its ``base_layer``."""
    return any(kind.__name__ == "BaseLayerWithLoRA" for kind in type(module).__mro__)


@torch.inference_mode()
def _applied_to_identity(module: Any) -> torch.Tensor:
    sizes = (getattr(module, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    eye = torch.eye(next(int(size) for size in sizes if size), dtype=module.weight.dtype)
    computed: torch.Tensor = module.cpu_linear(eye, module.weight, None)
    return computed


@torch.inference_mode()
def _int8_applied_to_identity(kernel: Any, module: Any) -> torch.Tensor:
    """Weights in int8 that are packed with their scales, and multiplied with these."""
    from vllm import _custom_ops

    handler, (_, _, static, _, adjustment) = kernel.dnnl_handler, kernel._get_layer_params(module)
    eye = torch.eye(handler.k, dtype=torch.int8)
    scales = torch.ones(handler.k if static is None else 1, 1)
    zero_points = None if kernel.config.input_symmetric else torch.zeros_like(scales, dtype=torch.int32)
    found = torch.empty(handler.k, handler.n, dtype=module.params_dtype)
    _custom_ops.onednn_scaled_mm(handler, eye, found, scales, zero_points, adjustment, None)
    return found
