"""Print, for tiny models of several families, whether a module is read as ``save_pretrained`` writes it."""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from weightsync.sources import open_source

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
#: A tower of the vision models.
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def causal(family, **sizes):
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**TINY, **sizes))


def with_vision(family, text, vision, **sizes):
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, **sizes)
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def llava():
    return with_vision("Llava", transformers.LlamaConfig(**TINY), transformers.CLIPVisionConfig(**VISION))


def qwen2_vl():
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    tower = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    return with_vision("Qwen2VL", {**TINY, "rope_scaling": rope}, tower)


FAMILIES = {
    "llama": lambda: causal("Llama"),
    "qwen3": lambda: causal("Qwen3", head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": lambda: causal("Qwen3Moe", head_dim=16, **EXPERTS),
    "mixtral": lambda: causal("Mixtral", num_local_experts=4),
    "gpt_oss": lambda: causal("GptOss", head_dim=16, num_local_experts=4),
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "gemma3": lambda: with_vision("Gemma3", {**TINY, "head_dim": 16}, VISION, mm_tokens_per_image=4),
}


def main():
    for family, make in FAMILIES.items():
        model, folder = make().to(torch.bfloat16), Path(sys.argv[1]) / family
        model.save_pretrained(folder)
        want, source = load_file(folder / "model.safetensors"), open_source(model)
        got = {spec.name: tensor for spec, tensor in zip(source.specs, source.tensors(), strict=True)}
        assert got.keys() == want.keys(), (family, got.keys() ^ want.keys())
        wrong = [name for name, tensor in got.items() if not torch.equal(tensor, want[name])]
        assert not wrong, (family, wrong)
    print(transformers.__version__, *FAMILIES)


if __name__ == "__main__":
    main()
