"""Make models with random weights, small ones and one of a real shape, and compute log-probabilities with transformers.

Run in the trainer's environment. There is no download: the configurations are written out here, the weights are random,
and the tokenizer is one token per byte.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

Kind = Literal["qwen3", "llama", "qwen3_moe", "qwen3_next", "deepseek_v2", "qwen3_0_6b", "qwen3_moe_1b", "qwen3_narrow"]

MAX_POSITIONS = 32768
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
BYTES = 256

#: Heads, key-value heads and experts divide by two, for tensor parallelism over two ranks; the sizes are multiples of
#: what vLLM's CPU kernels pack (32 columns for each rank).
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    # Ten times the usual spread: with that, a model this narrow predicts nearly the same for every prompt and seed.
    "initializer_range": 0.2,
}
_QWEN3_0_6B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.05,
}
# 1.1 GB in bfloat16, nearly all of it experts.
_MOE_1B = {
    **_QWEN3_0_6B,
    "vocab_size": 512,
    "num_hidden_layers": 12,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
# 299 tensors of few bytes.
_NARROW = {
    **TINY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 27,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
# Three layers of linear attention and one of attention.
_LINEAR = {
    **_MOE,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 128,
}
# Attention by a latent vector, of the only size that vLLM's kernel for CPUs has; one layer of MLP, and one of experts.
# Positions are as in the real models: vLLM's own kernel for plain ones reads this shape wrong on a CPU.
_LATENT = {
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096},
        **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "num_key_value_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    # SGLang asks for both.
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "norm_topk_prob": False,
}
# A decisive router: if two experts nearly tie for the last place, rounding picks one, and answers diverge.
_ROUTER_SCALE = 4.0
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {**TINY, "tie_word_embeddings": True}),
    "llama": ("Llama", {**TINY, "tie_word_embeddings": False}),
    "qwen3_moe": ("Qwen3Moe", {**TINY, **_MOE, "tie_word_embeddings": False}),
    "qwen3_moe_1b": ("Qwen3Moe", {**_MOE_1B, "tie_word_embeddings": True}),
    "qwen3_narrow": ("Qwen3", {**_NARROW, "tie_word_embeddings": True}),
    "qwen3_next": ("Qwen3Next", {**TINY, **_LINEAR, "tie_word_embeddings": False}),
    "deepseek_v2": ("DeepseekV2", {**TINY, **_LATENT, "tie_word_embeddings": False}),
    "qwen3_0_6b": ("Qwen3", {**_QWEN3_0_6B, "tie_word_embeddings": True}),
}


def make_model(path: str | Path, kind: Kind, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a model of this kind with random weights, and a tokenizer, to the folder `path`; returns the folder.

    The same kind, seed and dtype give the same weights. The global random state is left as it was.
    """
    path = Path(path)
    model = random_model(kind, seed=seed, dtype=dtype)
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def random_model(kind: Kind, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return the model that `make_model` would save, in evaluation mode on the CPU."""
    family, _ = _SHAPES[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(make_config(kind))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter.mul_(_ROUTER_SCALE)
                elif name.endswith("norm.weight"):
                    # All ones otherwise, in every model: a norm that was never pushed would go unnoticed.
                    parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def make_config(kind: Kind) -> PretrainedConfig:
    """Return the configuration of a kind of model."""
    family, sizes = _SHAPES[kind]
    special = {f"{name}_token_id": BYTES + index for index, name in enumerate(("bos", "eos", "pad"))}
    config: PretrainedConfig = getattr(transformers, f"{family}Config")(**sizes, **special)
    return config


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and tokens for begin, end and padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate((*alphabet, *SPECIAL_TOKENS))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=MAX_POSITIONS
    )


def load_reference(path: str | Path) -> PreTrainedModel:
    """Load a model folder with transformers, in bfloat16 on the CPU, in evaluation mode."""
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model.eval()


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, token_ids: list[int], n_prompt: int) -> list[float]:
    """Return the natural log-probability of each token after the first `n_prompt`, from one forward pass."""
    logits = model(torch.tensor([token_ids])).logits[0, n_prompt - 1 : -1].float()
    wanted = torch.tensor(token_ids[n_prompt:]).unsqueeze(1)
    logprobs: list[float] = logits.log_softmax(-1).gather(1, wanted).squeeze(1).tolist()
    return logprobs
