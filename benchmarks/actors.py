"""Measure pushes into an engine in a Ray actor, beside one that is a server: `make bench-actors`.

A trainer in an actor pushes a model of 268 MB, by turns, into a reference engine that another actor holds and into one
that it reaches by URL. Seconds are those of a whole push. Exit code 0 if both engines served what was pushed.
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

MIN_ROUNDS, WARM_UP, SIZE = 15, 2, 268
#: How much longer a push may take with Ray.
AIM = 1.1
TRANSPORTS = ("nixl", "ipc_zmq")
ACTOR, SERVER = "engine in an actor", "engine by URL"


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


def measure(transport: str, trainer: Any, rounds: int) -> report.Record:
    """What the pushes into each engine took, and whether it served them."""
    ray.get(trainer.open.remote(transport), timeout=WAIT_S)
    found: dict[str, list[float]] = {ACTOR: [], SERVER: []}
    served = True
    for number in range(WARM_UP + rounds):
        for name in (ACTOR, SERVER) if number % 2 else (SERVER, ACTOR):
            took = ray.get(trainer.push.remote(name), timeout=WAIT_S)
            served &= ray.get(trainer.served.remote(name), timeout=WAIT_S)
            if number >= WARM_UP:
                found[name].append(took)
    return {"seconds": found, "served": served}


def row(transport: str, seconds: dict[str, list[float]]) -> str:
    """A line of the table."""
    cells = [f"{statistics.median(took):.3f} ({min(took):.3f} - {max(took):.3f})" for took in seconds.values()]
    return f"{transport:8} {'  '.join(f'{cell:24}' for cell in cells)}"


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    args = parser.parse_args()
    record: dict[str, Any] = {**report.here(), "ray": ray.__version__, "rounds": args.rounds, "transports": {}}
    print(f"{SIZE} MB, {args.rounds} rounds, seconds; Ray {ray.__version__}; {report.machine(record)}", flush=True)
    print(f"{'':8} {'  '.join(f'{name:24}' for name in (ACTOR, SERVER))}")
    folder = str(model_folder(SIZE))
    os.environ.setdefault("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
    with local_ray(PACKAGES, num_cpus=2), ReferenceEngine(folder) as server:
        held = remote(actors.HeldByCoroutines, folder)
        trainer = remote(Trainer, folder, {ACTOR: held, SERVER: server.url})
        for transport in TRANSPORTS:
            record["transports"][transport] = found = measure(transport, trainer, args.rounds)
            print(row(transport, found["seconds"]), flush=True)
    for transport, found in record["transports"].items():
        share = statistics.median(found["seconds"][ACTOR]) / statistics.median(found["seconds"][SERVER])
        print(report.at_most(f"{transport}, {ACTOR}, in the time of an {SERVER}", share, AIM))
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name="actors")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(found["served"] for found in record["transports"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
