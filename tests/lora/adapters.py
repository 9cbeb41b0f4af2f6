"""Folders with LoRA adapters as PEFT writes them, with random values that change what a model says."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Where layers have experts, which transformers holds as parameters: PEFT's adapters of layers leave those alone.
ATTENTION = TARGETS[:4]
RANK, ALPHA = 8, 16


def targets_of(model):
    """The layers that an adapter for a model's folder has by default."""
    experts = any(name.startswith("num_experts") for name in json.loads((model / "config.json").read_text()))
    return ATTENTION if experts else TARGETS


def make_adapter(folder, model, *, seed, rank=RANK, targets=None, change=None, **config):
    """Write an adapter for a model's folder; ``change`` may change its tensors, ``config`` what PEFT says of it."""
    generator = torch.Generator().manual_seed(seed)
    targets = targets_of(model) if targets is None else targets
    tensors = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in targets:
                out, width = file.get_slice(name).get_shape()
                for side, shape in (("A", (rank, width)), ("B", (out, rank))):
                    value = torch.randn(shape, generator=generator) * 0.1
                    tensors[f"base_model.model.{layer}.lora_{side}.weight"] = value
    if change is not None:
        tensors = change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**said, **config}))
    return folder


def make_adapters(folder, model, names):
    """Adapters of these names, each of its own seed; their folders by name."""
    return {name: make_adapter(folder / name, model, seed=seed) for seed, name in enumerate(names, 1)}
