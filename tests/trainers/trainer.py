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
    def __init__(self, model, inner):
        self.model, self.inner = model, inner

    def step(self):
        self.model.backward(self.loss())
        self.model.step()

    def whole(self):
        import deepspeed

        gathered = deepspeed.zero.GatheredParameters(list(self.inner.parameters()))
        return gathered if self.model.zero_optimization_stage() == 3 else contextlib.nullcontext()


def zero(folder, stage):
    import deepspeed

    model = load(folder)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        },
    )
    return DeepSpeed(engine, model)


def zero2(folder):
    return zero(folder, 2)


def zero3(folder):
    return zero(folder, 3)


def accelerate(folder):
    from accelerate import Accelerator

    model = load(folder)
    return Trained(Accelerator(cpu=True).prepare(model), model)


class Adapted(Trained):
    def state(self):
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        merged = copy.deepcopy(self.model).merge_and_unload()
        after = self.model.state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        return {name: of(value) for name, value in merged.state_dict().items()}


def adapted(folder, **options):
    """LoRA of linear layers and of the embedding, and the norm trained in full."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj", "embed_tokens"], modules_to_save=["norm"], **options
    )
    model = load(folder, torch.bfloat16)
    return Adapted(peft.get_peft_model(model, config), model)


def peft(folder):
    return adapted(folder, init_lora_weights=False)


def dora(folder):
    return adapted(folder, use_dora=True)


KINDS = {kind.__name__: kind for kind in (ddp, compiled, fsdp2, fsdp1, fsdp1_flat, fsdp1_grads, fsdp1_whole)}
NEED_PACKAGES = {kind.__name__: kind for kind in (zero2, zero3, accelerate)}
ADAPTED = {kind.__name__: kind for kind in (peft, dora)}


def served(sender):
    """The digest of what the sender's only engine serves."""
    (reply,) = sender.status(digest=True).values()
    (rank,) = reply.ranks
    return rank.digest


def compared(sender, trained, order):
    """The digests of what is served and of what the framework itself says that the model's state is."""
    state = trained.state()
    return served(sender), digest_of((name, state[name]) for name in order)


def main():
    folder, url, *kinds = sys.argv[1:]
    dist.init_process_group("gloo")
    order = list(load(folder).state_dict())
    for kind in kinds:
        trained, seen = (KINDS | NEED_PACKAGES | ADAPTED)[kind](folder), []
        with Sender([url]) as sender:
            for _ in range(2):
                sender.push(trained.model)
                seen.append(compared(sender, trained, order))
                trained.step()
        if dist.get_rank() == 0:
            print(json.dumps({kind: seen}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
