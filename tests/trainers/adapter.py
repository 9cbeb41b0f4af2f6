"""``python -m tests.trainers.adapter MODEL ENGINE URL``: a PEFT model's adapter, pushed alone; prints JSON.

Says whether it is what `save_pretrained` writes, how far the engine's logprobs are from the model's own, and how far
from those of the model without its adapter; whether the model is left alone; and what is refused.
"""

import json
import sys
import tempfile

import peft
import torch

from tests.engines.conftest import NEW_TOKENS, PROMPT, apart
from tests.trainers.adapted import load
from tools import models, servers
from weightsync import Sender
from weightsync.errors import SourceError
from weightsync.sources.lora import open_lora
from weightsync.tensors.layout import digest_of


def read(source):
    return digest_of(sorted(zip((spec.name for spec in source.specs), source.tensors(), strict=True)))


def refused(model):
    try:
        open_lora(model, "policy")
    except SourceError as error:
        return str(error)
    return ""


def main():
    folder, engine, url = sys.argv[1:]
    config = peft.LoraConfig(target_modules="all-linear", r=8, lora_alpha=4, init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(load(folder), config)
    source, seen = open_lora(model, "policy"), {}
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        again = open_lora(saved, "policy")
        seen["as saved"] = (read(source), source.adapter) == (read(again), again.adapter)
    before = digest_of(model.state_dict().items())
    with Sender([url]) as sender:
        seen["lora"] = sender.push(model, lora="policy").lora
    seen["left alone"] = digest_of(model.state_dict().items()) == before
    server = servers.Server(engine, folder, url, None, None, adapter="policy")
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
    with model.disable_adapter():
        without = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
    seen |= {"apart": apart(logprobs, own), "without": apart(logprobs, without)}
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    lora = {"target_modules": ["q_proj"]}
    seen["refused"] = {
        "two": refused(model),
        "DoRA": refused(peft.get_peft_model(load(folder), peft.LoraConfig(**lora, use_dora=True))),
        "IA3": refused(
            peft.get_peft_model(load(folder), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
        ),
        "plain": refused(load(folder)),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
