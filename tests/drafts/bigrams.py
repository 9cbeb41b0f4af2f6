"""Models that predict each token from the one before alone, with a layer for multi-token prediction that does so too.

One is a MiMo, which vLLM drafts for with its `MiMoMTP`, the other a Qwen3-Next, with linear attention and experts. No
layer adds anything to the embedding, so what is predicted depends on the embedding, the output layer and the last
norm; the last norm of the layer for multi-token prediction stands for that of its own version. So all drafted tokens
are accepted if both are of one version, and few if they are not.
"""

import json
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tools import models

Kind = Literal["mimo", "qwen3_next"]
#: By kind, how the names of the layer for multi-token prediction begin.
MTP: dict[Kind, str] = {"mimo": "model.mtp_layers.0.", "qwen3_next": "mtp."}
_ZERO, _ONE = torch.zeros(128, 128, dtype=torch.bfloat16), torch.eye(128, dtype=torch.bfloat16)
#: Layers that add to the embedding, which here they do not.
_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")


def make(path, seed, kind: Kind = "mimo"):
    """Write a version to a folder; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mimo":
            config = Qwen2Config(**models.TINY, tie_word_embeddings=False)
            Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        else:
            models.random_model(kind, seed=seed).save_pretrained(path)
        norm = (torch.randn(128) * 2).to(torch.bfloat16)
    models.make_tokenizer().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = norm
    layer = (_mimo if kind == "mimo" else _qwen3_next)(weights, norm)
    weights |= {MTP[kind] + name: tensor.clone() for name, tensor in layer.items()}
    for name, tensor in weights.items():
        if name.endswith(_ADDING):
            tensor.zero_()
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((path / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    if kind == "mimo":
        config["architectures"] = ["MiMoForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def _mimo(weights, norm):
    return {
        **_layer(weights, 0),
        "token_layernorm.weight": torch.ones(128, dtype=torch.bfloat16),
        "hidden_layernorm.weight": torch.ones(128, dtype=torch.bfloat16),
        "input_proj.weight": torch.cat([_ZERO, _ONE], 1),  # of the hidden state and the embedding, this one
        "final_layernorm.weight": norm,
    }


def _qwen3_next(weights, norm):
    last = max(int(name.split(".")[2]) for name in weights if ".layers." in name)  # with full attention, as is drafted
    return {
        **{f"layers.0.{name}": tensor for name, tensor in _layer(weights, last).items()},
        # These norms multiply by one more than their weight.
        "pre_fc_norm_embedding.weight": torch.zeros(128, dtype=torch.bfloat16),
        "pre_fc_norm_hidden.weight": torch.zeros(128, dtype=torch.bfloat16),
        "fc.weight": torch.cat([_ONE, _ZERO], 1),  # of the embedding and the hidden state, the first
        "norm.weight": norm,
    }


def _layer(weights, number):
    prefix = f"model.layers.{number}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def weights_of(path):
    """The tensors of a version by name."""
    return load_file(path / "model.safetensors")
