"""What verl's own code does beside vLLM: ``python -m tests.verl.adapter``; prints what it has seen, as JSON."""

import asyncio
import json
import types

import vllm
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter


class Method:
    """Stands for a method of verl's server actor, which needs a GPU."""

    def __init__(self):
        self.calls = []

    def remote(self, *arguments):
        self.calls.append(arguments)
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


async def nothing():
    for pair in ():
        yield pair


async def updated():
    """What the adapter asks of its server, and sets, if an update is over and it was given nothing to load."""
    step = Method()
    server = types.SimpleNamespace(set_global_steps=step)  # any other call raises
    adapter = types.SimpleNamespace(use_shm=False, server_handle=server, _ensure_server_handle=lambda: True)
    adapter._update_delta_weights = types.MethodType(ServerAdapter._update_delta_weights, adapter)
    await ServerAdapter.update_weights(adapter, nothing(), global_steps=7, wire_format="delta_flush")
    return step.calls


if __name__ == "__main__":
    imported = [each.__name__ for each in (vLLMHttpServer, vLLMColocateWorkerExtension)]
    print(json.dumps({"vllm": vllm.__version__, "imported": imported, "calls": asyncio.run(updated())}))
