"""``python -m tests.frameworks.weight_transfer PROGRAM MODEL NEW_MODEL URL...``: a trainer that speaks vLLM's protocol.

Nothing but the init info is weightsync's. What a program has seen it prints as JSON.
"""

import asyncio
import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightsync.integrations.vllm import TrainerInitInfo

PROMPT = "count 7: "


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def over_http(folder, trained, url):
    """Send weights twice."""
    model = load(folder)
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()
    model.load_state_dict(load(trained).state_dict())
    engine.send_weights()
    engine.shutdown()
    return engine.pushed.version


def sharded(_, trained, url):
    """Send what two processes hold."""
    dist.init_process_group("gloo")
    model = load(trained)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=dist.get_rank()), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()
    engine.shutdown()
    dist.destroy_process_group()
    return engine.pushed.version


class Several:
    """A client of several engines, as vLLM's for Ray is."""

    def __init__(self, urls):
        self.clients = [HTTPVLLMWeightSyncClient(url) for url in urls]

    def init_weight_transfer_engine(self, init_info):
        for client in self.clients:
            client.init_weight_transfer_engine(init_info)

    def start_weight_update(self):
        for client in self.clients:
            client.start_weight_update()

    def update_weights(self, update_info):
        for client in self.clients:
            client.update_weights(update_info)

    def finish_weight_update(self, weight_version=None):
        for client in self.clients:
            client.finish_weight_update(weight_version)


def of_several(folder, trained, *urls):
    """Send weights through a client of several engines."""
    engine = WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0), client=Several(urls), source=ModuleSource(load(trained))
    )
    engine.send_weights()
    engine.shutdown()
    return list(engine.pushed.engines)


class OfAsyncLLM:
    """A client of an `AsyncLLM` whose event loop runs in another thread."""

    def __init__(self, engine, loop):
        self.engine, self.loop = engine, loop

    def _run(self, call):
        return asyncio.run_coroutine_threadsafe(call, self.loop).result()

    def init_weight_transfer_engine(self, init_info):
        self._run(self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def start_weight_update(self):
        self._run(self.engine.start_weight_update())

    def update_weights(self, update_info):
        self._run(self.engine.update_weights(WeightTransferUpdateRequest(update_info=update_info)))

    def finish_weight_update(self, weight_version=None):
        self._run(self.engine.finish_weight_update(weight_version))


async def _in_process(folder, trained):
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(folder, weight_transfer_config={"backend": "weightsync"}, max_model_len=512, enforce_eager=True)
    )

    async def greedy():
        asked = SamplingParams(temperature=0, max_tokens=8)
        async for output in engine.generate(PROMPT, asked, request_id=str(id(asked))):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    def train(source):
        half = WeightTransferTrainerFactory.trainer_init(
            TrainerInitInfo(rank=0), client=OfAsyncLLM(engine, loop), source=ModuleSource(load(source))
        )
        half.send_weights()
        half.shutdown()

    loop = asyncio.get_running_loop()
    before = await greedy()
    await asyncio.to_thread(train, trained)
    after = await greedy()
    await asyncio.to_thread(train, folder)
    again = await greedy()
    version = await engine.get_weight_version()
    engine.shutdown()
    return {"changed": before != after, "back": before == again, "version": version}


def in_process(folder, trained):
    """Push another model into an `AsyncLLM` of this process, and the first one again."""
    return asyncio.run(_in_process(folder, trained))


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    print(json.dumps({"seen": globals()[program](*arguments)}))
