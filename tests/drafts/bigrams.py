"""A model that predicts each token from the one before alone, with a layer for multi-token prediction that does so too.

It is a MiMo, which vLLM drafts for with its `MiMoMTP`. No layer adds anything to the embedding, so what is predicted
depends on the embedding, the output layer and the last norm; the last norm of the layer for multi-token prediction
stands for that of its own version. So all drafted tokens are accepted if both are of one version, and few if they are
not.
"""

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tools import models

MTP = "model.mtp_layers.0."


def make(path, seed):
    """Write a version to a folder; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(Qwen2Config(**models.TINY, tie_word_embeddings=False)).to(torch.bfloat16)
        norm = (torch.randn(128) * 2).to(torch.bfloat16)
    model.save_pretrained(path)
    models.make_tokenizer().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"] = norm
    layer = {name.removeprefix("model.layers.0."): tensor for name, tensor in weights.items() if ".layers.0." in name}
    hidden = torch.zeros(128, 128, dtype=torch.bfloat16)
    layer |= {
        "token_layernorm.weight": torch.ones(128, dtype=torch.bfloat16),
        "hidden_layernorm.weight": torch.ones(128, dtype=torch.bfloat16),
        "input_proj.weight": torch.cat([hidden, torch.eye(128, dtype=torch.bfloat16)], 1),
        "final_layernorm.weight": norm,
    }
    weights |= {MTP + name: tensor.clone() for name, tensor in layer.items()}
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def weights_of(path):
    """The tensors of a version by name."""
    return load_file(path / "model.safetensors")
