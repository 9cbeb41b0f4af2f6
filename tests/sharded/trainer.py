"""One rank of a trainer whose weights are sharded, told by lines of its standard input what to do.

``python -m tests.sharded.trainer RANK SIZE PORT FOLDER SHARDING URL...`` answers each line with one of JSON.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tools import models
from weightsync import LocalShard, Sender, assembly
from weightsync.errors import WeightSyncError

written = []


def counting(write):
    """Note how many bytes this rank writes into the arena."""

    def counted(*args):
        work = write(*args)
        written.append(work.nbytes)
        return work

    return counted


def refused(*_, **__):
    raise AssertionError("a push gathers nothing")


def shard(model, how, size):
    """What is pushed: the module, sharded, or what this rank holds of it."""
    if how in ("fsdp", "hsdp"):
        shape = (size,) if how == "fsdp" else (2, size // 2)
        mesh = dist.init_device_mesh("cpu", shape)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    state, rank = model.state_dict(), dist.get_rank()
    if how == "stages":
        return {name: tensor for number, (name, tensor) in enumerate(state.items()) if number % size == rank}
    if how == "columns":
        mesh = dist.init_device_mesh("cpu", (size,))
        return {name: distribute_tensor(t, mesh, [Shard(t.ndim - 1)], src_data_rank=None) for name, t in state.items()}
    if how == "local":
        parts = {name: tensor.tensor_split(size)[rank].clone() for name, tensor in state.items()}
        starts = {name: sum(len(t) for t in tensor.tensor_split(size)[:rank]) for name, tensor in state.items()}
        rest = {name: (0,) * (tensor.ndim - 1) for name, tensor in state.items()}
        return {
            name: LocalShard(part, tuple(state[name].shape), (starts[name], *rest[name]))
            for name, part in parts.items()
        }
    assert how == "replicas"
    return model


def broken(weights, size):
    """The same, with a tensor whose values no rank knows."""
    state = dict(weights if isinstance(weights, dict) else weights.state_dict())
    name, mesh = next(iter(state)), dist.init_device_mesh("cpu", (size,))
    whole = torch.zeros(state[name].shape, dtype=torch.bfloat16)
    return {**state, name: DTensor.from_local(whole, mesh, [Partial()])}


def act(word, sender, weights, size):
    if word == "break":
        weights = broken(weights, size)
    if word in ("push", "break"):
        written.clear()
        with CommDebugMode() as comm:
            result = sender.push(weights)
        assert comm.get_total_counts() == 0
        return {"version": result.version, "nbytes": result.nbytes, "written": sum(written)}
    if word == "change":
        for tensor in (weights if isinstance(weights, dict) else dict(weights.state_dict())).values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else getattr(tensor, "tensor", tensor)
            local.neg_()
        return {}
    if word == "status":
        return {url: [rank.digest for rank in one.ranks] for url, one in sender.status(digest=True).items()}
    if word == "rollback":
        return {"version": sender.rollback().version}
    if word.startswith("add "):
        return {"transport": sender.add_engine(word[4:]).transport}
    if word == "keys":
        return {"keys": dist.distributed_c10d._get_default_store().num_keys()}
    raise AssertionError(word)


def main():
    rank, size, port, folder, how, options, *urls = sys.argv[1:]
    rank, size = int(rank), int(size)
    # What a model's own libraries print is no answer.
    answers, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    weights = shard(models.load_reference(folder), how, size)
    DTensor.full_tensor = DTensor.redistribute = refused
    assembly.write = counting(assembly.write)
    sender = None
    for line in sys.stdin:
        word = line.strip()
        try:
            if word == "build":
                sender, said = Sender(urls, **json.loads(options)), {}
            elif word == "close":
                sender, said = sender.close(), {}
            else:
                said = act(word, sender, weights, size)
        except WeightSyncError as error:
            said = {"error": type(error).__name__, "message": str(error), "engines": error.engines}
        answers.write(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
