"""As `compat`: how SGLang holds LoRA adapters, in a scheduler and in the process that serves HTTP.

A pushed adapter has one ``lora_id`` from version to version and is replaced in its place, during the pause: requests in
flight go on with the new one, as the pause mode says. Before the pause it is laid out as in a slot of SGLang's pool, by
SGLang's own code and in other memory, so that nothing can fit worse later, and the pause only copies it there. SGLang
keeps the adapter itself in memory, and comes back to that when others have taken its slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from sglang_weightsync import compat, compat_config
from weightsync.engine.private_names import Names
from weightsync.errors import ManifestMismatch, PushTimeout, UnsupportedOption
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import AdapterId, LoraSpec
from weightsync.tensors import native_copy
from weightsync.tensors.layout import listed

#: Names used for adapters in a scheduler.
NAMES: Final[Names] = {
    "sglang.srt.layers.utils": ("get_layer_id",),
    "sglang.srt.lora.lora": ("LoRAAdapter.initialize_weights_from_tensors",),
    "sglang.srt.lora.lora_config": ("LoRAConfig.from_dict",),
    "sglang.srt.lora.lora_manager": ("LoRAManager.unload_lora_adapter",),
    "sglang.srt.lora.lora_registry": ("LoRARef",),
    "sglang.srt.lora.mem_pool": ("LoRAMemoryPool.load_lora_weight_to_buffer",),
    "sglang.srt.lora.utils": ("get_normalized_target_modules", "get_target_module_name"),
}
#: Names used for adapters in the process that serves HTTP.
SERVER: Final[Names] = {
    "sglang.srt.entrypoints.openai.serving_base": ("OpenAIServingBase._parse_model_parameter",),
    "sglang.srt.lora.lora_registry": ("LoRARef", "LoRARegistry._register_adapter", "LoRARegistry.get_all_adapters"),
}
#: How a request's ``model`` is read.
_MODEL: Final = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._parse_model_parameter"

#: Buffers of a pool: some with a list of tensors by name, one for each layer, and some with one tensor by name.
_LISTS: Final = ("A_buffer", "B_buffer")
_SINGLES: Final = (
    *("embedding_A_buffer", "embedding_B_buffer", "lm_head_A_buffer", "lm_head_B_buffer", "new_embeddings_buffer"),
)
#: What a scheduler's manager of adapters has.
_MANAGER: Final = (
    *("base_hf_config", "base_model", "configs", "dtype", "embed_tokens_module", "lm_head_module", "load_config"),
    *("lora_backend", "lora_modules", "lora_refs", "loras"),
    *(f"memory_pool.{name}" for name in (*_LISTS, *_SINGLES, "max_lora_rank", "target_modules", "uid_to_buffer_id")),
)
_TOKENIZER: Final = (
    *("lora_ref_cache", "lora_registry._counters", "lora_registry._registry", "lora_update_lock"),
    "served_model_name",
)
#: What PEFT puts before the name of a layer, and after it.
_PREFIX: Final = "base_model.model."
_SIDES: Final = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")
#: Layers that SGLang fuses: those of their parts without which it leaves out the others, or fails.
_FUSED: Final = {"qkv_proj": ("q_proj", "v_proj"), "gate_up_proj": ("gate_proj",)}
#: Begins the path of a pushed adapter, which is no folder.
_PUSHED: Final = "weightsync:"


# --- in a scheduler process -------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """An adapter as SGLang registers it; ``image`` is what of it is copied into a slot, if that is made already."""

    adapter: Any
    ref: Any
    image: list[torch.Tensor] | None


class SglangLoraHooks:
    """See `weightsync.engine.adapter.LoraHooks`. Raises `UnsupportedOption` if SGLang was started without LoRA."""

    def __init__(self, scheduler: Any):
        if (found := getattr(scheduler.tp_worker.model_runner, "lora_manager", None)) is None:
            raise UnsupportedOption("SGLang was started without --enable-lora")
        if reason := compat.SGLANG.check_object(found, _MANAGER, NAMES):
            raise UnsupportedOption(reason)
        self._manager: Any = found
        self._pool: Any = found.memory_pool

    def check(self, adapter: LoraSpec, manifest: Sequence[TensorSpec]) -> tuple[str, ...]:
        """See `LoraHooks`: by the rank and the targets of SGLang's pool, and by the layers of this rank."""
        from sglang.srt.layers.utils import get_layer_id

        said = f"the adapter {adapter.name!r} cannot be served"
        if adapter.ranks or adapter.alphas:
            raise ManifestMismatch(f"{said}: it has several ranks or alphas, and SGLang takes one")
        if adapter.rank > (most := self._pool.max_lora_rank):
            raise ManifestMismatch(f"{said}: LoRA rank {adapter.rank} is greater than max_lora_rank {most}")
        here = self._layers()
        unknown, elsewhere = [], []
        parts: dict[tuple[str, str], set[str]] = {}
        for spec in manifest:
            parent, _, part = _layer(spec.name).rpartition(".")
            kind = _kind(part)
            if kind not in self._pool.target_modules:
                unknown.append(spec.name)
            elif kind not in here.get(get_layer_id(spec.name), ()):
                elsewhere.append(spec.name)
            parts.setdefault((parent, kind), set()).add(part)
        if unknown:
            raise ManifestMismatch(
                f"the adapter {adapter.name!r} has tensors for layers without LoRA in this engine: {listed(unknown)}; "
                f"it has it for {', '.join(sorted(self._pool.target_modules))}"
            )
        for (parent, kind), found in parts.items():
            needed = _FUSED.get(kind, ())
            if kind not in found and (lacking := [part for part in needed if part not in found]):
                raise ManifestMismatch(
                    f"{said}: SGLang takes {', '.join(sorted(found))} of {parent.removeprefix(_PREFIX)} only with "
                    f"{', '.join(lacking)}"
                )
        return tuple(elsewhere)

    def _layers(self) -> dict[int | None, set[str]]:
        """The kinds of layers with LoRA in this rank, by the numbers of decoder layers; None for those outside."""
        from sglang.srt.lora.utils import get_target_module_name

        manager, targets = self._manager, self._pool.target_modules
        found: dict[int | None, set[str]] = {
            number: {get_target_module_name(name, targets) for name in modules}
            for number, modules in enumerate(manager.lora_modules)
        }
        outside = {"embed_tokens": manager.embed_tokens_module, "lm_head": manager.lm_head_module}
        found[None] = {name for name, module in outside.items() if module is not None}
        return found

    def make(self, adapter: LoraSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """See `LoraHooks`: what SGLang makes of an adapter's folder, and the slot that it would fill with it."""
        from sglang.srt.lora.lora import LoRAAdapter
        from sglang.srt.lora.lora_config import LoRAConfig
        from sglang.srt.lora.lora_registry import LoRARef

        manager, number = self._manager, str(adapter.number)
        # Copied here: SGLang would keep views of the stage.
        copies = {name: tensor.to("cpu", manager.dtype, copy=True) for name, tensor in tensors}
        config = LoRAConfig.from_dict(
            {
                "peft_type": "LORA",
                "r": adapter.rank,
                "lora_alpha": adapter.alpha,
                "target_modules": sorted({_layer(name).rpartition(".")[2] for name in copies}),
            }
        )
        made = LoRAAdapter(
            number,
            config,
            manager.base_hf_config,
            manager.load_config,
            manager.lora_backend,
            base_model=manager.base_model,
        )
        made.initialize_weights_from_tensors(copies)
        made.scaling = adapter.scaling
        before = manager.lora_refs.get(number)
        pinned = before is not None and before.pinned
        ref = LoRARef(lora_id=number, lora_name=adapter.name, lora_path=_PUSHED + adapter.name, pinned=pinned)
        return _Made(made, ref, self._image(number, made))

    @torch.inference_mode()
    def _image(self, number: str, adapter: Any) -> list[torch.Tensor]:
        """What SGLang writes into a slot for an adapter, in the order of `_slot`; made by its own code."""
        manager, apart = self._manager, copy.copy(self._pool)
        for name in _LISTS:
            held = getattr(self._pool, name)
            setattr(apart, name, {kind: [_like_one_slot(one) for one in layers] for kind, layers in held.items()})
        for name in _SINGLES:
            held = getattr(self._pool, name)
            setattr(apart, name, {kind: _like_one_slot(one) for kind, one in held.items()})
        apart.load_lora_weight_to_buffer(
            number, 0, adapter, manager.lora_modules, manager.embed_tokens_module, manager.lm_head_module
        )
        return list(_slot(apart, 0))

    def served(self, number: AdapterId) -> object | None:
        """See `LoraHooks`."""
        adapter = self._manager.loras.get(number)
        return None if adapter is None else _Made(adapter, self._manager.lora_refs[number], None)

    @torch.inference_mode()
    def serve(self, number: AdapterId, made: object | None) -> None:
        """See `LoraHooks`: in the pause, into the slot that the adapter before has, if it has one."""
        from sglang.srt.lora.lora_registry import LoRARef

        manager, name = self._manager, str(number)
        if made is None:
            done = manager.unload_lora_adapter(LoRARef(lora_id=name))
            if not done.success:
                raise RuntimeError(done.error_message)
            return
        assert isinstance(made, _Made), "made by `make`, or served before"
        if (slot := self._pool.uid_to_buffer_id.get(name)) is not None:
            image = self._image(name, made.adapter) if made.image is None else made.image
            native_copy.copy_each(list(_slot(self._pool, slot)), image)
            if hasattr(manager, "_notify_lora_slots_updated"):
                manager._notify_lora_slots_updated({slot})
        manager.loras[name], manager.configs[name] = made.adapter, made.adapter.config
        manager.lora_refs[name] = made.ref


def _layer(name: str) -> str:
    """The layer to which a tensor of an adapter belongs."""
    for side in _SIDES:
        if name.endswith(side):
            return name[: -len(side)]
    raise ManifestMismatch(f"{name} is no tensor of a LoRA adapter that SGLang knows")


def _kind(part: str) -> str:
    """What SGLang calls the layers of this last name, parts of fused layers by the whole."""
    from sglang.srt.lora.utils import get_normalized_target_modules

    (kind,) = get_normalized_target_modules([part])
    return str(kind)


def _like_one_slot(held: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(held[:1])


def _slot(pool: Any, index: int) -> Iterator[torch.Tensor]:
    for name in _LISTS:
        for layers in getattr(pool, name).values():
            yield from (one[index] for one in layers)
    for name in _SINGLES:
        yield from (one[index] for one in getattr(pool, name).values())


# --- in the process that serves HTTP ----------------------------------------------------------------------------------


class SglangLora:
    """See `weightsync.engine.engine_front_end.ServedLora`; ``manager`` is SGLang's tokenizer manager."""

    def __init__(self, manager: Any, most: int | None):
        #: ``most``: how many SGLang may have loaded.
        self._manager, self._most = manager, most
        self._registry: Any = manager.lora_registry
        #: By name: what SGLang calls it, and what was served of it last, with its path.
        self._numbers: dict[str, str] = {}
        self._served: dict[str, tuple[str, str]] = {}

    @property
    def versions(self) -> dict[str, str]:
        """See `ServedLora`; without those that a user has unloaded or replaced."""
        known = self._registry.get_all_adapters()
        return {
            name: version
            for name, (version, path) in self._served.items()
            if name in known and known[name].lora_path == path
        }

    def number(self, name: str) -> AdapterId:
        """See `ServedLora`; the ``lora_id`` of an adapter of this name which SGLang has already."""
        if not name or name == self._manager.served_model_name:
            raise UnsupportedOption(f"lora={name!r}: this SGLang serves its base model by this name; choose another")
        known = self._registry.get_all_adapters()
        if name in known:
            self._numbers[name] = str(known[name].lora_id)
        elif self._most is not None and len(known) >= self._most:
            raise UnsupportedOption(
                f"lora={name!r}: this SGLang has {', '.join(sorted(known))} loaded, and --max-loaded-loras "
                f"{self._most}; unload one, or start it with more"
            )
        return self._numbers.setdefault(name, _PUSHED + name)

    @contextlib.asynccontextmanager
    async def alone(self, timeout_s: float) -> AsyncIterator[None]:
        """While no user loads or unloads adapters. Raises `PushTimeout`."""
        lock: asyncio.Lock = self._manager.lora_update_lock
        try:
            await asyncio.wait_for(lock.acquire(), timeout_s)
        except asyncio.TimeoutError as error:
            raise PushTimeout(
                f"SGLang was still loading or unloading an adapter after {timeout_s:g} s; nothing was changed",
                weights="unchanged",
            ) from error
        try:
            yield
        finally:
            lock.release()

    def serve(self, name: str, version: str, push: str) -> None:
        """See `ServedLora`."""
        from sglang.srt.lora.lora_registry import LoRARef

        number, path = self._numbers[name], f"{_PUSHED}{name}:{version}:{push}"
        # As if it were pinned: SGLang could not load it again if it dropped it for another.
        ref = LoRARef(lora_id=number, lora_name=name, lora_path=path, pinned=True)
        if number in self._registry._counters:  # of the requests with it
            self._registry._registry[name] = ref
        else:
            self._registry._register_adapter(ref)
        self._manager.lora_ref_cache.pop(name, None)  # the folder before
        self._served[name] = version, path

    def withdraw(self, name: str) -> None:
        """Serve this adapter no more: its ranks may hold different versions.

        They have stopped, and what runs with it must not go on after the next push.
        """
        self._registry._registry.pop(name, None)
        self._manager.lora_ref_cache.pop(name, None)
        self._served.pop(name, None)
        self._manager.abort_request(abort_all=True)


def served(server_args: Any, manager: Any) -> SglangLora | str:
    """The adapters that a server serves; or why none can be pushed into it."""
    if not manager.enable_lora:
        return "start SGLang with --enable-lora, --lora-target-modules, and --max-lora-rank of at least the adapter's"
    if compat_config.groups(server_args) > 1:
        return "replicas and pipeline stages (--dp-size, --pp-size) take none; start SGLang without them"
    lacking = compat.SGLANG.check_object(manager, _TOKENIZER, SERVER)
    return lacking or SglangLora(manager, server_args.max_loaded_loras)


def hook() -> None:
    """Have requests name pushed adapters as vLLM's do."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not compat.SGLANG.check(SERVER):
        HookRegistry.register(_MODEL, _around_model, HookType.AROUND)


def _around_model(original: Any, serving: Any, model: str) -> Any:
    """Hook around `_MODEL`: a request whose ``model`` is a pushed adapter is one for that adapter.

    SGLang alone would answer it with the base model, and takes ``MODEL:ADAPTER``, or ``lora_path``.
    """
    manager = serving.tokenizer_manager
    ref = manager.lora_registry.get_all_adapters().get(model) if manager.enable_lora else None
    if ref is not None and str(ref.lora_path).startswith(_PUSHED):
        return manager.served_model_name, model
    return original(serving, model)
