"""``torchrun -m tests.trainers.adapter_parts MODEL URL``: a PEFT model that several processes train, adapter alone.

Rank 0 prints as JSON, by kind: what the engine at URL answers with the adapter that all pushed from the model, and with
the same adapter from a folder, before and after a step.
"""

import json
import sys
import tempfile

import peft
import requests
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.engines.conftest import PROMPT
from tests.trainers.trainer import Trained, load
from weightsync import Sender

CONFIG = {"target_modules": ["q_proj", "down_proj"], "r": 8, "lora_alpha": 32, "init_lora_weights": False}


def adapted(folder):
    torch.manual_seed(0)
    return peft.get_peft_model(load(folder), peft.LoraConfig(**CONFIG))


def fsdp2(folder):
    model, mesh = adapted(folder), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.get_base_model().model.layers, model):
        fully_shard(part, mesh=mesh)
    return Trained(model, model)


def ddp(folder):
    model = adapted(folder)
    return Trained(DistributedDataParallel(model), model)


def saved(model, folder):
    """Write the adapter as a trainer would; every process takes part."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()


def answer(url):
    reply = requests.post(f"{url}/generate", json={"prompt": PROMPT, "tokens": 8, "adapter": "policy"}, timeout=60)
    reply.raise_for_status()
    return reply.json()["tokens"], reply.json()["logprobs"]


def main():
    folder, url = sys.argv[1:]
    dist.init_process_group("gloo")
    for kind in (fsdp2, ddp):
        trained, seen = kind(folder), []
        where = [tempfile.mkdtemp()]
        dist.broadcast_object_list(where)
        with Sender([url]) as sender:
            for _ in range(2):
                saved(trained.inner, where[0])
                for pushed in (where[0], trained.model):
                    sender.push(pushed, lora="policy")
                    seen.append(answer(url) if dist.get_rank() == 0 else None)
                trained.step()
        if dist.get_rank() == 0:
            print(json.dumps({kind.__name__: seen}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
