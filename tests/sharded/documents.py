"""What blocks of the documents find that every rank of a trainer runs: ``SCRIPT FOLDER module|fused``.

``model`` is the module in the folder, or what a rank of Megatron's would hold of it.
"""

import sys
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests import megatron
from tools import models
from weightsync import Sender

__all__ = ["Sender", "fully_shard", "groups", "head_dim", "heads", "model", "tp_rank", "tp_size"]

#: What `tests.megatron.llama` calls by short names, and Megatron by these.
NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
}
IN_LAYERS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "qkv": "self_attention.linear_qkv.weight",
    "self_attn.o": "self_attention.linear_proj.weight",
    "post_attention_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "fc1": "mlp.linear_fc1.weight",
    "mlp.down": "mlp.linear_fc2.weight",
}


def renamed(name):
    if name in NAMES:
        return NAMES[name]
    _, layer, rest = name.removeprefix("model.").split(".", 2)
    return f"decoder.layers.{layer}.{IN_LAYERS[rest]}"


dist.init_process_group("gloo")
tp_rank, tp_size = dist.get_rank(), dist.get_world_size()
model = models.load_reference(sys.argv[1])
heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
head_dim = model.config.hidden_size // heads
if sys.argv[2] == "fused":
    held = megatron.llama(model.state_dict(), model.config, tp_rank, tp_size).weights
    held = {renamed(name): tensor for name, tensor in held.items()}
    model = SimpleNamespace(named_parameters=held.items)
