"""Megatron-Core: the weights of its ``GPTModel`` under the names of Hugging Face's checkpoints, in one line::

    sender.push(megatron.weights(model))

For models with the layers of Llama, Qwen2, Qwen3 and Qwen3-MoE, split by tensor, pipeline and expert parallelism. Every
process pushes what it holds; nothing is gathered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.sources.fused import Fused, Rule

_OURS: Final = "decoder.layers.{layer}"
_THEIRS: Final = "model.layers.{layer}"
_LAYER: Final = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_EXPERT: Final = f"{_THEIRS}.mlp.experts.{{expert}}"
_OTHER_VALUES: Final = {
    "layernorm_zero_centered_gamma": "the norms' weights are one less than the checkpoint's",
    "rotary_interleaved": "the rows of queries and keys are in another order than the checkpoint's",
    "moe_mlp_glu_interleave_size": "gate and up are in another order than the checkpoint's",
    "moe_router_enable_expert_bias": "the router's bias has no place in the checkpoint",
}
#: Tensors that every rank of a tensor-parallel group holds whole. Transformer Engine has a norm in the layer after it.
_WHOLE: Final = {
    f"{_OURS}.input_layernorm.weight": f"{_THEIRS}.input_layernorm.weight",
    f"{_OURS}.self_attention.linear_qkv.layer_norm_weight": f"{_THEIRS}.input_layernorm.weight",
    f"{_OURS}.pre_mlp_layernorm.weight": f"{_THEIRS}.post_attention_layernorm.weight",
    f"{_OURS}.mlp.linear_fc1.layer_norm_weight": f"{_THEIRS}.post_attention_layernorm.weight",
    f"{_OURS}.self_attention.q_layernorm.weight": f"{_THEIRS}.self_attn.q_norm.weight",
    f"{_OURS}.self_attention.k_layernorm.weight": f"{_THEIRS}.self_attn.k_norm.weight",
    f"{_OURS}.mlp.router.weight": f"{_THEIRS}.mlp.gate.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}


def weights(model: nn.Module | Sequence[nn.Module], *, vocabulary: int | None = None) -> Fused:
    """What this process holds of ``model``, or of its chunks (virtual pipeline parallelism), for `Sender.push`.

    ``vocabulary`` is the number of tokens in the checkpoint, if Megatron has padded it. Raises `SourceError` for what
    is no ``GPTModel``, and where ranks hold parts of a group of queries; pushing it does for parameters of other names.
    """
    parallel = _parallel_state()
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, Sequence) else [model])]
    _check(chunks[0].config)
    config, rank = chunks[0].config, parallel.get_tensor_model_parallel_rank()
    size = parallel.get_tensor_model_parallel_world_size()
    if config.num_query_groups % size:
        raise SourceError(
            f"{config.num_query_groups} groups of queries cannot be split over {size} tensor-parallel ranks in whole "
            "groups, which the checkpoint's names need; use fewer ranks"
        )
    tied = bool(chunks[0].share_embeddings_and_output_weights)
    local = int(config.num_moe_experts or 0) // int(parallel.get_expert_model_parallel_world_size())
    rules = _rules(config, tied, vocabulary)
    if config.num_moe_experts:
        rules += _experts(size, parallel.get_expert_tensor_parallel_world_size())
    found = {name: tensor for chunk in chunks for name, tensor in _named(chunk)}
    return Fused(found, rules, rank, size, {"expert": parallel.get_expert_model_parallel_rank() * local})


def _parallel_state() -> Any:
    try:
        from megatron.core import parallel_state
    except ImportError as error:
        needed = "weightsync.integrations.megatron needs Megatron-Core: pip install megatron-core"
        raise ImportError(f"{needed} ({error})") from error
    return parallel_state


def _unwrapped(model: Any) -> Any:
    """The ``GPTModel`` inside Megatron's wrappers."""
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
            raise SourceError(
                "overlap_param_gather: after a step each rank has new values of its own part alone, until the next "
                "forward pass; train without it"
            )
        model = model.module
    if not hasattr(model, "decoder"):
        raise SourceError(f"{type(model).__name__} is not a GPTModel of Megatron-Core: it has no decoder")
    return model


def _check(config: Any) -> None:
    """Raise `SourceError` for settings with which the same names and shapes mean other values."""
    for setting, why in _OTHER_VALUES.items():
        if getattr(config, setting, None):
            raise SourceError(f"{setting}: {why}; such models cannot be pushed")


def _named(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name, with the number that the layer has in the whole model."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    for name, parameter in chunk.named_parameters():
        layer = _LAYER.fullmatch(name)
        yield f"{layer[1]}{numbers[int(layer[2])]}{layer[3]}" if layer else name, parameter


def _rules(config: Any, tied: bool, vocabulary: int | None) -> list[Rule]:
    return [
        Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", rows=vocabulary),
        Rule("output_layer.weight", None if tied else "lm_head.weight", rows=vocabulary),
        *(Rule(ours, theirs, dim=None) for ours, theirs in _WHOLE.items()),
        *(Rule(f"{_OURS}.self_attention.linear_qkv.{kind}", _qkv(config, kind)) for kind in ("weight", "bias")),
        Rule(f"{_OURS}.self_attention.linear_proj.weight", f"{_THEIRS}.self_attn.o_proj.weight", dim=1),
        Rule(f"{_OURS}.mlp.linear_fc1.weight", _gate_and_up(f"{_THEIRS}.mlp")),
        Rule(f"{_OURS}.mlp.linear_fc2.weight", f"{_THEIRS}.mlp.down_proj.weight", dim=1),
    ]


def _qkv(config: Any, kind: str) -> Mapping[str, int]:
    """The rows of one group: its queries, its key, its value."""
    head = int(config.kv_channels)
    rows = {"q": config.num_attention_heads // config.num_query_groups * head, "k": head, "v": head}
    return {f"{_THEIRS}.self_attn.{one}_proj.{kind}": count for one, count in rows.items()}


def _gate_and_up(mlp: str) -> Mapping[str, None]:
    return {f"{mlp}.gate_proj.weight": None, f"{mlp}.up_proj.weight": None}


def _experts(size: int, shared: int) -> Iterator[Rule]:
    """Of experts in modules of their own, and of Transformer Engine's in one module."""
    if shared not in (1, size):
        raise SourceError(
            f"experts are split over {shared} ranks and other layers over {size}: use expert_tensor_parallel_size 1, "
            "or that of tensor parallelism"
        )
    rows, columns = (None, None) if shared == 1 else (0, 1)
    for ours in ("local_experts.{expert}.linear_fc%d.weight", "linear_fc%d.weight{expert}"):
        yield Rule(f"{_OURS}.mlp.experts.{ours % 1}", _gate_and_up(_EXPERT), dim=rows)
        yield Rule(f"{_OURS}.mlp.experts.{ours % 2}", f"{_EXPERT}.down_proj.weight", dim=columns)
