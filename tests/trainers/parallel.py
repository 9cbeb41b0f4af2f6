"""``torchrun -m tests.trainers.parallel MODEL URL TP PP EP``: push a Megatron-Core model, before and after a step.

Rank 0 prints as JSON the digests of what was served and of what Megatron's ranks hold, put together here, both times,
and how far Megatron's logits are from transformers'. Megatron-Core asks for a GPU in three places; they are replaced.
"""

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM

from tests.trainers.trainer import served
from weightsync import Sender
from weightsync.errors import SourceError
from weightsync.integrations import megatron

torch.cuda.current_device = lambda: torch.device("cpu")
torch.Tensor.cuda = lambda self: self
moe_utils.te_general_gemm = None  # not defined without Transformer Engine
random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()

#: Rows of padding in the vocabulary, of this value, and numbers above it.
PADDING, FILLED, PLACE = 128, 7.0, 1000
LENGTH = 8
TIED = ("embedding", "output_layer")
TOKENS = torch.arange(LENGTH)[None]


def build(theirs, pre_process, post_process):
    """What this rank holds of a model of the shape that transformers' configuration gives."""
    moe = theirs.model_type == "qwen3_moe"
    experts = {}
    if moe:
        experts = {
            "num_moe_experts": theirs.num_experts,
            "moe_router_topk": theirs.num_experts_per_tok,
            "moe_ffn_hidden_size": theirs.moe_intermediate_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }
    norms = theirs.model_type.startswith("qwen3")
    config = TransformerConfig(
        num_layers=theirs.num_hidden_layers,
        hidden_size=theirs.hidden_size,
        num_attention_heads=theirs.num_attention_heads,
        num_query_groups=theirs.num_key_value_heads,
        kv_channels=theirs.head_dim,
        ffn_hidden_size=theirs.intermediate_size,
        layernorm_epsilon=theirs.rms_norm_eps,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        qk_layernorm=norms,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **experts,
    )
    spec = get_gpt_layer_local_spec(
        theirs.num_experts if moe else None, moe_grouped_gemm=False, qk_layernorm=norms, normalization="RMSNorm"
    )
    return GPTModel(
        config,
        spec,
        vocab_size=theirs.vocab_size + PADDING,
        max_sequence_length=64,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=theirs.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=theirs.rope_parameters["rope_theta"],
    )


def same(name):
    """The checkpoint's name of a tensor that Megatron only renames."""
    return (
        name.replace("decoder.layers", "model.layers")
        .replace("decoder.final_layernorm", "model.norm")
        .replace("pre_mlp_layernorm", "post_attention_layernorm")
        .replace("self_attention.q_layernorm", "self_attn.q_norm")
        .replace("self_attention.k_layernorm", "self_attn.k_norm")
        .replace("self_attention.linear_proj", "self_attn.o_proj")
        .replace("router", "gate")
        .replace("local_experts.", "")
        .replace("linear_fc2", "down_proj")
        .replace("embedding.word_embeddings", "model.embed_tokens")
        .replace("output_layer", "lm_head")
    )


class Split:
    """How this rank's parameters and the checkpoint's tensors correspond, worked out apart from the product's table."""

    def __init__(self, model, theirs):
        own, experts = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_tensor_parallel_rank()
        self.tp = own, parallel_state.get_tensor_model_parallel_world_size()
        self.expert_tp = experts, parallel_state.get_expert_tensor_parallel_world_size()
        local = (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        self.first_expert = parallel_state.get_expert_model_parallel_rank() * local
        self.model, self.theirs = model, theirs
        self.queries = theirs.num_attention_heads // theirs.num_key_value_heads * theirs.head_dim

    def names(self):
        """Each parameter, by the name that it would have if one process had the whole model."""
        layers = [layer.layer_number - 1 for layer in self.model.decoder.layers]
        for name, parameter in self.model.named_parameters():
            words = name.split(".")
            if words[:2] == ["decoder", "layers"]:
                words[2] = str(layers[int(words[2])])
            if "local_experts" in words:
                at = words.index("local_experts") + 1
                words[at] = str(int(words[at]) + self.first_expert)
            yield ".".join(words), parameter

    def of(self, state, name):
        """What this rank holds, by Megatron's name, of a checkpoint."""
        rank, size = self.expert_tp if "local_experts" in name else self.tp
        if "linear_qkv" in name:
            prefix = same(name).removesuffix("self_attention.linear_qkv.weight") + "self_attn."
            three = [state[f"{prefix}{one}_proj.weight"] for one in "qkv"]
            groups = [one.view(self.theirs.num_key_value_heads, -1, one.shape[-1]) for one in three]
            return torch.cat(groups, 1).chunk(size)[rank].flatten(0, 1)
        if "linear_fc1" in name:
            prefix = same(name).removesuffix("linear_fc1.weight")
            return torch.cat([state[f"{prefix}{one}_proj.weight"].chunk(size)[rank] for one in ("gate", "up")])
        whole = state[same(name)] if same(name) in state else state["model.embed_tokens.weight"]
        if "embed" in same(name) or "lm_head" in same(name):
            whole = torch.cat([whole, torch.full((PADDING, whole.shape[1]), FILLED)])
        dim = 1 if "linear_proj" in name or "linear_fc2" in name else 0
        return whole.chunk(size, dim)[rank] if whole.ndim > 1 and "router" not in name else whole

    def load(self, state):
        with torch.no_grad():
            for name, parameter in self.names():
                parameter.copy_(self.of(state, name))

    def gathered(self, like):
        """The checkpoint that the ranks hold, in every rank: each element goes back to where `of` takes it from."""
        sizes = [tensor.numel() for tensor in like.values()]
        places = torch.arange(PLACE, PLACE + sum(sizes), dtype=torch.float64).split(sizes)
        numbered = {name: place.view(tensor.shape) for (name, tensor), place in zip(like.items(), places, strict=True)}
        whole = torch.zeros(sum(sizes))
        for name, parameter in self.names():
            place = self.of(numbered, name).long() - PLACE
            whole[place[place >= 0]] = parameter.detach()[place >= 0]  # the others are padding
        pieces = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, whole)
        first, second = pieces
        flat = torch.where(first != 0, first, second).to(torch.bfloat16).split(sizes)
        return {name: piece.view(tensor.shape) for (name, tensor), piece in zip(like.items(), flat, strict=True)}


def loaded(theirs, checkpoint, pre_process=True, post_process=True):
    """What this rank holds of the model in the checkpoint."""
    model = build(theirs, pre_process, post_process)
    model.eval()  # in training it refuses experts with tensor parallelism and without sequence parallelism
    Split(model, theirs).load({name: tensor.float() for name, tensor in checkpoint.items()})
    return model


def forward(model):
    """The logits, in the last stage of the pipeline; elsewhere what it passes on."""
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    received = None
    if not parallel_state.is_pipeline_first_stage():
        received = torch.empty(LENGTH, 1, model.config.hidden_size)
        dist.recv(received, 0)
        model.set_input_tensor(received.requires_grad_())
    out = model(TOKENS, TOKENS, mask)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.detach(), 1)
    return out, received


def step(model):
    """One step of stochastic gradient descent through Megatron's own forward and backward passes."""
    out, received = forward(model)
    if parallel_state.is_pipeline_last_stage():
        out.float().square().mean().backward()
        if received is not None:
            dist.send(received.grad, 0)
    else:
        gradient = torch.empty_like(out)
        dist.recv(gradient, 1)
        out.backward(gradient)
    group = parallel_state.get_tensor_model_parallel_group()
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # As Megatron's optimizer reduces what ranks have computed from their own heads, or in their own stages.
            if "_layernorm.weight" in name and "self_attention" in name:
                dist.all_reduce(parameter.grad, group=group)
            elif stages > 1 and model.share_embeddings_and_output_weights and name.split(".")[0] in TIED:
                dist.all_reduce(parameter.grad)
            if parameter.grad is not None:
                parameter.sub_(0.5 * parameter.grad)
    model.zero_grad()


def compared(url, state, alone):
    """The digests of what is served and of ``state``, which this process alone pushes in whole to learn the second."""
    with Sender([url], group=alone) as sender:
        found = served(sender)
        sender.push(state)
        return found, served(sender)


def main():
    folder, url, tp, pp, ep = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    dist.init_process_group("gloo")
    alone = dist.new_group([0])
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1)
    theirs, checkpoint = AutoConfig.from_pretrained(folder), load_file(Path(folder) / "model.safetensors")
    stages = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = loaded(theirs, checkpoint, *stages)
    split = Split(model, theirs)
    refused(model)
    told = {"apart": apart(model, folder), "seen": []}
    for _ in range(2):
        state = split.gathered(checkpoint)
        with Sender([url]) as sender:
            sender.push(megatron.weights([model], vocabulary=theirs.vocab_size))
        if dist.get_rank() == 0:
            told["seen"].append(compared(url, state, alone))
        told.setdefault("loaded", all(torch.equal(state[name], tensor) for name, tensor in checkpoint.items()))
        dist.barrier()
        step(model)
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def refused(model):
    """Settings with which names and shapes fit, and values would not."""
    for setting in megatron._OTHER_VALUES:
        before = getattr(model.config, setting, None)
        setattr(model.config, setting, 8)
        assert setting in said(model)
        setattr(model.config, setting, before)
    wrapped = SimpleNamespace(module=model, ddp_config=DistributedDataParallelConfig(overlap_param_gather=True))
    assert "overlap_param_gather" in said(wrapped)
    assert "is not a GPTModel" in said(torch.nn.Linear(1, 1))


def said(model):
    try:
        megatron.weights(model)
    except SourceError as error:
        return str(error)
    return "nothing"


@torch.no_grad()
def apart(model, folder):
    """The largest difference between Megatron's logits and transformers', in every rank."""
    out, _ = forward(model)
    found = torch.zeros(1)
    if parallel_state.is_pipeline_last_stage():
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
        rank, width = parallel_state.get_tensor_model_parallel_rank(), out.shape[-1]
        here = own[..., rank * width : (rank + 1) * width]
        found += (out[..., : here.shape[-1]] - here).abs().max()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    main()
