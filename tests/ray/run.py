"""What tests/ray asks of a local Ray: ``python -m tests.ray.run PART ARGUMENTS``; prints what it has seen, as JSON."""

import contextlib
import json
import sys
import tempfile
import time

import ray

from tests.ray import actors
from tools import models, servers, versions
from weightsync import Sender
from weightsync.errors import WeightSyncError

WAIT_S = 180.0
#: Of a call of an actor in which a push times out.
BUSY_S = 40.0
#: Those over which a real engine is pushed to.
TRANSPORTS = ("ipc_zmq", "nixl", "nccl", "rdt")
PACKAGES = (versions.folder("ray", versions.RAY),)
#: Of an actor whose process a test kills.
RESTARTS = {"max_restarts": -1}


def reference(folder):
    """Greedy tokens and logprobs of the reference engine with the weights of a folder."""
    return list(actors.ReferenceInProcess(folder).generate(actors.PROMPT, 8))


def remote(kind, *arguments, **options):
    return ray.remote(num_cpus=0, **options)(kind).remote(*arguments)


def in_environment_of(engine):
    """The environment of an actor that holds a real engine."""
    return {
        "py_executable": str(servers.ROOT / f".venv-{engine}" / "bin" / "python"),
        "env_vars": servers.environment_of(engine, 1, plugin=True),
    }


def generated(actor):
    return list(ray.get(actor.generate.remote(), timeout=WAIT_S))


def raised(act):
    """The error of ``act``, with its kind."""
    try:
        act()
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def kinds(before, after):
    """Actors of all kinds, in one push."""
    held = [
        remote(actors.Held, before),
        remote(actors.Held, before, max_concurrency=4),
        remote(actors.HeldByCoroutines, before),
    ]
    seen = {"before": [generated(actor) for actor in held], "fresh": [reference(before), reference(after)]}
    with Sender(held, timeout_s=WAIT_S, keep_previous=True) as sender:
        sender.push(models.load_reference(before))
        seen["engines"] = list(sender.push(models.load_reference(after)).engines)
        seen["after"] = [generated(actor) for actor in held]
        seen["previous"] = [status.version for status in sender.status().values()]
        sender.rollback()
    seen["back"] = [generated(actor) for actor in held]
    seen["names"] = [repr(actor) for actor in held]
    return seen


def trainer(before, after):
    """A trainer that is an actor itself."""
    engine = remote(actors.Held, before)

    class Trainer:
        def push(self, engines):
            with Sender(engines, timeout_s=WAIT_S) as sender:
                return sender.push(models.load_reference(after)).version

        def push_into_itself(self):
            self.engine = actors.ReferenceInProcess(before)
            return raised(lambda: self.push([ray.get_runtime_context().current_actor]))

    pushing = remote(Trainer)
    version = ray.get(pushing.push.remote([engine]), timeout=WAIT_S)
    return {
        "version": version,
        "after": generated(engine),
        "fresh": reference(after),
        "itself": ray.get(pushing.push_into_itself.remote(), timeout=WAIT_S),
    }


def refused(before, after):
    """What is no engine, or does not answer."""
    model = models.load_reference(after)
    held = remote(actors.Held, before)
    fresh = generated(held)
    dead = remote(actors.Held, before)
    ray.kill(dead)
    seen = {
        "empty": raised(lambda: Sender([remote(actors.Empty)])),
        "two": raised(lambda: Sender([remote(actors.Two, before)])),
        "value": raised(lambda: Sender([ray.put(1)])),
        "dead": raised(lambda: Sender([dead])),
    }
    with Sender([held], timeout_s=BUSY_S / 2) as sender:
        busy = held.sleep.remote(BUSY_S)
        seen["busy"] = raised(lambda: sender.push(model))
        ray.get(busy, timeout=WAIT_S)
        seen["unchanged"] = generated(held) == fresh
        sender.push(model)
    seen["after"], seen["fresh"] = generated(held), reference(after)
    return seen


def beside(before, after):
    """The calls of an actor with coroutines while its engine is asked to commit."""
    held = remote(actors.CommitsWhenLet, before)
    with Sender([held], timeout_s=WAIT_S) as sender:
        pushed = sender.push_async(models.load_reference(after))
        ray.get(held.asked.remote(), timeout=WAIT_S)
        seen = {"meanwhile": generated(held), "done": pushed.done()}
        ray.get(held.let.remote(), timeout=WAIT_S)
        pushed.result()
    return {**seen, "after": generated(held), "fresh": [reference(before), reference(after)]}


def left(before, after):
    """The handle of an actor of a cluster that the trainer has left, in one that has an actor of the same name."""
    named = {"name": "engine", "namespace": "policy"}
    old = remote(actors.Held, before, **named)
    fresh = generated(old)
    ray.shutdown()
    with local_ray(PACKAGES, num_cpus=2):
        new = remote(actors.Held, before, **named)
        seen = {"error": raised(lambda: Sender([old])), "unchanged": generated(new) == fresh}
        with Sender([ray.get_actor(**named)], timeout_s=WAIT_S) as sender:
            sender.push(models.load_reference(after))
        return {**seen, "after": generated(new), "fresh": reference(after)}


def restarted(before, after):
    """An actor whose process dies, in a push and between two; Ray starts it again."""
    model = models.load_reference(after)
    killed, other = remote(actors.Held, before, **RESTARTS), remote(actors.HeldByCoroutines, before)
    with Sender([killed, other], timeout_s=WAIT_S) as sender:
        sender.push(model)
        ray.kill(killed, no_restart=False)
        errors = []
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                sender.catch_up()
            except WeightSyncError as error:
                errors.append(type(error).__name__)
                time.sleep(0.2)
            else:
                break
        after_it = [generated(killed), generated(other)]
        joined = remote(actors.Held, before)
        sender.add_engine(joined)
        return {"errors": errors, "after": [*after_it, generated(joined)], "fresh": reference(after)}


def engines(engine, door, kind, before, after):
    """A real engine in an actor of its own environment: over every transport one push, of both models by turns."""
    held = remote(getattr(actors, kind), door, before, runtime_env=in_environment_of(engine))
    seen = {"first": generated(held), "transports": [], "answers": []}
    for number, transport in enumerate(TRANSPORTS):
        with Sender([held], transport=transport, timeout_s=WAIT_S) as sender:
            (result,) = sender.push(models.load_reference((after, before)[number % 2])).engines.values()
            (status,) = sender.status().values()
            seen["ranks"] = len(status.ranks)
        seen["transports"].append(result.transport)
        seen["answers"].append(generated(held))
    return seen


def train_group(before, after):
    """A trainer of Ray Train: two workers, between which FSDP2 shards the model."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    held = [remote(actors.HeldByCoroutines, before), remote(actors.Held, before)]
    with tempfile.TemporaryDirectory() as results:
        TorchTrainer(
            train_and_push,
            train_loop_config={"folder": after, "engines": held},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=results),
        ).fit()
    return {"after": [generated(actor) for actor in held], "fresh": reference(after)}


def train_and_push(config):
    """What each worker runs."""
    from torch.distributed.fsdp import fully_shard

    model = models.load_reference(config["folder"])
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with Sender(config["engines"], timeout_s=WAIT_S) as sender:
        sender.push(model)


PARTS = {part.__name__: part for part in (kinds, trainer, refused, beside, restarted, engines, train_group, left)}


@contextlib.contextmanager
def local_ray(packages, *, num_cpus):
    """A local Ray whose workers find ``packages``."""
    path = {"PYTHONPATH": ":".join(map(str, (servers.ROOT, *packages)))}
    # Without the address Ray would join another one of this machine.
    local = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(**local, runtime_env={"env_vars": path})
    try:
        yield
    finally:
        ray.shutdown()


def main(parts, packages, *, num_cpus):
    """Run the part that the command line names, beside a local Ray whose workers find ``packages``."""
    part, *arguments = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr), local_ray(packages, num_cpus=num_cpus):
        seen = parts[part](*arguments)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(PARTS, PACKAGES, num_cpus=2)
