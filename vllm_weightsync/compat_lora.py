"""As `compat`: how vLLM holds LoRA adapters, in a worker and in the API server.

A pushed adapter has one number (``lora_int_id``) from version to version and is replaced in place, during the pause:
requests in flight go on with the new one, as the pause mode says, and one slot (``max_loras``, 1 by default) is enough.
With a number of its own for each version, requests of the one would wait there until those of the other have ended.
Before the pause an adapter is laid out as in a slot, so that the pause only copies it there.

Each version has a path of its own, which vLLM enters into the hashes of the prefix cache. That path is no folder: if
vLLM has dropped an adapter, for others that were used since or because the weights were loaded anew, it gets it back
from memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from vllm_weightsync import compat
from weightsync.engine.private_names import Names
from weightsync.errors import ManifestMismatch, UnsupportedOption
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import AdapterId, LoraSpec
from weightsync.tensors import native_copy
from weightsync.tensors.layout import listed

#: Names used for adapters, in a worker and in the API server.
NAMES: Final[Names] = {
    "vllm.lora.layers.base_linear": ("BaseLinearLayerWithLoRA.set_lora", "BaseLinearLayerWithLoRA.reset_lora"),
    "vllm.lora.lora_model": ("LoRAModel.from_lora_tensors",),
    "vllm.lora.model_manager": (
        "LRUCacheLoRAModelManager.activate_adapter",
        "LRUCacheLoRAModelManager.add_adapter",
        "LRUCacheLoRAModelManager.capacity",
        "LRUCacheLoRAModelManager.get_adapter",
        "LRUCacheLoRAModelManager.list_adapters",
        "LRUCacheLoRAModelManager.remove_adapter",
        "LRUCacheLoRAModelManager.remove_oldest_adapter",
        "LRUCacheLoRAModelManager.deactivate_adapter",
        "LRUCacheLoRAModelManager._create_merged_loras_inplace",
        "LRUCacheLoRAModelManager._get_lora_layer_weights",
    ),
    "vllm.lora.peft_helper": ("PEFTHelper.from_dict", "PEFTHelper.validate_legal"),
    "vllm.lora.request": ("LoRARequest.load_inplace", "LoRARequest.lora_int_id", "LoRARequest.lora_path"),
    "vllm.lora.utils": ("parse_fine_tuned_lora_name",),
    "vllm.lora.worker_manager": ("LRUCacheWorkerLoRAManager._load_adapter",),
    "vllm.entrypoints.openai.models.serving": ("OpenAIServingModels.is_base_model",),
}

#: What a worker's loader of adapters has.
_LOADER: Final = (
    *("lora_config", "vocab_size", "max_position_embeddings"),
    *("_adapter_manager.modules", "_adapter_manager.packed_modules", "_adapter_manager.packed_modules_mapping"),
    *("_adapter_manager.supported_lora_modules", "_adapter_manager.lora_index_to_id"),
    *("_adapter_manager._registered_adapters", "_adapter_manager._active_adapters"),
)
#: How a map of names is asked for its renames alone, in this version of vLLM or in earlier ones.
_REDUCED: Final = ("get_rename_mapper", "get_unstacked_mapper")
#: What PEFT adds to the name of fused experts, for each of their two parameters.
_EXPERTS: Final = ("", ".base_layer")
#: vLLM's class of linear layers with LoRA, whose slots are `lora_a_stacked` and `lora_b_stacked` alone.
_LINEAR: Final = "BaseLinearLayerWithLoRA"
#: Where a worker keeps the pushed adapters, by number.
_HELD: Final = "_weightsync_held"


_Image = list[torch.Tensor]


class _Made(NamedTuple):
    """An adapter as vLLM registers it, and what of it is only to be copied into a slot, by layer."""

    model: Any
    images: dict[str, _Image]


class VllmLoraHooks:
    """See `weightsync.engine.adapter.LoraHooks`. Raises `UnsupportedOption` if vLLM was started without LoRA."""

    def __init__(self, worker: Any):
        if (found := getattr(worker.model_runner, "lora_manager", None)) is None:
            raise UnsupportedOption("vLLM was started without --enable-lora")
        self._loader: Any = found
        self._manager: Any = found._adapter_manager
        if reason := compat.VLLM.check_object(found, _LOADER, NAMES):
            raise UnsupportedOption(reason)
        self._held = _held(found)

    def check(self, adapter: LoraSpec, manifest: Sequence[TensorSpec]) -> tuple[str, ...]:
        """See `LoraHooks`: by vLLM's own checks of an adapter's configuration, and by the names of its layers."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        try:
            helper = self._helper(adapter)
            helper.validate_legal(self._loader.lora_config)
        except ValueError as error:
            raise ManifestMismatch(f"the adapter {adapter.name!r} cannot be served: {error}") from error
        if (adapter.ranks or adapter.alphas) and not hasattr(helper, "rank_pattern"):
            raise ManifestMismatch(f"the adapter {adapter.name!r} has several ranks or alphas, and this vLLM takes one")
        layers, kinds = self._layers()
        unknown, elsewhere = [], []
        for spec in manifest:
            try:
                layer, _ = parse_fine_tuned_lora_name(spec.name, self._mapper())
            except ValueError as error:
                raise ManifestMismatch(f"{spec.name} is no tensor of a LoRA adapter that vLLM knows") from error
            if layer.rpartition(".")[2] not in kinds:
                unknown.append(spec.name)
            elif layer not in layers:
                elsewhere.append(spec.name)
        if unknown:
            raise ManifestMismatch(
                f"the adapter {adapter.name!r} has tensors for layers without LoRA in this engine: {listed(unknown)}; "
                f"it has it for {', '.join(sorted(kinds))}"
            )
        return tuple(elsewhere)

    def make(self, adapter: LoraSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """See `LoraHooks`: what vLLM makes of an adapter's folder, with the parts of fused layers put together."""
        from vllm.lora.lora_model import LoRAModel

        dtype = self._loader.lora_config.lora_dtype
        # Copied here: vLLM would keep views of the stage where the dtype is the same, and scales them in place.
        copies = {name: tensor.to(dtype, copy=True) for name, tensor in tensors}
        model: Any = self._manager.model
        made = LoRAModel.from_lora_tensors(
            adapter.number,
            copies,
            self._helper(adapter),
            device="cpu",
            dtype=dtype,
            model_vocab_size=self._loader.vocab_size,
            weights_mapper=self._mapper(),
            skip_prefixes=getattr(model, "lora_skip_prefixes", None),
        )
        if lacking := sorted(
            name for name, layer in made.loras.items() if layer.lora_a is None or layer.lora_b is None
        ):
            raise ManifestMismatch(
                f"the adapter {adapter.name!r} has only one of lora_A and lora_B for {listed(lacking)}"
            )
        self._manager._create_merged_loras_inplace(made)
        return _Made(made, self._images(made))

    @torch.inference_mode()
    def _images(self, model: Any) -> dict[str, _Image]:
        """What vLLM writes into a slot for linear layers, by their names; made by its own code, in other memory."""
        images: dict[str, _Image] = {}
        for name, layer in self._manager.modules.items():
            found = self._manager._get_lora_layer_weights(model, name)
            if found is not None and any(kind.__name__ == _LINEAR for kind in type(layer).__mro__):
                other = copy.copy(layer)
                other.lora_a_stacked = tuple(torch.zeros_like(held[:1]) for held in layer.lora_a_stacked)
                other.lora_b_stacked = tuple(torch.zeros_like(held[:1]) for held in layer.lora_b_stacked)
                other.set_lora(0, found.lora_a, found.lora_b)
                images[name] = _slot(other, 0)
        return images

    def served(self, number: AdapterId) -> object | None:
        """See `LoraHooks`."""
        known: dict[AdapterId, object] = {**self._manager.list_adapters(), **self._held}
        return known.get(number)

    def serve(self, number: AdapterId, made: object | None) -> None:
        """See `LoraHooks`: in the pause, into the slot that the adapter before has, if it has one."""
        manager, before = self._manager, self.served(number)
        model: Any = made.model if isinstance(made, _Made) else made
        active = before is not None and number in manager._active_adapters
        # A classification head of its own, which only folders have, is no matrix that `_write` would reset.
        if isinstance(made, _Made) and active and not getattr(before, "modules_to_save", None):
            self._write(number, before, made)
        else:
            manager.remove_adapter(number)
            self._held.pop(number, None)
            if model is None:
                return
            _add(manager, model)
            manager.activate_adapter(number)
        self._held[number] = model

    def _write(self, number: AdapterId, before: Any, made: _Made) -> None:
        """Write an adapter over another one in its slot; what neither has weights for is zero there already."""
        manager, targets, sources = self._manager, list[torch.Tensor](), list[torch.Tensor]()
        index = manager.lora_index_to_id.index(number)
        manager.deactivate_adapter(number)  # if this fails, `serve` writes all of a slot
        for name, layer in manager.modules.items():
            old, new = (manager._get_lora_layer_weights(one, name) for one in (before, made.model))
            if name in made.images:
                targets += _slot(layer, index)
                sources += made.images[name]
            elif new is not None:
                layer.set_lora(index, new.lora_a, new.lora_b)
            elif old is not None:
                layer.reset_lora(index)
        native_copy.copy_each(targets, sources)
        manager._registered_adapters[number] = made.model
        manager.lora_index_to_id[index] = number
        manager._active_adapters[number] = None

    def _helper(self, adapter: LoraSpec) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        return PEFTHelper.from_dict(
            {
                "r": adapter.rank,
                "lora_alpha": adapter.alpha,
                "target_modules": [],
                "use_rslora": adapter.rslora,
                "rank_pattern": dict(adapter.ranks),
                "alpha_pattern": dict(adapter.alphas),
                "vllm_max_position_embeddings": self._loader.max_position_embeddings,
            }
        )

    def _mapper(self) -> Any:
        """vLLM's map of the checkpoint's names to its own, without what it stacks; None if they are the same."""
        found = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        reduced = (getattr(found, name, None) for name in _REDUCED)
        return next((reduce() for reduce in reduced if reduce is not None), found)

    def _layers(self) -> tuple[set[str], set[str]]:
        """The layers that can have LoRA in this rank, parts of fused ones by their own names; and the last names of
        those that any rank can have."""
        fused = self._manager.packed_modules
        layers = {part for whole in self._manager.modules for part in (fused.get(whole) or (whole,))}
        layers |= {name + part for name in self._manager.modules if name.endswith(".experts") for part in _EXPERTS}
        kinds = {name.rpartition(".")[2] for name in layers}
        for name in self._manager.supported_lora_modules:
            kinds.update(self._manager.packed_modules_mapping.get(name) or (name,))
        return layers, kinds


def _slot(layer: Any, index: int) -> _Image:
    return [held[index] for held in (*layer.lora_a_stacked, *layer.lora_b_stacked)]


def _add(manager: Any, made: Any) -> None:
    if len(manager) + 1 > manager.capacity:
        manager.remove_oldest_adapter()
    manager.add_adapter(made)


def _held(loader: Any) -> dict[AdapterId, Any]:
    """The pushed adapters of a worker, by number, to which vLLM comes back instead of a folder."""
    held: dict[AdapterId, Any] | None = loader.__dict__.get(_HELD)
    if held is None:
        held, load = loader.__dict__.setdefault(_HELD, {}), loader._load_adapter

        def load_or_take(request: Any) -> Any:
            if request.load_inplace:  # a user replaces it by a folder's
                held.pop(request.lora_int_id, None)
            found = held.get(request.lora_int_id)
            return load(request) if found is None else found

        loader._load_adapter = load_or_take
    return held


@contextmanager
def kept(worker: Any) -> Iterator[None]:
    """Around a reload of the weights, which drops all adapters: they are as they were afterwards."""
    loader: Any = getattr(worker.model_runner, "lora_manager", None)
    before = {} if loader is None else dict(loader._adapter_manager.list_adapters())
    try:
        yield
    finally:
        for number, adapter in before.items():
            if number not in loader._adapter_manager.list_adapters():
                _add(loader._adapter_manager, adapter)


class VllmLora:
    """See `weightsync.engine.engine_front_end.ServedLora`; ``models`` is vLLM's list of what it serves."""

    def __init__(self, models: Any):
        self._models = models
        #: By name: the number, and what was served of it last, with its path.
        self._numbers: dict[str, int] = {}
        self._served: dict[str, tuple[str, str]] = {}

    @property
    def versions(self) -> dict[str, str]:
        """See `ServedLora`; without those that a user has unloaded or replaced."""
        known = self._models.lora_requests
        return {
            name: version
            for name, (version, path) in self._served.items()
            if name in known and known[name].lora_path == path
        }

    def number(self, name: str) -> int:
        """See `ServedLora`; that of an adapter of this name which vLLM has already."""
        if not name or self._models.is_base_model(name):
            raise UnsupportedOption(f"lora={name!r}: this vLLM serves its base model by this name; choose another")
        if (known := self._models.lora_requests.get(name)) is not None:
            self._numbers[name] = int(known.lora_int_id)
        elif name not in self._numbers:
            self._numbers[name] = int(self._models.lora_id_counter.inc(1))
        return self._numbers[name]

    def serve(self, name: str, version: str, push: str) -> None:
        """See `ServedLora`."""
        from vllm.lora.request import LoRARequest

        path = f"weightsync:{name}:{version}:{push}"
        self._models.lora_requests[name] = LoRARequest(name, self._numbers[name], path)
        self._served[name] = version, path

    def withdraw(self, name: str) -> None:
        """Serve this adapter no more: its ranks may hold different versions."""
        self._models.lora_requests.pop(name, None)
        self._served.pop(name, None)


def served(engine_client: Any, models: Any, *, several_servers: bool) -> VllmLora | str:
    """The adapters that a server serves; or why none can be pushed into it."""
    if engine_client.vllm_config.lora_config is None:
        return "start vLLM with --enable-lora, and with --max-lora-rank of at least the adapter's rank"
    if several_servers:
        return "its API servers (--api-server-count) do not share their lists of adapters; start one"
    return compat.VLLM.check_object(models, ("lora_requests", "lora_id_counter"), NAMES) or VllmLora(models)
