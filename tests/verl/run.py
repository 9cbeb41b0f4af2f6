"""What tests/verl asks of verl's classes: ``python -m tests.verl.run PART ARGUMENTS``; prints what it saw, as JSON."""

import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.ray.run import in_environment_of, main, reference
from tests.verl import workers
from tools import versions

WAIT_S = 300.0


def generated(server):
    return list(ray.get(server.generate.remote(), timeout=WAIT_S))


def group(kind, size, config):
    pool = RayResourcePool(process_on_nodes=[size], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(kind), config=config)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")


class Run:
    """A trainer of two workers, and two rollout workers, as a run of verl has them."""

    def __init__(self, backend, **options):
        options = {"timeout_s": WAIT_S / 5, **options}
        config = CheckpointEngineConfig(backend=backend, engine_kwargs={backend: options})
        self.config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config)
        self.trainer = group(workers.Trainer, 2, config)
        self.rollout = group(workers.Rollout, 2, self.config)
        self.manager = CheckpointEngineManager(config, self.trainer, [])

    def serve(self, *servers):
        """Have the rollout workers belong to these servers, one each."""
        self.manager.replicas = [
            workers.Replica(rank, self.config, [worker], [server])
            for rank, (worker, server) in enumerate(zip(self.rollout.workers, servers, strict=True))
        ]

    def update(self, folder, step, **exported):
        self.trainer.export(folder, **exported)
        self.manager.update_weights(global_steps=step)

    def fails(self, *arguments, **options):
        """What an update raises."""
        try:
            self.update(*arguments, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "none"


def into_servers(before, after):
    """Updates of two servers; what is refused; a replica that leaves, and an engine that ends."""
    run = Run("weightsync")
    servers = [
        workers.named(workers.Server, f"vllm_server_{rank}_0", [worker], before)
        for rank, worker in enumerate(run.rollout.workers)
    ]
    run.serve(*servers)

    def serves():
        return [generated(server) for server in servers]

    seen = {"fresh": [reference(before), reference(after)]}
    seen["registered"] = sorted(CheckpointEngineRegistry._registry)
    seen["served"] = [serves()]
    for step, folder in enumerate((after, before, after), 1):
        run.update(folder, step)
        seen["served"].append(serves())
    seen["rollout"] = run.rollout.seen(after)
    seen["versions"] = ray.get([server.version.remote() for server in servers], timeout=WAIT_S)
    seen["incomplete"] = run.fails(before, 4, without="model.norm.weight")
    seen["after a failure"], seen["steps"] = serves(), [step for *_, step in run.rollout.seen(after)]
    run.update(before, 5)
    seen["recovered"] = serves()
    run.manager.remove_replicas(run.manager.replicas[1:])
    run.update(after, 6)
    seen["one left"] = serves()
    run.serve(*servers)
    ray.get(servers[1].end_engine.remote(), timeout=WAIT_S)
    seen["dead"] = run.fails(before, 7)
    seen["other"] = generated(servers[0])
    return seen


def into_vllm(before, after):
    """Updates of a server with vLLM's own engine, and of one beside it."""
    run = Run("weightsync")
    one, two = run.rollout.workers
    vllm = {"runtime_env": in_environment_of("vllm")}
    servers = [
        workers.named(workers.VllmServer, "vllm_server_0_0", [one], before, **vllm),
        workers.named(workers.Server, "vllm_server_1_0", [two], before),
    ]
    run.serve(*servers)
    seen = {"answers": [generated(servers[0])], "other": [generated(servers[1])]}
    for step, folder in enumerate((after, before, after), 1):
        run.update(folder, step)
        seen["answers"].append(generated(servers[0]))
        seen["other"].append(generated(servers[1]))
    seen["incomplete"] = run.fails(before, 4, without="model.norm.weight")
    seen["unchanged"] = [generated(server) for server in servers]
    return {**seen, "fresh": [reference(before), reference(after)]}


def refused(before, after):
    """Servers that cannot be pushed into."""
    run = Run("weightsync")
    one, two = run.rollout.workers
    server = workers.named(workers.Server, "vllm_server_0_0", [one], before)
    run.serve(server, server)
    seen = {"no server": run.fails(after, 1)}
    dropping = workers.named(workers.Server, "vllm_server_1_0", [two], before, True)
    run.serve(server, dropping)
    seen["dropped"] = run.fails(after, 2)
    ray.kill(dropping)
    run.serve(server, workers.named(workers.OtherServer, "sglang_server_1_0", [two], before))
    return {**seen, "other": run.fails(after, 3)}


def transfer(before, after):
    """Updates that verl's adapter loads; one that it stops, one that is incomplete, and one after them."""
    run = Run("weightsync_transfer", model=before)
    server = workers.named(workers.Server, "vllm_server_0_0", [], before)
    run.serve(server, server)
    seen = {"updates": []}
    for step, folder in enumerate((after, before, after), 1):
        run.update(folder, step)
        seen["updates"].append(run.rollout.seen(folder))
    seen["incomplete"] = run.fails(before, 4, without="model.norm.weight")
    seen["unchanged"] = [given for given, *_ in run.rollout.seen(after)]
    seen["broken"] = run.fails(before, 4, breaks_at="model.norm.weight")
    run.rollout.stop_after(3)
    seen["stopped"] = run.fails(before, 5)
    run.rollout.stop_after(None)
    run.update(before, 6)
    seen["recovered"] = run.rollout.seen(before)
    return seen


PARTS = {part.__name__: part for part in (into_servers, into_vllm, refused, transfer)}


if __name__ == "__main__":
    main(PARTS, versions.verl_packages(), num_cpus=4)
