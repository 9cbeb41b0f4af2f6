"""Measure pushes into an engine in a Ray actor, beside one that is a server: `make bench-actors`.

A trainer in an actor pushes a model of 268 MB, by turns, into a reference engine that another actor holds and into one
that it reaches by URL; then models of other sizes into actors, from which follows what a push takes whatever its size.
Seconds are those of a whole push. Exit code 0 if all engines served what was pushed.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from typing import Any

import ray
import torch

from benchmarks import report
from benchmarks.far_deltas import model_folder
from benchmarks.trainer import ROOT
from tests.ray import actors
from tests.ray.run import PACKAGES, WAIT_S, local_ray, remote
from tools import models
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

MIN_ROUNDS, WARM_UP, SIZE, OTHER_SIZES = 15, 2, 268, (67, 134, 537)
#: How much longer a push may take with Ray, and the seconds that one over Ray Direct Transport may take at any size.
AIM, AIM_FIXED_S = 1.1, 0.15
TRANSPORTS = ("nixl", "ipc_zmq", "rdt")
ACTOR, SERVER = "engine in an actor", "engine by URL"
#: Ray has torch use one thread for each CPU that an actor asks for; a server uses all cores, so actors here do too.
THREADS = {"runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(torch.get_num_threads())}}}


class Trainer:
    """A trainer in an actor, and a sender for each engine."""

    def __init__(self, folder: str, engines: dict[str, Any]):
        self._model, self._engines = models.load_reference(folder), engines
        self._senders: dict[str, Sender] = {}

    def open(self, transport: str) -> None:
        """Push by this transport from now on."""
        for sender in self._senders.values():
            sender.close()
        self._senders = {
            name: Sender([engine], transport=transport, timeout_s=WAIT_S) for name, engine in self._engines.items()
        }

    def push(self, name: str) -> float:
        """Change every weight, and push; the seconds."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.neg_()
        start = time.perf_counter()
        self._senders[name].push(self._model)
        return time.perf_counter() - start

    def served(self, name: str) -> bool:
        """Whether an engine serves what the model is now."""
        (status,) = self._senders[name].status(digest=True).values()
        return [rank.digest for rank in status.ranks] == [digest_of(self._model.state_dict().items())]


def measure(transport: str, trainer: Any, rounds: int, *names: str) -> report.Record:
    """What the pushes into each engine took, and whether it served them."""
    ray.get(trainer.open.remote(transport), timeout=WAIT_S)
    found: dict[str, list[float]] = {name: [] for name in names}
    served = True
    for number in range(WARM_UP + rounds):
        for name in names if number % 2 else reversed(names):
            took = ray.get(trainer.push.remote(name), timeout=WAIT_S)
            served &= ray.get(trainer.served.remote(name), timeout=WAIT_S)
            if number >= WARM_UP:
                found[name].append(took)
    return {"seconds": found, "served": served}


def fit(sizes: dict[str, dict[str, report.Record]], transport: str) -> tuple[float, float, float]:
    """The seconds of a push without bytes, and the MB of each second more, by the line through the medians; and what
    share of its time a size is off that line, at most."""
    taken = {int(size): statistics.median(found[transport]["seconds"][ACTOR]) for size, found in sizes.items()}
    slope, intercept = statistics.linear_regression(list(taken), list(taken.values()))
    off = max(abs(intercept + slope * size - seconds) / seconds for size, seconds in taken.items())
    return intercept, 1 / slope, off


def row(transport: str, seconds: dict[str, list[float]]) -> str:
    """A line of the table."""
    cells = [f"{statistics.median(took):.3f} ({min(took):.3f} - {max(took):.3f})" for took in seconds.values()]
    return f"{transport:8} {'  '.join(f'{cell:24}' for cell in cells)}"


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    args = parser.parse_args()
    record: dict[str, Any] = {**report.here(), "ray": ray.__version__, "rounds": args.rounds}
    transports: dict[str, report.Record] = record.setdefault("transports", {})
    sizes: dict[str, dict[str, report.Record]] = record.setdefault("sizes", {})
    print(f"{SIZE} MB, {args.rounds} rounds, seconds; Ray {ray.__version__}; {report.machine(record)}", flush=True)
    print(f"{'':8} {'  '.join(f'{name:24}' for name in (ACTOR, SERVER))}")
    folder = str(model_folder(SIZE))
    os.environ.setdefault("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
    os.environ.update(RAY_worker_niceness="0")  # Ray's is 15: the server would get the cores first
    with local_ray(PACKAGES, num_cpus=2), ReferenceEngine(folder) as server:
        held = remote(actors.HeldByCoroutines, folder, **THREADS)
        trainer = remote(Trainer, folder, {ACTOR: held, SERVER: server.url}, **THREADS)
        for transport in TRANSPORTS:
            transports[transport] = found = measure(transport, trainer, args.rounds, ACTOR, SERVER)
            print(row(transport, found["seconds"]), flush=True)
        sizes[str(SIZE)] = transports
        for size in OTHER_SIZES:
            folder = str(model_folder(size))
            ray.kill(trainer)
            ray.kill(held)
            held = remote(actors.HeldByCoroutines, folder, **THREADS)
            trainer = remote(Trainer, folder, {ACTOR: held}, **THREADS)
            sizes[str(size)] = {one: measure(one, trainer, args.rounds, ACTOR) for one in TRANSPORTS}
            for transport, found in sizes[str(size)].items():
                print(row(transport, found["seconds"]), f"{size} MB", flush=True)
    for transport in TRANSPORTS:
        fixed_s, speed, off = fit(sizes, transport)
        print(f"{transport}: {fixed_s:.3f} s, and 1 s more for each {speed:.0f} MB, off by {100 * off:.0f} %")
        if transport == "rdt":
            print(report.at_most(f"{transport}, seconds of a push without bytes", fixed_s, AIM_FIXED_S))
    for transport, found in transports.items():
        share = statistics.median(found["seconds"][ACTOR]) / statistics.median(found["seconds"][SERVER])
        print(report.at_most(f"{transport}, {ACTOR}, in the time of an {SERVER}", share, AIM))
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name="actors")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(found["served"] for of_size in sizes.values() for found in of_size.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
