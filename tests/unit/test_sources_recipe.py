"""From a module's tensors to those of its checkpoint, and from a configuration to the expected checkpoint."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from weightsync.errors import SourceError
from weightsync.sources import open_source
from weightsync.sources.checkpoint_layout import Group, View, compute, traced_recipe
from weightsync.sources.from_config import specs_from_config

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
DEEPSEEK = {
    **TINY,
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def test_a_conversion_that_writes_into_the_weights_is_refused():
    state = {"w": torch.zeros(2)}
    with pytest.raises(SourceError, match="writes into the weights"):
        traced_recipe(state, lambda tensors: {"w": tensors["w"].contiguous().mul_(2)}, "Model")


def test_a_conversion_that_reads_beyond_its_group_is_refused():
    def convert(tensors):
        return {"sum": tensors["a"] + tensors["b"] if "c" in tensors else tensors["a"][:1], **tensors}

    state = {name: torch.zeros(2) for name in "abc"}
    with pytest.raises(SourceError, match="Model: sum cannot be computed from a, b alone"):
        traced_recipe(state, convert, "Model")


def test_origins_follow_writes_into_new_tensors():
    def convert(tensors):
        return {"sum": torch.zeros_like(tensors["a"]).add_(tensors["b"])}

    recipe = traced_recipe({"a": torch.ones(2), "b": torch.ones(2)}, convert, "Model")
    assert recipe.steps == (Group(("a", "b"), ("sum",)),)


def test_computed_tensors_that_share_an_input_form_one_group():
    outputs = {
        "x": ("ab", torch.add),
        "v": ("c", lambda c: c),
        "y": ("b", torch.exp),
        "z": ("c", torch.Tensor.double),
        "i": ("c", lambda c: c.view(torch.int32)),
        "t": ("a", lambda a: a.T.contiguous()),
    }

    def convert(tensors):
        return {
            name: make(*(tensors[one] for one in inputs))
            for name, (inputs, make) in outputs.items()
            if set(inputs) <= tensors.keys()
        }

    state = {name: torch.rand(2, 3) for name in "abc"}
    recipe = traced_recipe(state, convert, "Model")
    assert recipe.steps == (
        Group(("a", "b"), ("x", "y")),
        View("c", 0, (2, 3), (3, 1)),
        Group(("c",), ("z", "i")),
        View("a", 0, (3, 2), (1, 3)),
    )
    assert [spec.name for spec in recipe.specs] == ["x", "y", "v", "z", "i", "t"]
    assert all(map(torch.equal, compute(recipe.steps[0], convert, state), [state["a"] + state["b"], state["b"].exp()]))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Qwen3ForCausalLM, Qwen3Config(**TINY, tie_word_embeddings=True)),
        (LlamaForCausalLM, LlamaConfig(**TINY)),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**TINY, **EXPERTS, num_experts=4)),
        (DeepseekV3ForCausalLM, DeepseekV3Config(**DEEPSEEK)),
    ],
)
def test_a_configuration_predicts_what_a_loaded_model_sends(kind, config, tmp_path):
    kind(config).save_pretrained(tmp_path)
    source = open_source(kind.from_pretrained(tmp_path, dtype=torch.bfloat16))
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    specs = specs_from_config(tmp_path, dtype="bfloat16")
    assert {spec.name: spec for spec in specs} == {spec.name: spec for spec in source.specs}
    assert ("float32" in {spec.dtype for spec in specs}) is (kind is DeepseekV3ForCausalLM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"architectures": ["NoSuchModel"]}, "names NoSuchModel, which transformers"),
        ({"architectures": None}, "names no architecture"),
    ],
)
def test_unusable_configurations_are_refused(change, message, tmp_path):
    config = LlamaConfig(**TINY)
    config.architectures = ["LlamaForCausalLM"]
    config.update(change)
    config.save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=message):
        specs_from_config(tmp_path, dtype="bfloat16")


def test_configurations_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(SourceError, match="cannot read the configuration"):
        specs_from_config(tmp_path, dtype="bfloat16")
    with pytest.raises(SourceError, match="'int8' is not a floating-point dtype"):
        specs_from_config(tmp_path, dtype="int8")
