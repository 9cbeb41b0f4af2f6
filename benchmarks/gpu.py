"""Measure what one GPU can show: `make gpu`, which runs the tests of `tests/gpu` first.

A trainer of one process or two, and a reference engine in another, all on the same GPU. Every case has warm pushes of
models of a few large tensors, of many small ones, and of 16 GB: parameters are read in place, or go through an arena of
every process, by shared memory, NIXL or NCCL. Beside them stands the time of copying the same bytes once on the
device. Exit code 0 if the engine served what was pushed, and every case that the libraries allow has run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.blocks import COLUMNS, Blocks, engine
from benchmarks.lines import Lines, serve
from benchmarks.trainer import ROOT
from tools import servers
from weightsync import LocalShard, Sender
from weightsync.tensors.layout import digest_of

MIN_ROUNDS, WARM_UP = 5, 3
#: Seconds, far more than anything takes: to start a process and make its model; to push.
START_S, LIMIT_S = 30.0, 60.0
MANY = "18,000 tensors"
#: Tensors and the bytes of each.
MODELS = {"1 GB": (16, 64 << 20), "16 GB": (240, 64 << 20), MANY: (18_000, 15 << 10)}
#: Only one process pushes this: two would need room for four such models on the GPU while they make their halves.
ALONE = "16 GB"
#: The last ways that every machine has: what is served of the largest model is hashed after these alone.
LAST = ("nixl", "in place, not verified")
SMALL = {"16 MB": (16, 1 << 20), "300 tensors": (300, 15 << 10)}


#: How a trainer pushes: the options of its Sender.
WAYS: dict[str, dict[str, Any]] = {
    "in place": {},
    "in place, not verified": {"verify": "off"},
    "arena": {"transport": "ipc_zmq", "bucket_bytes": 64 << 20},
    "nixl": {"transport": "nixl"},
    "nccl": {"transport": "nccl"},
}
#: What is pushed to an engine that loads into a standby, which is copied to where the weights must stay. (Of many
#: tensors its loader, in Python, would be all that is measured.)
COPIED = ("in place", "in place, not verified")


# ---- the trainer's processes -----------------------------------------------------------------------------------------


class Trainer:
    """A process of a trainer of ``size`` processes, each of which has so many rows of every tensor."""

    def __init__(self, rank: int, size: int, count: int, nbytes: int, device: str, port: str, url: str):
        self._url, self._changes = url, 0
        self._sender: Sender | None = None
        if size > 1:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        whole = Blocks(count, nbytes, seed=1, device=device).state_dict()
        rows = nbytes // 2 // COLUMNS
        first, end = rank * rows // size, (rank + 1) * rows // size
        self._own = {name: tensor[first:end].clone() for name, tensor in whole.items()} if size > 1 else dict(whole)
        del whole
        if device == "cuda":
            torch.cuda.empty_cache()
        else:
            for tensor in self._own.values():
                tensor.share_memory_()
        boxes = {name: LocalShard(tensor, (rows, COLUMNS), (first, 0)) for name, tensor in self._own.items()}
        self._pushed: dict[str, Any] = boxes if size > 1 else self._own

    def open(self, way: str, _: bytes) -> None:
        """Build a Sender, instead of the one before."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._sender = Sender([self._url], timeout_s=LIMIT_S, **WAYS[way])

    def push(self, *_: object) -> dict[str, Any]:
        """Push what was changed since the last; what it took."""
        assert self._sender is not None, "open comes first"
        for tensor in self._own.values():
            tensor.neg_()
        self._changes += 1
        start = time.perf_counter()
        result = self._sender.push(self._pushed)
        return {
            "push": time.perf_counter() - start,
            **result.seconds,
            "pause": result.engines[self._url].pause_s,
            "reason": result.staging_reason,
            "changes": self._changes,
        }


def trainer(*arguments: Any) -> None:
    """Run a process of the trainer until its input ends."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    run = Trainer(*arguments)
    serve(Lines(0, writing), {"open": lambda way, body: run.open(way.replace("_", " "), body), "push": run.push})
    os._exit(0)


@contextlib.contextmanager
def running(size: int, model: tuple[int, int], device: str, url: str) -> Iterator[list[Lines]]:
    """The trainer; yields the lines of each process."""
    port = str(servers.free_port())
    with contextlib.ExitStack() as stack:
        lines = []
        for rank in range(size):
            asked = json.dumps([rank, size, *model, device, port, url])
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", "--trainer", asked], cwd=ROOT, **pipes)
            )
            stack.callback(process.kill)
            lines.append(Lines(process.stdout.fileno(), process.stdin.fileno()))
        yield lines


def said(lines: list[Lines], verb: str, channel: str = "-") -> Any:
    """Have every process do something; what the first answers. Raises RuntimeError with what a process has raised."""
    for one in lines:
        one.say(verb, channel.replace(" ", "_"))
    replies = list[tuple[str, str, bytes] | None]()
    for one in lines:
        try:
            replies.append(one.hear(START_S + LIMIT_S))
        except EOFError:
            raise SystemExit("a process of the trainer has ended") from None
    for reply in replies:
        if reply is None or reply[0] != "done":
            raise RuntimeError(f"no answer for {START_S + LIMIT_S:.0f} s" if reply is None else reply[2].decode())
    return json.loads(replies[0][2])


# ---- from outside ----------------------------------------------------------------------------------------------------


def copied(nbytes: int, device: str, rounds: int) -> list[float]:
    """The seconds of copying so many bytes on the device."""
    part = min(nbytes, 2 << 30)
    source, target = (torch.zeros(part, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(1 + rounds):
        start = time.perf_counter()
        for _ in range(max(1, nbytes // part)):
            target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def sampled(lines: list[Lines], way: str, rounds: int, url: str, digest: Callable[[int], str] | None) -> dict[str, Any]:
    """The pushes of one way, and whether what was pushed last is served (by ``digest`` after so many changes); or why
    there are none."""
    try:
        said(lines, "open", way)
        samples = [said(lines, "push") for _ in range(WARM_UP + rounds)][WARM_UP:]
    except RuntimeError as error:
        return {"refused": str(error)}
    with Sender([url]) as sender:
        (rank,) = sender.status(digest=digest is not None)[url].ranks
    served = None if digest is None else rank.digest == digest(samples[-1]["changes"])
    return {"samples": samples, "served": served, "loading": rank.loading}


def told(found: dict[str, Any], copy_s: float) -> str:
    """Medians of what was sampled, for people."""
    if "refused" in found:
        return f"refused: {found['refused'][:200]}"
    push, pause = (statistics.median(sample[key] for sample in found["samples"]) for key in ("push", "pause"))
    verdict = "  WRONG" if found["served"] is False else ""
    return f"{push * 1e3:10.2f} ms, {push / copy_s:8.1f} copies; pause {pause * 1e3:8.2f} ms{verdict}"


def measure(name: str, model: tuple[int, int], rounds: int, device: str) -> tuple[dict[str, Any], bool]:
    """What every case took with a model, and whether all was served."""
    count, nbytes = model
    copies = copied(count * nbytes, device, rounds)
    if device == "cuda":
        torch.cuda.empty_cache()

    @functools.cache
    def pushed(negative: bool) -> str:
        state = Blocks(count, nbytes, seed=1, device=device).state_dict()
        return digest_of((key, tensor.neg() if negative else tensor) for key, tensor in state.items())

    copy_s, right = statistics.median(copies), True
    print(f"{name}: one copy {copy_s * 1e3:.2f} ms", flush=True)
    ways = dict[str, Any]()
    for copied_there in (False, True) if name != MANY else (False,):
        sizes = (1,) if copied_there or name == ALONE else (1, 2)
        with engine(count, nbytes, device=device, copied=copied_there) as server:
            for size in sizes:
                with running(size, model, device, server.url) as lines:
                    for way in COPIED if copied_there else WAYS:
                        case = f"{'two processes' if size == 2 else 'one process'}, {way}"
                        case += ", by a standby" if copied_there else ""
                        hashed = name != ALONE or way == LAST[copied_there]
                        digest = (lambda changes: pushed(changes % 2 == 1)) if hashed else None
                        ways[case] = found = sampled(lines, way, rounds, server.url, digest)
                        right &= found.get("served", "NCCL refuses" in found.get("refused", "")) is not False
                        print(f"  {case:48}{told(found, copy_s)}", flush=True)
    return {"bytes": count * nbytes, "copy": copies, "ways": ways}, right


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--on-cpu", action="store_true", help="try every case on the CPU, with small models")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer(*json.loads(args.trainer))
    device = "cpu" if args.on_cpu else "cuda"
    head = report.here()
    head["torch"] = torch.__version__
    if device == "cuda":
        head["gpu"], head["nccl"] = torch.cuda.get_device_name(), list(torch.cuda.nccl.version())  # type: ignore[attr-defined,unused-ignore]
    print(f"{head.get('gpu', 'no GPU')}, torch {torch.__version__}, {args.rounds} rounds; {report.machine(head)}")
    models, right = dict[str, Any](), True
    for name, model in (SMALL if args.on_cpu else MODELS).items():
        models[name], fine = measure(name, model, args.rounds, device)
        right &= fine
        path = report.save({**head, "models": models}, kept=device == "cuda" and args.rounds >= MIN_ROUNDS, name="gpu")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
