"""``torchrun -m tests.trainers.trainer MODEL URL KIND...``: push models that frameworks wrap, before and after a step.

The kinds are the functions of `KINDS`. For each, rank 0 prints as JSON the digests of what was served and of what the
framework itself says that the model's state was, both times.
"""

import contextlib
import copy
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from weightsync import Sender
from weightsync.sources.flat import plain_name
from weightsync.tensors.layout import digest_of


class Trained:
    """A model as its framework wraps it, and how to train it and to read all of it."""

    def __init__(self, model, inner):
        self.model, self.inner = model, inner
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(self):
        tokens = torch.arange(8)[None] + dist.get_rank()
        return self.model(input_ids=tokens, labels=tokens).loss

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        """A context in which every rank has all values; the framework's own way."""
        return contextlib.nullcontext()

    def state(self):
        with self.whole():
            return {plain_name(name): of(value) for name, value in self.inner.named_parameters()}


def of(value):
    """A parameter in the engine's dtype."""
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value.clone()).to(torch.bfloat16)


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def ddp(folder):
    model = load(folder)
    return Trained(DistributedDataParallel(model), model)


def compiled(folder):
    model = load(folder, torch.bfloat16)
    return Trained(torch.compile(model, backend="eager"), model)


def fsdp2(folder):
    model, mesh = load(folder), init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return Trained(model, model)


class Fsdp1(Trained):
    def whole(self):
        return FullyShardedDataParallel.summon_full_params(self.model)


def fsdp1(folder, strategy=ShardingStrategy.FULL_SHARD, names=True):
    model = load(folder)
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        use_orig_params=names,
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
        device_id=torch.device("cpu"),
    )
    return Fsdp1(wrapped, model)


def fsdp1_flat(folder):
    return fsdp1(folder, names=False)


def fsdp1_grads(folder):
    return fsdp1(folder, ShardingStrategy.SHARD_GRAD_OP)


def fsdp1_whole(folder):
    return fsdp1(folder, ShardingStrategy.NO_SHARD)


class DeepSpeed(Trained):
    def __init__(self, folder, stage):
        import deepspeed

        self.stage, model = stage, load(folder)
        self.model, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            },
        )
        self.inner = self.model.module

    def step(self):
        self.model.backward(self.loss())
        self.model.step()

    def whole(self):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(self.inner.parameters()))
        return gathered if self.stage == 3 else contextlib.nullcontext()


def zero2(folder):
    return DeepSpeed(folder, 2)


def zero3(folder):
    return DeepSpeed(folder, 3)


def accelerate(folder):
    from accelerate import Accelerator

    model = load(folder)
    return Trained(Accelerator(cpu=True).prepare(model), model)


class Adapted(Trained):
    """LoRA of linear layers and of the embedding, and the norm trained in full."""

    def __init__(self, folder, **options):
        import peft

        torch.manual_seed(0)
        config = peft.LoraConfig(
            target_modules=["q_proj", "down_proj", "embed_tokens"], modules_to_save=["norm"], **options
        )
        super().__init__(peft.get_peft_model(load(folder, torch.bfloat16), config), None)

    def state(self):
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        merged = copy.deepcopy(self.model).merge_and_unload()
        after = self.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return dict(merged.state_dict())


def peft(folder):
    return Adapted(folder, init_lora_weights=False)


def dora(folder):
    return Adapted(folder, use_dora=True)


KINDS = {kind.__name__: kind for kind in (ddp, compiled, fsdp2, fsdp1, fsdp1_flat, fsdp1_grads, fsdp1_whole)}
NEED_PACKAGES = {kind.__name__: kind for kind in (zero2, zero3, accelerate)}
ADAPTED = {kind.__name__: kind for kind in (peft, dora)}


def main():
    folder, url, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    order = list(load(folder).state_dict())
    for kind in kinds:
        trained, seen = (KINDS | NEED_PACKAGES | ADAPTED)[kind](folder), []
        with Sender([url]) as sender:
            for _ in range(2):
                sender.push(trained.model)
                (rank,) = sender.status(digest=True)[url].ranks
                state = trained.state()
                seen.append((rank.digest, digest_of((name, state[name]) for name in order)))
                trained.step()
        if dist.get_rank() == 0:
            print(json.dumps({kind: seen}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
