"""A rank of a trainer that runs blocks of the documents: ``python -m tests.sharded.documents FOLDER``.

Each line of standard input is a block and the kind of its ``model`` as JSON: ``module`` for the model in the folder,
``fused`` for what a rank of Megatron would hold of it. The line of standard output that answers it is the error, or an
empty string, as JSON.
"""

import json
import sys
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests import megatron
from tools import models
from weightsync import Sender

#: The names that Megatron uses for tensors that `tests.megatron.llama` calls by shorter ones.
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


def names(folder, kind):
    """The global names of a block."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = models.load_reference(folder)
    heads, groups = model.config.num_attention_heads, model.config.num_key_value_heads
    numbers = {"heads": heads, "groups": groups, "head_dim": model.config.hidden_size // heads}
    if kind == "fused":
        held = megatron.llama(model.state_dict(), model.config, rank, size).weights
        held = {renamed(name): tensor for name, tensor in held.items()}
        model = SimpleNamespace(named_parameters=held.items)
    return {**numbers, "model": model, "Sender": Sender, "fully_shard": fully_shard, "tp_rank": rank, "tp_size": size}


def main():
    """Run block after block."""
    answers, sys.stdout = sys.stdout, sys.stderr  # keep other output apart from the answers
    dist.init_process_group("gloo")
    for line in sys.stdin:
        text, kind = json.loads(line)
        answer = ""
        try:
            exec(compile(text, "block", "exec"), names(sys.argv[1], kind))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
