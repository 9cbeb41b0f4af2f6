"""What tests/ray asks of pushes over Ray Direct Transport: ``python -m tests.ray.rdt PART ARGUMENTS``, as `run`."""

import contextlib
import gc
import os
import signal
import time

import psutil
import ray

from tests.ray import actors
from tests.ray.run import PACKAGES, RESTARTS, WAIT_S, generated, main, raised, reference, remote
from tools import models
from weightsync import Sender
from weightsync.errors import WeightSyncError
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.testing import ReferenceEngine

#: The model goes in many buckets, through two that are written again and again.
BUCKETS = {"transport": "rdt", "bucket_bytes": 1 << 14}
#: Seconds: the limit of a push during which a process freezes.
LIMIT_S = 10.0


class Halfway:
    """The tensors of a model; before the second half, a process gets the signal ``sent``: this one, or ``pid``."""

    def __init__(self, folder, sent, pid=0):
        self._pairs, self._sent = list(models.load_reference(folder).state_dict().items()), sent
        self._pid = pid or os.getpid()

    def metadata(self):
        return [spec_of(name, tensor) for name, tensor in self._pairs]

    def __iter__(self):
        for number, pair in enumerate(self._pairs):
            if number == len(self._pairs) // 2:
                os.kill(self._pid, self._sent)
            yield pair


class Held(actors.Held):
    """An engine that says what its process holds for others' tensors."""

    def left(self):
        return left()


class Trainer:
    """A trainer in an actor as a user writes it, without ``enable_tensor_transport``."""

    def pid(self):
        return os.getpid()

    def push(self, engines, *folders):
        """Push one model after the other; what is left in this process while it pushes, and afterwards."""
        seen = []
        with Sender(engines, timeout_s=WAIT_S, **BUCKETS) as sender:
            for folder in folders:
                sender.push(models.load_reference(folder))
                seen.append(left())
        return [*seen, left()]

    def push_halfway(self, engines, folder, sent):
        with Sender(engines, timeout_s=LIMIT_S, **BUCKETS) as sender:
            return raised(lambda: sender.push(Halfway(folder, sent)))


def left():
    """How many objects, and registrations of memory, Ray's transports have in this process."""
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, NixlTensorTransport)]
    return [sum(len(one._managed_meta_nixl) for one in found), sum(len(one._tensor_desc_cache) for one in found)]


def served(sender, folder):
    """Whether every rank serves the weights of a folder, by the digest of what it has."""
    wanted = digest_of(models.load_reference(folder).state_dict().items())
    return {rank.digest for status in sender.status(digest=True).values() for rank in status.ranks} == {wanted}


def push_until(sender, folder):
    """Push until an engine takes it, whose lease another trainer had; the kinds of the errors."""
    errors, end = set(), time.monotonic() + WAIT_S
    while True:
        try:
            sender.push(models.load_reference(folder))
        except WeightSyncError as error:
            errors.add(type(error).__name__)
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return sorted(errors)


def pid_of(actor):
    """The process of an actor, once it answers."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return ray.get(actor.pid.remote(), timeout=max(0.0, end - time.monotonic()))
        except ray.exceptions.ActorUnavailableError:  # it is being started
            time.sleep(0.1)


def pushes(before, after):
    """A driver, then an actor, that push into engines in actors."""
    held = [remote(Held, before), remote(Held, before, max_concurrency=4)]
    trainer, seen = remote(Trainer), {}
    with Sender(held, timeout_s=WAIT_S, verify="deep", **BUCKETS) as sender:
        results = [sender.push(models.load_reference(folder)) for folder in (after, before, after)]
        seen["transports"] = sorted({one.transport for result in results for one in result.engines.values()})
        seen["served"] = served(sender, after)
        seen["driver"] = [left()]
    seen["driver"].append(left())
    seen["tokens"] = [generated(actor) for actor in held]
    seen["fresh"] = reference(after)
    seen["trainer"] = ray.get(trainer.push.remote(held, before, after, before), timeout=WAIT_S)
    seen["engines"] = ray.get([actor.left.remote() for actor in held], timeout=WAIT_S)
    with Sender(held, timeout_s=WAIT_S) as sender:
        seen["again"] = served(sender, before)
    return seen


def trainers(before, after):
    """A trainer that is killed in a push, and pushes again once Ray has started it again; and one that freezes and goes
    on when another one has pushed."""
    held = remote(Held, before, max_concurrency=4)
    fresh, seen = generated(held), {}
    killed = remote(Trainer, **RESTARTS)
    pid = ray.get(killed.pid.remote(), timeout=WAIT_S)
    ended = killed.push_halfway.remote([held], after, signal.SIGKILL)
    ray.wait([ended], timeout=WAIT_S)
    seen["after_death"] = generated(held) == fresh
    with Sender([held], timeout_s=WAIT_S, **BUCKETS) as sender:
        seen["errors"] = push_until(sender, before)
        seen["next"] = served(sender, before)
    seen["restarted"] = pid_of(killed) != pid
    ray.get(killed.push.remote([held], after, before), timeout=WAIT_S)
    with Sender([held], timeout_s=WAIT_S) as sender:
        seen["pushed_again"] = served(sender, before)
    frozen = remote(Trainer)
    process = psutil.Process(ray.get(frozen.pid.remote(), timeout=WAIT_S))
    ended = frozen.push_halfway.remote([held], after, signal.SIGSTOP)
    end = time.monotonic() + WAIT_S
    while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
        time.sleep(0.05)
    try:
        seen["while_frozen"] = generated(held) == fresh
        with Sender([held], timeout_s=WAIT_S, **BUCKETS) as sender:
            seen["errors"] += push_until(sender, before)
            process.resume()
            seen["resumed"] = ray.get(ended, timeout=WAIT_S)
            seen["unharmed"] = served(sender, before)
    finally:
        process.resume()
    seen["engine"] = ray.get(held.left.remote(), timeout=WAIT_S)
    return seen


def engines(before, after):
    """An engine whose process dies, and one whose freezes, each beside another engine."""
    other, seen = remote(Held, before), {}
    fresh = generated(other)
    for name, sent, timeout_s in (("killed", signal.SIGKILL, WAIT_S), ("frozen", signal.SIGSTOP, LIMIT_S)):
        victim = remote(Held, before)
        process = psutil.Process(ray.get(victim.pid.remote(), timeout=WAIT_S))
        begin = time.monotonic()
        try:
            with Sender([victim, other], timeout_s=timeout_s, **BUCKETS) as sender:
                model = Halfway(after, sent, process.pid)
                seen[name] = raised(lambda: sender.push(model))  # noqa: B023 - called here
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        seen[f"{name}_s"] = time.monotonic() - begin
        seen[f"{name}_other"] = generated(other) == fresh
        ray.kill(victim)
    with Sender([other], timeout_s=WAIT_S, **BUCKETS) as sender:
        push_until(sender, after)
        seen["next"] = served(sender, after)
    return seen


def outside(before, after):
    """An engine of which Ray does not know, as of the processes that an engine in an actor starts; then a trainer."""
    seen, model = {}, models.load_reference(after)
    with ReferenceEngine(before) as server:
        with Sender([server.url], timeout_s=WAIT_S, **BUCKETS) as sender:
            seen["engine"] = [one.transport for one in sender.push(model).engines.values()]
            seen["served"] = served(sender, after)
        with Sender([server.url], timeout_s=WAIT_S) as sender:
            seen["auto"] = [one.transport for one in sender.push(model).engines.values()]
        seen["another"] = raised(lambda: of_another_ray(lambda: Sender([server.url], transport="rdt").push(model)))
        ray.shutdown()
        seen["trainer"] = raised(lambda: Sender([server.url], transport="rdt").push(model))
    return seen


def of_another_ray(act):
    """``act`` with a Ray that lacks a method that is used."""
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport

    agent = NixlTensorTransport.get_nixl_agent
    del NixlTensorTransport.get_nixl_agent
    try:
        act()
    finally:
        NixlTensorTransport.get_nixl_agent = agent


PARTS = {part.__name__: part for part in (pushes, trainers, engines, outside)}

if __name__ == "__main__":
    main(PARTS, PACKAGES, num_cpus=2)
