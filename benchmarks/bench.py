"""Measure pushes into real engines next to a memcpy and to the engines' own ways: `make bench`.

For each engine one server runs on this machine's CPU. In every round each path is measured once, one after the other: a
memcpy of the model's bytes, building a sender, its first push, pushes after that (warm), the engine's own ways, pushes
without verification, and pushes of parameters in shared memory. Each push carries the other of two sets of weights. Of
warm pushes, and of the engine's own ways, the second of two in a row counts (of the latter with the same set again).
The first round checks what the engine serves after each push; the end checks that its weights are, bit by bit, those
that it loaded itself when it started.

Times are wall-clock seconds in the process that waits for the weights to be served; only vLLM's in-worker reload is
timed inside vLLM. Exit code 0 if the engine serves everything that was pushed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.peers import RELOAD, Peer, peers
from benchmarks.trainer import ROOT, Trainer, model_folders
from tools import servers
from tools.progress import alive
from weightsync import PushResult, Sender
from weightsync.protocol.http import Verify

PROMPT = list(b"The weights of a policy change every few seconds, and ")
NEW_TOKENS = 8
#: Natural-log units. Engine and trainer round bfloat16 in different orders; other weights differ by far more.
TOLERANCE = 0.3
MIN_ROUNDS = 7
#: Kinds of models whose parameters have their checkpoint names.
KINDS = ("qwen3_0_6b", "qwen3", "llama")

#: SGLang: memory beside 1.2 GB of weights. vLLM: the developers' routes, through which its own reload is called; the
#: server listens on the loopback interface only.
ARGS: dict[servers.Engine, list[str]] = {
    # Without the last option, SGLang's idle loop takes one core from everything measured here, its own ways included.
    "sglang": ["--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--sleep-on-idle"],
    "vllm": ["--worker-extension-cls", "peer_vllm.BenchExtension"],
}
ENVIRONMENT = {"sglang": {}, "vllm": {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT / "benchmarks")}}

Sample = dict[str, float]


class Bench:
    """One engine's rounds."""

    def __init__(self, server: servers.Server, trainer: Trainer, own_ways: dict[str, Peer]):
        self._server, self._trainer, self._own_ways = server, trainer, own_ways
        self._served = 0  # the server starts with set 0
        self.rounds: list[dict[str, Any]] = []
        #: By path: whether the engine served what was pushed, and the difference of log-probabilities.
        self.checks: list[dict[str, Any]] = []

    def run(self, rounds: int) -> None:
        """Run the rounds; the last push is of the weights that the engine started with, and is checked bit by bit."""
        with Sender([self._server.url]) as sender:
            started = self._digest(sender)
        for index in range(rounds):
            start = time.perf_counter()
            self.rounds.append(self._round(check=index == 0))
            shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in _totals(self.rounds[-1]).items())
            print(f"  round {index + 1} of {rounds} ({time.perf_counter() - start:.0f} s): {shown}", flush=True)
        with Sender([self._server.url]) as sender:
            self._served = 1
            self._push(sender)
            self._check("last push")
            self.checks[-1]["same_bits"] = self._digest(sender) == started

    def _round(self, *, check: bool) -> dict[str, Any]:
        found: dict[str, Any] = {"load_before": os.getloadavg()[0], "memcpy": self._trainer.memcpys()}
        start = time.perf_counter()
        with Sender([self._server.url]) as sender:
            found[report.BUILT] = {"seconds": time.perf_counter() - start}
            found["first push"] = self._push(sender)
            if check:
                self._check("first push")
            # The second one counts: it does nothing for the first time.
            found["first warm push"] = self._push(sender)
            found["warm push"] = self._push(sender)
            if check:
                self._check("warm push")
            for name, way in self._own_ways.items():
                # A full push comes before each, so that weights which a path leaves out are seen to be missing.
                self._push(sender)
                self._turn()
                # The second one counts, as with pushes; it has the same weights, so that the check below sees both.
                way(self._served)
                found[name] = way(self._served)
                if check:
                    self._check(name)
        shared = self._trainer.shared
        kinds: tuple[tuple[str, Verify, torch.nn.Module], ...] = (
            (report.UNVERIFIED, "off", self._trainer.module),
            (report.SHARED, "digest", shared),
            (report.SHARED_UNVERIFIED, "off", shared),
        )
        for name, verify, module in kinds:
            with Sender([self._server.url], verify=verify) as sender:
                for _ in range(2):
                    self._push(sender, module)
                found[name] = self._push(sender, module)
                if check:
                    self._check(name)
        return found

    def _digest(self, sender: Sender) -> str:
        """The digest of the weights that the engine computes with."""
        return sender.status(digest=True)[self._server.url].ranks[0].digest

    def _push(self, sender: Sender, module: torch.nn.Module | None = None) -> Sample:
        self._turn()
        start = time.perf_counter()
        result = sender.push(self._trainer.module if module is None else module)
        return {**_flat(result), "seconds": time.perf_counter() - start}

    def _turn(self) -> None:
        """Switch to the other set of weights."""
        self._served = 1 - self._served
        self._trainer.use(self._served)

    def _check(self, path: str) -> None:
        """Compare what the engine generates with both sets of weights."""
        tokens, logprobs = servers.greedy(self._server, PROMPT, NEW_TOKENS)
        off = []
        for index in range(2):
            own = self._trainer.logprobs(index, PROMPT, tokens)
            off.append(max(abs(a - b) for a, b in zip(logprobs, own, strict=True)))
        self._trainer.use(self._served)
        right, wrong = off[self._served], off[1 - self._served]
        self.checks.append({"path": path, "ok": right <= TOLERANCE < wrong, "off": right, "off_from_other_set": wrong})


def _flat(result: PushResult) -> Sample:
    """The times of a push into one engine as one flat table; the commit's steps keep their own names."""
    (engine,) = result.engines.values()
    phases = {name: seconds for name, seconds in result.seconds.items() if name != "total"}
    return {
        **phases,
        **{f"commit: {name}": seconds for name, seconds in engine.seconds.items()},
        "pause": engine.pause_s,
    }


def _totals(found: dict[str, Any]) -> Sample:
    return {name: sample["seconds"] for name, sample in found.items() if isinstance(sample, dict)}


def measure(engine: servers.Engine, kind: str, folders: list[Path], trainer: Trainer, rounds: int) -> dict[str, Any]:
    """Start the engine, run the rounds, and return the record of the run."""
    with contextlib.ExitStack() as stack:
        with alive(f"{engine}: starting the server"):
            server = stack.enter_context(servers.start(engine, folders[0], args=ARGS[engine], env=ENVIRONMENT[engine]))
        with alive(f"{engine}: loading what the engine's own ways push"):
            own_ways = stack.enter_context(peers(server, trainer, folders))
        bench = Bench(server, trainer, own_ways)
        print(f"{engine}: {rounds} rounds, seconds", flush=True)
        bench.run(rounds)
    return {
        "engine": engine,
        "model": kind,
        "nbytes": trainer.nbytes,
        "rounds": bench.rounds,
        "checks": bench.checks,
    }


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"at least {MIN_ROUNDS}, the default")
    parser.add_argument("--model", choices=KINDS, default=KINDS[0], help="a tiny one only shows that all this runs")
    args = parser.parse_args()
    if args.rounds < MIN_ROUNDS:
        parser.error(f"--rounds: medians are of at least {MIN_ROUNDS}")
    with alive(f"two models of kind {args.model} with random weights (made once)"):
        folders = model_folders(args.model)
        trainer = Trainer(folders)
    ran_well = True
    with trainer:
        for engine in dict.fromkeys(args.engines):
            record = {**report.about(engine), **measure(engine, args.model, folders, trainer, args.rounds)}
            path = report.save(record, kept=args.model == KINDS[0])
            print(f"\n{report.table(record, floor=RELOAD)}\nraw samples: {path.relative_to(ROOT)}\n", flush=True)
            ran_well &= report.pushes_served(record)
    return 0 if ran_well else 1


if __name__ == "__main__":
    sys.exit(main())
