"""A checkpoint of attention, MLP and experts, its layout in Megatron, and the table that maps one to the other."""

import torch

from weightsync import Fused, Rule

HEADS, GROUPS, HEAD, HIDDEN, FFN, EXPERTS, LAYERS, VOCABULARY = 8, 4, 4, 16, 24, 4, 2, 40
LAYER, EXPERT = "model.layers.{layer}", "model.layers.{layer}.mlp.experts.{expert}"
ATTENTION = {
    f"{LAYER}.self_attn.q_proj.weight": HEADS // GROUPS * HEAD,
    f"{LAYER}.self_attn.k_proj.weight": HEAD,
    f"{LAYER}.self_attn.v_proj.weight": HEAD,
}
OURS = "decoder.layers.{layer}"
RULES = [
    Rule("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    Rule("decoder.final_layernorm.weight", "model.norm.weight", dim=None),
    Rule(f"{OURS}.self_attention.linear_qkv.weight", ATTENTION),
    Rule(f"{OURS}.self_attention.linear_proj.weight", f"{LAYER}.self_attn.o_proj.weight", dim=1),
    Rule(f"{OURS}.self_attention.linear_qkv.layer_norm_weight", f"{LAYER}.input_layernorm.weight", dim=None),
    Rule(
        f"{OURS}.mlp.experts.linear_fc1.weight{{expert}}",
        {f"{EXPERT}.gate_proj.weight": None, f"{EXPERT}.up_proj.weight": None},
        dim=None,
    ),
    Rule(f"{OURS}.mlp.experts.linear_fc2.weight{{expert}}", f"{EXPERT}.down_proj.weight", dim=None),
    Rule(f"{OURS}.mlp.linear_fc1.weight", {f"{LAYER}.mlp.gate_proj.weight": None, f"{LAYER}.mlp.up_proj.weight": None}),
    Rule(f"{OURS}.mlp.linear_fc2.weight", f"{LAYER}.mlp.down_proj.weight", dim=1),
    Rule(f"{OURS}.scale", f"{LAYER}.scale", dim=None),
    Rule(f"{OURS}.self_attention._extra_state", None),
]


def checkpoint():
    """A checkpoint with an MLP in the first layer and experts in the second."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for at in range(LAYERS):
        layer, attention = f"model.layers.{at}", f"model.layers.{at}.self_attn"
        shapes[f"{attention}.q_proj.weight"] = (HEADS * HEAD, HIDDEN)
        shapes[f"{attention}.k_proj.weight"] = shapes[f"{attention}.v_proj.weight"] = (GROUPS * HEAD, HIDDEN)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{layer}.input_layernorm.weight"], shapes[f"{layer}.scale"] = (HIDDEN,), ()
        for mlp in [f"{layer}.mlp"] if at == 0 else [f"{layer}.mlp.experts.{one}" for one in range(EXPERTS)]:
            shapes[f"{mlp}.gate_proj.weight"] = shapes[f"{mlp}.up_proj.weight"] = (FFN, HIDDEN)
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, FFN)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def megatron(of, rank, size):
    """What Megatron holds of checkpoint ``of`` in one of ``size`` ranks of tensor and expert parallelism."""

    def share(name, dim=0):
        return of[name].chunk(size, dim)[rank]

    found = {
        "embedding.word_embeddings.weight": share("model.embed_tokens.weight"),
        "decoder.final_layernorm.weight": of["model.norm.weight"],
    }
    for at in range(LAYERS):
        theirs, ours = f"model.layers.{at}", f"decoder.layers.{at}"
        groups = torch.cat([of[f"{theirs}.self_attn.{one}_proj.weight"].view(GROUPS, -1, HIDDEN) for one in "qkv"], 1)
        found[f"{ours}.self_attention.linear_qkv.weight"] = groups.chunk(size)[rank].reshape(-1, HIDDEN)
        found[f"{ours}.self_attention.linear_proj.weight"] = share(f"{theirs}.self_attn.o_proj.weight", 1)
        found[f"{ours}.self_attention.linear_qkv.layer_norm_weight"] = of[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.scale"], found[f"{ours}.self_attention._extra_state"] = of[f"{theirs}.scale"], torch.zeros(3)
        if at == 0:
            both = [share(f"{theirs}.mlp.{name}_proj.weight") for name in ("gate", "up")]
            found[f"{ours}.mlp.linear_fc1.weight"] = torch.cat(both)
            found[f"{ours}.mlp.linear_fc2.weight"] = share(f"{theirs}.mlp.down_proj.weight", 1)
            continue
        for local in range(EXPERTS // size):
            expert = f"{theirs}.mlp.experts.{rank * EXPERTS // size + local}"
            both = [of[f"{expert}.{name}_proj.weight"] for name in ("gate", "up")]
            found[f"{ours}.mlp.experts.linear_fc1.weight{local}"] = torch.cat(both)
            found[f"{ours}.mlp.experts.linear_fc2.weight{local}"] = of[f"{expert}.down_proj.weight"]
    return Fused(found, RULES, rank, size, {"expert": rank * EXPERTS // size})


PROJECTIONS = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.down")
COLUMNS = ("self_attn.o", "mlp.down")


def llama(state, config, rank, size):
    """What one of ``size`` ranks holds of a dense model, with the table that explains it."""
    groups, head = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    rows = {"q": config.num_attention_heads // groups * head, "k": head, "v": head}
    rules = [
        Rule("layers.{at}.qkv", {f"model.layers.{{at}}.self_attn.{one}_proj.weight": rows[one] for one in "qkv"}),
        Rule("layers.{at}.fc1", {f"model.layers.{{at}}.mlp.{one}_proj.weight": None for one in ("gate", "up")}),
        *(Rule(f"layers.{{at}}.{one}", f"model.layers.{{at}}.{one}_proj.weight", 1) for one in COLUMNS),
        *(Rule(name, name, 0 if tensor.ndim > 1 else None) for name, tensor in state.items() if "_proj" not in name),
    ]
    found = {
        name: tensor.chunk(size)[rank] if tensor.ndim > 1 else tensor
        for name, tensor in state.items()
        if "_proj" not in name
    }
    for at in range(config.num_hidden_layers):
        one = {name: state[f"model.layers.{at}.{name}_proj.weight"] for name in (*PROJECTIONS, "mlp.gate", "mlp.up")}
        qkv = torch.cat([one[f"self_attn.{name}"].view(groups, -1, config.hidden_size) for name in "qkv"], 1)
        found[f"layers.{at}.qkv"] = qkv.chunk(size)[rank].reshape(-1, config.hidden_size)
        found[f"layers.{at}.fc1"] = torch.cat([one[f"mlp.{name}"].chunk(size)[rank] for name in ("gate", "up")])
        for name in COLUMNS:
            found[f"layers.{at}.{name}"] = one[name].chunk(size, 1)[rank]
    return Fused(found, rules, rank, size)
