"""Runs the lines of docs/integrations in two processes, between classes that stand for those of each framework.

``pages FOLDER OTHER URLS``, one for each page: pushes the model of OTHER, then of FOLDER; prints for each page what
was served after each, and what a push that lacks a tensor raised.
"""

import asyncio
import itertools
import json
import os
import sys
import tempfile
import types
from abc import ABC
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.documents import blocks
from tools.models import load_reference as load
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.protocol.auth import sender_token
from weightsync.trainer.client import EngineClient

MISSING = "model.norm.weight"
PATIENCE_S = 60.0


def code(page, **names):
    """The names that the page's lines define, where ``names`` are known."""
    (block,) = [block for block in blocks(f"docs/integrations/{page}.md") if block.kind == "python"]
    space = {"ABC": ABC, "torch": torch, **names}
    exec(compile(block.text, str(block), "exec"), space)
    return types.SimpleNamespace(**space)


def modules(**found):
    """Modules by name, with what is found in them; a name has __ for each dot."""
    made = {}
    for name, inside in found.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        vars(made[".".join(parts)]).update(inside)
    return mock.patch.dict(sys.modules, made)


class Instead:
    """Stands for a class of a framework."""


def gathered(folder, without=""):
    """Pairs as frameworks gather them: all ranks have to take part for each."""
    for name, tensor in load(folder).state_dict().items():
        dist.broadcast(tensor, 0)
        if name != without:
            yield name, tensor


def batched(pairs, size):
    """As in `itertools`, from Python 3.12 on."""
    pairs = iter(pairs)
    while some := list(itertools.islice(pairs, size)):
        yield some


#: Ray of which each process is an actor, and what is said to all is said to this one.
RAY = {"get": lambda found: found}


def openrlhf(url):
    trainer = code("openrlhf", torch_dist_barrier_and_cuda_sync=dist.barrier).ActorPPOTrainer()
    trainer.vllm_engines = [url]
    trainer._init_vllm_sync_group("gloo")

    def push(folder, without=""):
        trainer.actor = types.SimpleNamespace(model=load(folder))
        trainer.broadcast_to_vllm()

    return push


def nemo_rl(url):
    with modules(ray=RAY, nemo_rl__weight_sync__interfaces={"WeightSynchronizer": Instead}):
        told = {}
        found = code("nemo-rl", dtensor_params_generator=lambda model, dtype: gathered(*told["what"]))
    worker = found.DTensorPolicyWorkerV2Impl()
    worker.model = worker.dtype = None
    group = types.SimpleNamespace(
        workers=[url],
        dp_leader_worker_indices=[0],
        run_all_workers_single_data=lambda name, **arguments: getattr(worker, name)(**arguments),
    )
    policy = generation = types.SimpleNamespace(worker_group=group)
    synchronizer = found.WeightsyncSynchronizer(policy, generation)
    synchronizer.init_communicator()

    def push(*what):
        told["what"] = what
        synchronizer.sync_weights()

    return push


def skyrl(url):
    with modules(skyrl__backends__skyrl_train__weight_sync={"WeightTransferSender": Instead}):
        worker = code("skyrl").Worker()
    asyncio.run(worker.init_weight_sync_state(types.SimpleNamespace(server_urls=[url]), None))

    def push(*what):
        pairs = gathered(*what)
        chunks = (
            types.SimpleNamespace(names=[name for name, _ in some], tensors=[tensor for _, tensor in some])
            for some in batched(pairs, 3)
        )
        asyncio.run(worker._weight_transfer_sender.send_chunks(chunks))

    return push


def prime_rl(url):
    class FileSystemWeightBroadcast:
        output_dir, world = Path(tempfile.mkdtemp()), types.SimpleNamespace(is_master=dist.get_rank() == 0)

        def _notify_orchestrator(self, folder):
            assert folder.is_dir()

    names = {
        "FileSystemWeightBroadcast": FileSystemWeightBroadcast,
        "gather_weights_parallel": lambda model: dict(itertools.islice(model.items(), dist.get_rank(), None, 2)),
        "convert_state_dict_to_hf": lambda model, weights: weights,
        "get_broadcast_dir": lambda folder: folder / "broadcasts",
        "get_step_path": lambda folder, step: folder / f"step_{step}",
    }
    broadcast, steps = code("prime-rl", **names).SenderWeightBroadcast(), itertools.count(1)

    def push(folder, without=""):
        model = {name: tensor for name, tensor in load(folder).state_dict().items() if name != without}
        with mock.patch.dict(os.environ, {"ENGINES": url}):
            broadcast.broadcast_weights(model, next(steps))

    return push


def slime(url):
    told = {}

    class UpdateWeightFromDistributed:
        weight_version = 0

        def _iter_non_expert_chunks(self):
            yield from batched(gathered(*told["what"]), 3)

        def _iter_expert_chunks(self):
            yield from ()

    class Engine:
        class get_url:
            remote = staticmethod(lambda: url)

    of_slime = {
        "slime__utils__distributed_utils": {"get_gloo_group": lambda: None},
        "slime__backends__megatron_utils__update_weight__update_weight_from_distributed": {
            "UpdateWeightFromDistributed": UpdateWeightFromDistributed
        },
    }
    with modules(ray=RAY, **of_slime):
        update = code("slime").UpdateWeightWithSender()
    update.connect_rollout_engines([Engine], None)

    def push(*what):
        told["what"] = what
        update.update_weights()

    return push


def areal(url):
    engine = code("areal").FSDPEngine()
    addresses = types.SimpleNamespace(addresses=[url.removeprefix("http://")])
    engine.rollout_engine, engine.cpu_group = types.SimpleNamespace(_engine=addresses), None
    engine._init_weight_update_from_distributed(None)
    versions = itertools.count(1)

    def push(folder, without=""):
        engine.model = load(folder)
        for layer in engine.model.model.layers:
            fully_shard(layer)
        fully_shard(engine.model)
        engine._update_weights_from_distributed(types.SimpleNamespace(version=next(versions)))

    return push


#: Of those that can push less than the model, on one rank alone, without leaving others at a barrier.
FAILS = (nemo_rl, skyrl, prime_rl)
PAGES = {page.__name__.replace("_", "-"): page for page in (openrlhf, nemo_rl, skyrl, prime_rl, slime, areal)}


def served(url):
    """The digest of what the engine serves."""
    (rank,) = EngineClient(url, sender_token()).status(Deadline(PATIENCE_S), digest=True).ranks
    return rank.digest


def main(folder, other, *urls):
    dist.init_process_group("gloo")
    for page, url in zip(PAGES, urls, strict=True):
        push, seen, error = PAGES[page](url), [], ""
        for model in (other, folder):
            push(model)
            dist.barrier()
            seen.append(served(url))
            dist.barrier()
        if PAGES[page] in FAILS:
            try:
                push(other, MISSING)
            except WeightSyncError as found:
                error = str(found)
            dist.barrier()
            seen.append(served(url))
        if dist.get_rank() == 0:
            print(json.dumps({page: [seen, error]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
