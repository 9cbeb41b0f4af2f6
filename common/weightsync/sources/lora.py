"""A LoRA adapter alone, of a PEFT model or of a folder that PEFT has written, under the names of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from weightsync.errors import SourceError, UnsupportedOption
from weightsync.protocol.codec import MAX_TEXT_CHARS, from_plain
from weightsync.protocol.lora import LoraSpec
from weightsync.sources.adapters import has_adapters
from weightsync.sources.mapping import MappingSource
from weightsync.sources.module import unwrap

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
#: What PEFT puts before the name of the layer, and what after it.
_PREFIX: Final = "base_model.model."
_KINDS: Final = (".lora_A.weight", ".lora_B.weight")
_EMBEDDINGS: Final = (".lora_embedding_A", ".lora_embedding_B")
#: Settings of PEFT's that make more of an adapter than a product of two matrices for each layer.
_UNLIKE: Final = (
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "alora_invocation_tokens", "use_qalora"),
    *("use_bdlora", "trainable_token_indices"),
)
#: Where an adapter's first values come from, if that does not change the model's own weights.
_BESIDE: Final = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


class LoraSource(MappingSource):
    """The tensors of one adapter, and its ``adapter``: what the engine has to know of it."""

    def __init__(self, weights: Mapping[str, torch.Tensor], adapter: LoraSpec):
        super().__init__(weights)
        self.adapter = adapter
        #: The shape of the weight to which each layer's product is added, by the layer's name in the checkpoint.
        self.weights = dict(self._layers())

    def _layers(self) -> Iterator[tuple[str, tuple[int, int]]]:
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for spec in self.specs:
            layer, side = _layer_of(spec.name)
            shapes.setdefault(layer, {})[side] = spec.shape
        ranks = {self.adapter.rank, *self.adapter.ranks.values()}
        for layer, found in shapes.items():
            embeds = found.keys() == set(_EMBEDDINGS)
            if not embeds and found.keys() != set(_KINDS):
                raise SourceError(f"{layer} has {', '.join(found)}; an adapter has two matrices for each layer")
            a, b = found.values() if next(iter(found)).endswith(("A", "A.weight")) else reversed(found.values())
            if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] not in ranks:
                raise SourceError(f"{layer}: shapes {list(a)} and {list(b)} do not belong to rank {self.adapter.rank}")
            yield layer, (a[1], b[0]) if embeds else (b[0], a[1])


def _layer_of(name: str) -> tuple[str, str]:
    """The layer to which a tensor of an adapter belongs, and which of its matrices it is."""
    for end in (*_KINDS, *_EMBEDDINGS):
        if name.startswith(_PREFIX) and name.endswith(end):
            return name[len(_PREFIX) : -len(end)], end
    raise SourceError(f"{name} is no tensor of a LoRA adapter; push the merged weights, without lora=")


def open_lora(model: object, name: str) -> LoraSource:
    """The active adapter of a PEFT model, or the adapter in a folder, to be served as the model ``name``.

    Wrappers of the model are removed; of DTensors, as FSDP2 makes them, this process sends its own part.

    Raises `SourceError`, naming what is wrong, for anything else, and for adapters that are more than LoRA.
    """
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TEXT_CHARS or not name.isprintable():
        raise UnsupportedOption(f"lora={name!r} is no name of a model: give 1 to {MAX_TEXT_CHARS} printable characters")
    if isinstance(model, (str, Path)):
        return LoraSource(*_of_folder(Path(model), name))
    if isinstance(model, torch.nn.Module) and has_adapters(wrapped := unwrap(model)):
        return LoraSource(*_of_model(wrapped, name))
    raise SourceError(
        f"lora={name!r}: push a PEFT model, or a folder with {_WEIGHTS} and {_CONFIG}, not {type(model).__name__}"
    )


def _of_folder(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], LoraSpec]:
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / _CONFIG).read_text())
        weights = load_file(folder / _WEIGHTS)
    except (OSError, ValueError) as error:
        raise SourceError(f"{folder} holds no adapter that PEFT has written: {error}") from error
    return weights, _spec(name, config if isinstance(config, dict) else {}, str(folder))


def _of_model(model: Any, name: str) -> tuple[dict[str, torch.Tensor], LoraSpec]:
    from peft import get_peft_model_state_dict

    active = model.active_adapters if hasattr(model, "active_adapters") else [model.active_adapter]
    if len(active) != 1:
        raise SourceError(f"lora={name!r}: {len(active)} adapters are active ({', '.join(active)}); activate one")
    spec = _spec(name, model.peft_config[active[0]].to_dict(), f"the adapter {active[0]!r}")
    return get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=False), spec


def _spec(name: str, config: Mapping[str, Any], what: str) -> LoraSpec:
    """The adapter that a configuration of PEFT's describes. Raises `SourceError`, naming what cannot be served."""
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind != "LORA":
        raise SourceError(f"{what} is of the kind {kind}, and engines serve LORA; push the merged weights")
    unlike = [setting for setting in _UNLIKE if config.get(setting)]
    if config.get("bias", "none") != "none":
        unlike.append(f"bias={config['bias']!r}")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _BESIDE:
        unlike.append(f"init_lora_weights={start!r}, which changes the model's own weights")
    if unlike:
        raise SourceError(f"{what} uses {', '.join(unlike)}, which engines do not serve; push the merged weights")
    settings = {
        "name": name,
        "rank": config.get("r"),
        "alpha": config.get("lora_alpha"),
        "rslora": bool(config.get("use_rslora")),
        "ranks": config.get("rank_pattern") or {},
        "alphas": config.get("alpha_pattern") or {},
    }
    try:
        return from_plain(settings, LoraSpec)
    except msgspec.MsgspecError as error:
        raise SourceError(f"{what} has a configuration that cannot be read: {error}") from error
