"""verl's workers as verl builds them, but for what needs a GPU: the exported model, the server, and its adapter."""

import asyncio
import types

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from tests.in_process import doors
from tools import models
from weightsync.testing import ReferenceInProcess

PROMPT = [1, 2, 3, 4]


class Exports:
    """Stands for verl's model engine: yields whole tensors, which all workers have to gather together."""

    def __init__(self):
        self.folder, self.without, self.breaks_at = "", "", ""

    def get_per_tensor_param(self):
        return self._pairs(), None

    def _pairs(self):
        for name, tensor in models.load_reference(self.folder).state_dict().items():
            dist.broadcast(tensor, 0)
            if name == self.breaks_at:
                raise RuntimeError("the trainer's memory is full")
            if name != self.without:
                yield name, tensor


class Trainer(ActorRolloutRefWorker):
    """verl's own worker, with its own `update_weights`."""

    def __init__(self, config):
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.config = types.SimpleNamespace(rollout=types.SimpleNamespace(checkpoint_engine=config))
        self.actor = types.SimpleNamespace(engine=Exports())
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export(self, folder, without="", breaks_at=""):
        exports = self.actor.engine
        exports.folder, exports.without, exports.breaks_at = folder, without, breaks_at


class Adapter(BaseRollout):
    """Stands for verl's adapter of a server: keeps what it was given in the last whole update, and the step."""

    def __init__(self, config):
        super().__init__(config, types.SimpleNamespace(), None)
        self.replica_rank, self.is_leader_rank = 0, True
        self.received, self.wire_format, self.stops_after, self.step = {}, "", None, None

    async def resume(self, tags):
        raise NotImplementedError

    async def release(self):
        raise NotImplementedError

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        received = {}
        async for name, tensor in weights:
            received[name] = tensor
            if len(received) == self.stops_after:
                raise ValueError("the server's memory is full")
        self.wire_format, self.received, self.step = wire_format, received, global_steps


class Rollout(CheckpointEngineWorker):
    """verl's own worker."""

    def __init__(self, config):
        super().__init__(config, types.SimpleNamespace(), Adapter(config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_after(self, tensors):
        self.server_adapter.stops_after = tensors

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self, folder):
        """Whether it has received this model, the wire format, and the step."""
        adapter, wanted = self.server_adapter, models.load_reference(folder).state_dict()
        same = adapter.received.keys() == wanted.keys() and all(
            torch.equal(adapter.received[name], tensor) for name, tensor in wanted.items()
        )
        return same, adapter.wire_format, adapter.step


class Server:
    """Stands for verl's server actor, which needs a GPU, with the reference engine in place of vLLM's."""

    def __init__(self, workers, folder, free_cache_engine=False):
        self.workers, self.node_rank = workers, 0
        self.config = types.SimpleNamespace(free_cache_engine=free_cache_engine)
        self.engine = ReferenceInProcess(folder)
        self.paused = False

    def _resolve_sleep_level(self):
        return 2

    async def generate(self):
        return await asyncio.to_thread(self.engine.generate, PROMPT, 8)

    async def version(self):
        return await self.engine.front.version()

    async def end_engine(self):
        self.engine.close()

    async def abort_all_requests(self, reject_request=False):
        self.paused = True

    async def resume_generation(self):
        self.paused = False

    async def release_kv_cache(self):
        pass

    async def resume_kv_cache(self):
        pass


class VllmServer(Server):
    """The same with vLLM's own engine."""

    def __init__(self, workers, folder):
        self.workers, self.node_rank, self.paused = workers, 0, False
        self.config = types.SimpleNamespace(free_cache_engine=False)
        self._door = doors.AsyncLlm(folder)
        self.engine = self._door.engine

    async def generate(self):
        return await asyncio.to_thread(self._door.generate, doors.PROMPT, doors.NEW_TOKENS)


class OtherServer(Server):
    """The same without an engine in the actor, as SGLang's is."""

    def __init__(self, workers, folder):
        super().__init__(workers, folder)
        del self.engine


class Replica(RolloutReplica):
    """verl's own replica, whose worker and server are there already."""

    def __init__(self, rank, config, workers, servers):
        super().__init__(rank, config, types.SimpleNamespace())
        self.workers, self.servers = workers, servers

    async def launch_servers(self):
        raise NotImplementedError


def named(kind, name, *arguments, **options):
    """An actor with a name, as verl's servers have."""
    return ray.remote(num_cpus=0, **options)(kind).options(name=name).remote(*arguments)
