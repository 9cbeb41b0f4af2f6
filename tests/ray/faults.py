"""Random deaths of actors during pushes: `make faults-ray ROUNDS=100`, and with `--engines real` into vLLM and SGLang.

Eight actors hold reference engines, or two hold real ones, and Ray starts again what died. In every round the process
of one is killed at a random moment of a push, while all are asked for answers. The push ends in time, each answer is of
one version, every engine that lives serves what was pushed or what it served before, as the sender says, and the next
pushes succeed. Seconds are those from the first answer of the new process until it serves what the others do.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import ray
from ray.exceptions import ActorUnavailableError, RayError

from tests.engines.conftest import BF16_ROUNDING
from tests.ray import actors
from tests.ray.run import PACKAGES, RESTARTS, in_environment_of, local_ray, remote
from tools import models
from weightsync import Sender
from weightsync.errors import WeightSyncError

REFERENCES, TRANSPORTS = 8, ("ipc_zmq", "nixl", "nccl", "rdt")
#: Seconds: the limit of a push, what it may take more, and those in which a new process has to answer.
LIMIT_S, LATE_S, START_S = 60.0, 15.0, 240.0
#: Seconds in which an engine whose new process answers serves what the others do.
BACK_S = 20.0


class Served:
    """Which of two models an answer comes from."""

    def __init__(self, folders):
        self.models = [models.load_reference(folder) for folder in folders]

    def _off(self, prompt, answer):
        """How far the logprob of each token is from that of each model."""
        tokens, logprobs = answer
        found = []
        for model in self.models:
            own = models.reference_logprobs(model, [*prompt, *tokens], len(prompt))
            found.append([abs(ours - theirs) for ours, theirs in zip(logprobs, own, strict=True)])
        return found

    def check(self, prompt, answer):
        """Raise AssertionError unless an answer comes from one model, or, as its request was in flight when a push
        committed, its first tokens from one and the others from the other."""
        off = self._off(prompt, answer)
        ways = [first[:at] + then[at:] for first, then in (off, off[::-1]) for at in range(len(off[0]) + 1)]
        nearest = min(map(statistics.mean, ways))
        assert nearest <= BF16_ROUNDING, f"an answer of neither model: {nearest:.2f} off, {answer}"

    def by(self, prompt, answer):
        """The number of the model; raises AssertionError if it is neither."""
        near = [number for number, off in enumerate(self._off(prompt, answer)) if statistics.mean(off) <= BF16_ROUNDING]
        assert len(near) == 1, f"an answer of {len(near)} models: {answer}"
        return near[0]


class Asking:
    """Asks actors for answers, one after the other, until it is left; ``answers`` has all. Only the victim may fail."""

    def __init__(self, held, victim):
        self._held, self._victim, self._over = held, victim, threading.Event()
        self.answers, self._failed = [], []
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "an actor does not answer"
        assert not self._failed, f"actors that live failed to answer: {self._failed}"
        assert self.answers, "no actor has answered"

    def _ask(self):
        while not self._over.is_set():
            for number, actor in enumerate(self._held):
                try:
                    self.answers.append(ray.get(actor.generate.remote(), timeout=LIMIT_S))
                except RayError as error:  # also a timeout
                    if number != self._victim:
                        self._failed.append(error)


class Actors:
    """Actors with engines, and the sender that pushes into them."""

    def __init__(self, folders, held, prompt, transport, real):
        self.served, self.held, self._prompt = Served(folders), held, prompt
        #: A real engine may answer a request while a push commits; the reference engine answers before or after it.
        self._check = self.served.check if real else self.served.by
        self.pids = [self.pid(number) for number in range(len(held))]
        self.now = [self.by(actor) for actor in held]
        self.sender = Sender(held, transport=transport, timeout_s=LIMIT_S)

    def by(self, actor):
        """The model that an actor serves."""
        return self.served.by(self._prompt, ray.get(actor.generate.remote(), timeout=LIMIT_S))

    def pid(self, number):
        """The process of an actor, once it answers."""
        end = time.monotonic() + START_S
        while True:
            try:
                return ray.get(self.held[number].pid.remote(), timeout=max(0.0, end - time.monotonic()))
            except ActorUnavailableError:  # it is being started
                time.sleep(0.1)

    def push(self, model):
        """Push a model; the error and what it says of each engine."""
        begin = time.monotonic()
        try:
            self.sender.push(self.served.models[model])
        except WeightSyncError as error:
            return type(error).__name__, {str(url): state for url, state in error.engines.items()}
        finally:
            assert time.monotonic() - begin < LIMIT_S + LATE_S, "a push that did not end in time"
        return "committed", {}

    def suffer(self, victim, after_s):
        """One round: how the push ended, the seconds until the new process served what the others do, the answers, and
        whether the process was killed while the push ran."""
        pushed = 1 - self.now[0]
        with Asking(self.held, victim) as asking:
            process = psutil.Process(self.pids[victim])
            processes = [process, *process.children(recursive=True)]
            killing = threading.Timer(after_s, os.kill, (self.pids[victim], signal.SIGKILL))
            killing.start()
            told, states = self.push(pushed)
            during = not killing.is_alive()
            killing.join()
        for answer in asking.answers:
            self._check(self._prompt, answer)
        for number, actor in enumerate(self.held):
            if number == victim:
                continue
            serves = self.by(actor)
            assert serves == pushed or told != "committed", f"{actor}: the push succeeded, and it serves another model"
            if states.get(repr(actor)) == "unchanged":
                assert serves == self.now[number], f"{actor} is not unchanged"
        ended(processes)
        self.pids[victim] = self.pid(victim)
        begin = time.monotonic()
        while self.push(pushed)[0] != "committed":
            assert time.monotonic() - begin < LIMIT_S, "no push succeeds"
        back_s = time.monotonic() - begin
        self.now = [self.by(actor) for actor in self.held]
        assert self.now == [pushed] * len(self.held), f"after the next push these are served: {self.now}"
        assert back_s < BACK_S, f"back after {back_s:.1f} s"
        return told, back_s, len(asking.answers), during


def ended(processes):
    """Wait until these processes have ended."""
    _, living = psutil.wait_procs(processes, LIMIT_S)
    assert not living, f"processes of a killed actor live on: {living}"


def held(real, folder):
    """The actors, and what they are asked."""
    if not real:
        return [remote(actors.HeldByCoroutines, folder, **RESTARTS) for _ in range(REFERENCES)], actors.PROMPT
    doors = ("vllm", "AsyncLlm"), ("sglang", "EngineInLoop")
    return [
        remote(actors.DoorsByCoroutines, door, folder, runtime_env=in_environment_of(engine), **RESTARTS)
        for engine, door in doors
    ], actors.doors.PROMPT


def deaths(these, transport, count, chance):
    """Rounds over a transport, a row for each."""
    begin = time.monotonic()
    assert these.push(1 - these.now[0])[0] == "committed"
    these.now = [1 - number for number in these.now]
    usual_s = time.monotonic() - begin
    everyone = range(len(these.held))
    for victim in itertools.islice(itertools.cycle(chance.sample(everyone, len(everyone))), count):
        after_s = chance.uniform(0, 1.2 * usual_s)
        told, back_s, answers, during = these.suffer(victim, after_s)
        print(f"{transport:8} actor {victim} after {after_s:5.2f} s: {told:20} back {back_s:4.1f} s", flush=True)
        yield [transport, victim, round(after_s, 3), told, round(back_s, 2), answers, during]


def main():
    """Run the rounds; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.ray.faults", description=__doc__)
    parser.add_argument("--engines", choices=("reference", "real"), default="reference")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    chance, found = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory(prefix="ws-") as scratch, local_ray(PACKAGES, num_cpus=2):
        folders = [models.make_model(Path(scratch, str(seed)), "llama", seed=seed) for seed in (0, 1)]
        engines, prompt = held(asked.engines == "real", str(folders[0]))
        for turn, transport in enumerate(TRANSPORTS):
            these = Actors(folders, engines, prompt, transport, asked.engines == "real")
            with these.sender:
                found += deaths(these, transport, len(range(turn, asked.rounds, len(TRANSPORTS))), chance)
    counted = Counter(row[3] for row in found).most_common()
    back, answers, during = [row[4] for row in found], sum(row[5] for row in found), sum(row[6] for row in found)
    print(
        f"{len(found)} deaths, {during} of them while the push ran, {answers} answers, 0 mixed, 0 hung: "
        f"{', '.join(f'{count} {what}' for what, count in counted)}; "
        f"back in {statistics.median(back):.1f} s ({min(back):.1f} to {max(back):.1f})"
    )
    if asked.results:
        record = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "seed": asked.seed, "deaths": found}
        (asked.results / f"faults-ray-{asked.engines}.json").write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
