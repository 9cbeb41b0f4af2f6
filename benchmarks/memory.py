"""Measure the memory that a push adds to every process of a trainer and to the engine: `make bench-memory`.

A model of 2 GB is sharded by FSDP2 over four processes of this host, or over two pretended hosts of two, and pushed
into a reference engine. During three pushes the proportional set size of each process is sampled (PSS: memory that
several map counts in equal parts), and the size of its files in shared memory. What pushes add is the highest sample
less that before the first push. Exit code 0 if every process of the trainer stays within 1.1 times its share of the
model and two buckets, and the files within 1.1 times the model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.lines import LIMIT_S, Lines, serve
from benchmarks.trainer import ROOT, made_of
from tools import models, servers
from tools.progress import beside
from weightsync import Sender
from weightsync.memory import arenas
from weightsync.testing import ReferenceEngine

RANKS, PUSHES, SAMPLE_S, MOST = 4, 3, 0.02, 1.1
#: 1.0 billion parameters.
CONFIG = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 15, "num_attention_heads": 16}
_PARTS = 64


def model_folder() -> Path:
    """The model, made once."""
    config = LlamaConfig(vocab_size=259, torch_dtype="bfloat16", **CONFIG)
    return made_of("memory-model", lambda: LlamaForCausalLM(config))


def trainer(rank: int, port: str, folder: str, url: str, hosts: int) -> None:
    """Run a process of the trainer until its input ends."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = models.load_reference(Path(folder))
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    here = rank * hosts // RANKS
    if here:
        arenas.host_id = lambda: f"another {here}"
    with Sender([url], timeout_s=LIMIT_S) as sender:

        def push(*_: object) -> int:
            return sender.push(model).nbytes

        serve(Lines(0, writing), {"load": lambda *_: None, "push": push})
    os._exit(0)


def pss(pid: int) -> int:
    """The proportional set size of a process in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def sizes(pids: Mapping[str, int]) -> dict[str, int]:
    """The proportional set sizes in bytes of those processes that still run, by name."""
    found = {}
    for name, pid in pids.items():
        with contextlib.suppress(OSError):
            found[name] = pss(pid)
    return found


@contextlib.contextmanager
def peaks(pids: Mapping[str, int], most: dict[str, int]) -> Iterator[None]:
    """A thread raises ``most`` to the `sizes` that it samples inside the context, and at its end."""

    def sample() -> None:
        for name, nbytes in sizes(pids).items():
            most[name] = max(nbytes, most.get(name, 0))

    try:
        with beside(SAMPLE_S, sample):
            yield
    finally:
        sample()


def shared(pids: Sequence[int]) -> list[int]:
    """The bytes that files of each of these processes have in shared memory."""
    found = dict.fromkeys(pids, 0)
    for path in arenas.SHM_DIRECTORY.glob("weightsync-*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            pid = int(path.name.split("-")[1])
            if pid in found and path.is_file():
                found[pid] += path.stat().st_blocks * 512
    return list(found.values())


def measure(hosts: int) -> dict[str, Any]:
    """What pushes add to each process, in bytes."""
    folder, port = model_folder(), str(servers.free_port())
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(ReferenceEngine(folder))
        lines, pids = [], []
        for rank in range(RANKS):
            asked = json.dumps([rank, port, str(folder), engine.url, hosts])
            command = [sys.executable, "-m", "benchmarks.memory", "--trainer", asked]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, **pipes))
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdin is not None
            lines.append(Lines(process.stdout.fileno(), process.stdin.fileno()))
            pids.append(process.pid)
        return _sampled(lines, pids, engine.process.pid)


def _sampled(lines: Sequence[Lines], pids: Sequence[int], engine: int) -> dict[str, Any]:
    for one in lines:
        one.say("load")
    for one in lines:
        one.hear(LIMIT_S)
    before = [pss(pid) for pid in (*pids, engine)]
    most, files, nbytes = [0] * (len(pids) + 1), [0] * len(pids), 0
    for _ in range(PUSHES):
        for one in lines:
            one.say("push")
        waiting = list(lines)
        while waiting:
            added = (pss(pid) - first for pid, first in zip((*pids, engine), before, strict=True))
            most, files = list(map(max, most, added)), list(map(max, files, shared(pids)))
            for one in list(waiting):
                if (heard := one.hear(SAMPLE_S)) is not None:
                    if heard[0] != "done":
                        raise RuntimeError(f"a push failed: {heard}")
                    nbytes = json.loads(heard[2])
                    waiting.remove(one)
    return {"nbytes": nbytes, "processes": most[:-1], "engine": most[-1], "shared": files}


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer(*json.loads(args.trainer))
    head = {**report.here(), "torch": torch.__version__}
    print(f"{RANKS} processes, {PUSHES} pushes; {report.machine(head)}\nMB")
    print(f"{'':24}{'share':>7}{'limit':>7}{'most of a process':>19}{'shared memory':>15}{'engine':>8}", flush=True)
    cases, fine = {}, True
    for hosts in (1, 2):
        said = cases[f"{hosts} hosts"] = measure(hosts)
        share = said["nbytes"] / RANKS
        bucket = said["nbytes"] / _PARTS
        limit, total = MOST * (share + 2 * bucket), sum(said["shared"])
        fine &= max(said["processes"]) <= limit and total <= MOST * said["nbytes"]
        numbers = (share, limit, max(said["processes"]), total, said["engine"])
        row = "".join(f"{number / 1e6:{width}.0f}" for number, width in zip(numbers, (7, 7, 19, 15, 8), strict=True))
        print(f"{hosts} host{'s' * (hosts > 1):23}{row}", flush=True)
    path = report.save({**head, "cases": cases}, kept=True, name="memory")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
