"""Measure pushes of a model that FSDP2 has sharded over two processes, beside gathering it: `make bench-sharded`.

Two trainer processes on this machine's CPU, each with half of the model's bytes, and a reference engine, or with
``--engine sglang`` SGLang over two ranks. In every round each path is measured once, one after the other: a memcpy of
the model's bytes; a warm push of the shards, verified and not, and over NIXL; and the same the usual way, in which
every process calls ``full_tensor()`` on every parameter and the whole model is pushed; and a model that both processes
hold whole, with their copies compared at each push, and not. The report has the bytes that the trainers wrote and those
that the engine's ranks read, and the engine's weights are compared after each push. Exit code 0 if all is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks import bare, report
from benchmarks.trainer import ROOT, model_folders
from tools import models, servers
from weightsync import Sender
from weightsync.protocol.http import Verify
from weightsync.testing import ReferenceEngine
from weightsync.trainer.ranks import assembly
from weightsync.trainer.ranks.assembly import CheckReplicas

KIND: models.Kind = "qwen3_0_6b"
MIN_ROUNDS = 7
RANKS = 2
WAYS: tuple[tuple[str, Verify, str], ...] = (
    ('verify="off"', "off", "ipc_zmq"),
    ("verified", "digest", "ipc_zmq"),
    ("verified, nixl", "digest", "nixl"),
)
MEMCPY = report.MEMCPY
#: A model that both processes hold whole.
COPIES: dict[str, CheckReplicas] = {"copies": "first", "copies, compared": "always"}


class Rank:
    """One process of the trainer."""

    def __init__(self, folder: Path, url: str):
        self.model, self._whole = models.load_reference(folder), models.load_reference(folder)
        self.nbytes = sum(parameter.nbytes for parameter in self.model.parameters())
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._url, self._written = url, 0
        self._buffers = [torch.ones(self.nbytes, dtype=torch.uint8) for _ in range(2)] if dist.get_rank() == 0 else []
        write = assembly.write

        def counting(*args: Any) -> Any:
            work = write(*args)
            self._written += work.nbytes
            return work

        assembly.write = counting

    def _memcpy(self) -> float:
        dist.barrier()
        seconds = bare.memcpy(*self._buffers) if self._buffers else 0.0
        dist.barrier()
        return seconds

    def _weights(self, *, gathered: bool) -> Any:
        if not gathered:
            return self.model
        return {
            name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"  # tied
        }

    def measure(self, rounds: int) -> dict[str, Any]:
        """The seconds by path and round, and the bytes that this process wrote in a push of its shards."""
        samples: dict[str, list[float]] = {MEMCPY: []}
        written, served = 0, set[str]()
        for _ in range(rounds):
            samples[MEMCPY].append(self._memcpy())
            for what, verify, transport in WAYS:
                for gathered in (False, True):
                    with Sender([self._url], verify=verify, transport=transport) as sender:
                        for _ in range(3):  # the last one counts
                            dist.barrier()
                            self._written, start = 0, time.perf_counter()
                            sender.push(self._weights(gathered=gathered))
                            seconds = time.perf_counter() - start
                        ranks = sender.status(digest=True)[self._url].ranks
                        served.add(" ".join(rank.digest for rank in ranks))
                        written = written if gathered else self._written
                        samples.setdefault(_name(what, gathered=gathered), []).append(seconds)
            for what, how in COPIES.items():
                with Sender([self._url], check_replicas=how) as sender:
                    for _ in range(3):
                        dist.barrier()
                        start = time.perf_counter()
                        sender.push(self._whole)
                        seconds = time.perf_counter() - start
                    samples.setdefault(what, []).append(seconds)
        return {"samples": samples, "written": written, "nbytes": self.nbytes, "served": sorted(served)}


def _name(what: str, *, gathered: bool) -> str:
    return f"{'gathered' if gathered else 'shards'}, {what}"


def trainer(folder: Path, url: str, rounds: int, results: Path) -> None:
    """Run one trainer process, under torchrun."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = Rank(folder, url).measure(rounds)
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def table(record: report.Record) -> str:
    """The whole report."""
    samples, memcpy = record["samples"], record["samples"][MEMCPY]
    width = max(map(len, samples))
    lines = [
        f"{record['nbytes'] / 1e9:.2f} GB over {RANKS} processes, {record['engine']}, {len(memcpy)} rounds\n"
        f"{report.machine(record)}",
        f"{'':{width}}  {'median':>8}  {'min - max':>15}  {'memcpys':>8}",
    ]
    for name, seconds in samples.items():
        spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
        ratio = statistics.median(a / b for a, b in zip(seconds, memcpy, strict=True))
        lines.append(f"{name:{width}}  {statistics.median(seconds):8.3f}  {spread:>15}  {ratio:8.2f}")
    for what, *_ in WAYS:
        shards, gathered = (_name(what, gathered=gathered) for gathered in (False, True))
        found = statistics.median(a / b for a, b in zip(samples[gathered], samples[shards], strict=True))
        lines.append(f"{gathered} takes {found:.2f} times as long as {shards}")
    compared = statistics.median(a - b for a, b in zip(samples["copies, compared"], samples["copies"], strict=True))
    lines.append(f"comparing the copies takes {compared:.3f} s")
    lines.append(f"bytes written by each process: {record['written']}; the model has {record['nbytes']}")
    lines += [f"rank {number}: {way}" for number, way in enumerate(record["loading"])]
    lines.append(f"served: {'yes' if record['served'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["reference", "sglang"], default="reference")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--trainer", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        folder, url, results = args.trainer
        trainer(Path(folder), url, args.rounds, Path(results))
        return 0
    before, after = model_folders(KIND)
    results = ROOT / ".work" / "bench" / "sharded"
    results.mkdir(parents=True, exist_ok=True)
    sglang = args.engine == "sglang"
    with servers.start("sglang", before, tp=RANKS) if sglang else ReferenceEngine(before) as engine:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        command += [__file__, "--rounds", str(args.rounds), "--trainer", str(after), engine.url, str(results)]
        subprocess.run(command, check=True)
        with Sender([engine.url]) as sender:
            sender.push(after)
            ranks = sender.status(digest=True)[engine.url].ranks
    found = [json.loads((results / f"{rank}.json").read_text()) for rank in range(RANKS)]
    record = {
        **report.here(),
        "engine": f"SGLang over {RANKS} ranks" if sglang else "reference engine",
        "nbytes": found[0]["nbytes"],
        "written": [one["written"] for one in found],
        "loading": [rank.loading for rank in ranks],
        "served": found[0]["served"] == [" ".join(rank.digest for rank in ranks)],
        "samples": found[0]["samples"],
    }
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name="sharded-sglang" if sglang else "sharded")
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if record["served"] and sum(record["written"]) == record["nbytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
