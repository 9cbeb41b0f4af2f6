"""``python -m tests.trainers.adapted MODEL``: how models with adapters of PEFT are read and pushed; prints JSON."""

import json
import sys

import peft
import torch
from transformers import AutoModelForCausalLM

from weightsync import Sender
from weightsync.errors import SourceError
from weightsync.sources import open_source
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceInProcess


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def read(model):
    """The digest of what would be sent, or the error."""
    try:
        source = open_source(model)
    except SourceError as error:
        return str(error)
    return digest_of(sorted(zip((spec.name for spec in source.specs), source.tensors(), strict=True)))


def served_after(model, folder):
    """The digest of what an engine serves after a push of a model."""
    engine = ReferenceInProcess(folder)
    with Sender([engine]) as sender:
        sender.push(model)
        (status,) = sender.status(digest=True).values()
    engine.close()
    return status.ranks[0].digest


def main():
    (folder,) = sys.argv[1:]
    lora = {"target_modules": ["q_proj"], "init_lora_weights": False}
    plain = {name: value.clone() for name, value in load(folder).state_dict().items()}
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**lora))
    source = open_source(model)
    seen = {
        "plain": digest_of(sorted(plain.items())),
        "merged": read(model),
        "no identity": source.identity() is None,
        "read again": source.reads(model),
    }
    before = digest_of(model.state_dict().items())
    seen["pushed"] = served_after(model, folder)
    seen["left alone"] = digest_of(model.state_dict().items()) == before
    with model.disable_adapter():
        seen["disabled"] = read(model)
    model.merge_adapter()
    seen["merged by the user"] = read(model)
    with model.disable_adapter():
        seen["merged, then disabled"] = read(model)
    strided = load(folder)
    weight = strided.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()
    strided = peft.get_peft_model(strided, peft.LoraConfig(**lora))
    seen["strided"] = read(strided)
    strided.merge_adapter()
    seen["strided, merged"] = read(strided)
    tied = load(folder)
    tied.lm_head.weight = tied.model.embed_tokens.weight
    seen["tied"] = read(peft.get_peft_model(tied, peft.LoraConfig(target_modules=["embed_tokens"])))
    for name, config in {
        "IA3": peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        "bias": peft.LoraConfig(**lora, lora_bias=True),
        "prompts": peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"),
        "tokens": peft.LoraConfig(**lora, trainable_token_indices=[1]),
    }.items():
        seen[name] = read(peft.get_peft_model(load(folder), config))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
