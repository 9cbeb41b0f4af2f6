"""As `compat`: how a worker makes a second set of its weights, and loads it again, as `adapter.StandbyHooks`.

vLLM builds a model with a configuration that is set for the whole process meanwhile, and so are the tables of rotary
embeddings and the offloader; all are kept apart between slices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

import torch

from vllm_weightsync import compat, compat_lora, compat_models
from vllm_weightsync.rank import ASLEEP
from weightsync.engine import fresh_model
from weightsync.engine.adapter import Movable, StandbyHooks, sleeping_needs_room
from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.slices import TORCH, Setting
from weightsync.engine.private_names import Names

#: Names used in a worker for its standby.
NAMES: Final[Names] = {
    **compat_models.DEEP,
    "vllm.config.vllm": ("_current_vllm_config", "_current_prefix", "get_cached_compilation_config"),
    "vllm.model_executor.model_loader.reload.layerwise": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
        "get_layerwise_info",
    ),
}

#: Attributes that are no weights: the KV cache, what loads a tensor, which vLLM sets anew for every reload, the manager
#: of adapters, how long quantising took, and what compilation notes.
_IGNORED: Final = frozenset(
    (
        *("kv_cache", "weight_loader", "lora_manager", "online_quantization_time"),
        *("compiled", "first_compile", "aot_compiled_fn", "was_aot_compile_fn_loaded_from_disk"),
        *("_bytecode_hook_handle", "_compiled_callable", "_compiled_bytecode", "_forward_method"),
    )
)
#: Packages of objects that hold no weights.
_APART: Final = ("vllm.config.", "transformers.", "torch.distributed.", "threading", "logging", "vllm.distributed.")


def hooks(worker: Any) -> StandbyHooks | str:
    """How a worker's standby is made and loaded; or why it has none."""
    if (device := compat.worker_device(worker)).type not in ("cpu", "cuda"):
        return f"a standby is not supported on {device.type}"
    if lacking := compat.VLLM.check(NAMES) or _lacks(worker):
        return lacking
    live = compat.model(worker)
    config = compat_models.fresh_config(worker.vllm_config)

    def make(weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
        compat_models.retie_packed(live)
        model = compat_models.fresh(worker, weights, config)
        compat_models.retie_packed(model)
        return model

    def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config

        compat_models.retie_packed(live)  # vLLM's own reload, if someone has called that, leaves layers apart
        with set_current_vllm_config(config):
            compat_models.reload_model(model, worker.model_config, weights)

    def discard(model: torch.nn.Module) -> None:
        compat_models.discard(model)
        fresh_model.take_apart(model, live)

    served = functools.partial(drop_computed, worker)
    rules, stays = _rules(), addresses_stay(worker)
    settings = _settings(device)
    return StandbyHooks(live, _nbytes(live), make, load, served, discard, _ranks(worker), rules, settings, stays)


def movable(worker: Any) -> Movable | str:
    """What is known of a model whose weights may lie elsewhere after each push; or why they must stay."""
    if addresses_stay(worker):
        return "weights stay where they are on an accelerator"
    return Movable(_ranks(worker), _rules(), functools.partial(_lacks, worker))


def _lacks(worker: Any) -> str:
    return sleeping_needs_room(vars(worker).get(ASLEEP, ()))


def addresses_stay(worker: Any) -> bool:
    """Whether weights must stay where they are: CUDA graphs have their addresses, and vLLM's sleep mode their pool."""
    return compat.worker_device(worker).type != "cpu"


def drop_computed(worker: Any) -> None:
    """Drop what the worker computed with other weights than it now has. Adapters stay."""
    with compat_lora.kept(worker):
        for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
            if (reset := getattr(worker.model_runner, name, None)) is not None:
                reset()


def _rules() -> Rules:
    return Rules(_IGNORED, _is_apart, _without_adapters)


def _ranks(worker: Any) -> int:
    """How many ranks, at most, share this one's memory."""
    if compat.worker_device(worker).type != "cpu":
        return 1
    parallel = worker.vllm_config.parallel_config
    return int(parallel.world_size * parallel.data_parallel_size_local)


def _nbytes(model: torch.nn.Module) -> int:
    """Bytes of a model's weights before they are packed, which take as much afterwards."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return sum(
        tensor.nbytes
        for layer in model.modules()
        for tensors in get_layerwise_info(layer).restore_metadata
        for tensor in tensors.values()
    )


def _without_adapters(found: object) -> object:
    """The layer itself, where vLLM has put one for LoRA adapters around it that holds none of the layer's tensors."""
    if not isinstance(found, torch.nn.Module) or not compat_models.has_adapters(found):
        return found
    layer = found._modules["base_layer"]
    own = (*found._parameters.values(), *found._buffers.values(), *vars(found).values())
    held = {tensor.data_ptr() for tensor in own if isinstance(tensor, torch.Tensor)}
    return found if layer is None or any(weight.data_ptr() in held for weight in layer.parameters()) else layer


def _is_apart(found: object) -> bool:
    return type(found).__module__.startswith(_APART)


def _settings(device: torch.device) -> tuple[Setting, ...]:
    from vllm.config import vllm as config

    def current() -> tuple[Any, Any]:
        return config._current_vllm_config, config._current_prefix

    def set_current(found: tuple[Any, Any]) -> None:
        config._current_vllm_config, config._current_prefix = found
        config.get_cached_compilation_config.cache_clear()

    # A fresh model is made with a random state of its own, and the engine draws from the device's between slices.
    drawn = Setting(lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
    more = (drawn,) if device.type == "cuda" else ()
    return (*TORCH, *more, Setting(current, set_current), *compat_models.shared().settings())
