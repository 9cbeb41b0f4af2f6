"""Measure the pause of a push, and rollbacks, in every way that weights get served: `make bench-pauses`.

A server for each case, on this machine's CPU, and this process, which pushes parameters in shared memory, now one set
of weights and now another. Packed layers are loaded into a standby, which is exchanged with what is served. Where
weights must stay at their addresses, as on a GPU, a load plan or a standby is copied there: on a CPU that is so with
packing off and `staying.Staying` in the workers. Quantised layers are so in the checkpoint (INT8), for which this
process quantises, or vLLM quantises them as it loads them. Every round has memcpys of the served bytes, a push, and a
rollback where a version before is held. The memory of each process (PSS) is sampled before the first push, in pushes
that are not timed, and at the end. Exit code 0 if every engine serves, at the end, what it served at the start.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
from safetensors.torch import load_file

from benchmarks import bare, report
from benchmarks.memory import peaks, sizes
from benchmarks.trainer import MEMCPYS, ROOT, made_once, model_folders
from tests.unit.quantised import each_channel, quantised_folder
from tools import models, servers
from weightsync import Sender

MIN_ROUNDS, WARM_UP = 7, 3
#: The aims: seconds of a pause or a rollback; memcpys of a pause in which weights are copied.
SECONDS_AIMS, COPY_AIM = {"vllm": 0.06, "sglang": 0.01}, 1.25
ROLLBACK_AIM = 0.06

Sample = dict[str, float]
#: Bytes by the name of a process, by when.
Memory = dict[str, dict[str, int]]


class Case(NamedTuple):
    """An engine, a model, whether weights stay where they are, and how its layers are quantised."""

    engine: servers.Engine
    kind: models.Kind
    stays: bool = False
    quantised: Literal["", "INT8", "fp8_per_channel"] = ""

    def __str__(self) -> str:
        more = ", weights stay" if self.stays else f", {self.quantised}" if self.quantised else ""
        return f"{self.engine}, {self.kind}{more}"


CASES = (
    Case("vllm", "qwen3_0_6b"),
    Case("vllm", "qwen3_moe_1b"),
    Case("vllm", "qwen3_0_6b", stays=True),
    Case("vllm", "qwen3_moe_1b", stays=True),
    Case("vllm", "qwen3_0_6b", quantised="INT8"),
    Case("vllm", "qwen3_0_6b", quantised="fp8_per_channel"),
    Case("sglang", "qwen3_0_6b"),
    Case("sglang", "qwen3_moe_1b"),
)


def started(case: Case, folder: Path) -> servers.Server:
    """The server of a case."""
    if case.engine == "sglang":
        # Without the last option, SGLang's idle loop takes one core from what is measured.
        args = ["--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--sleep-on-idle"]
        return servers.start(case.engine, folder, args=args)
    args = ["--worker-extension-cls", "staying.Staying"] if case.stays else []
    if case.quantised == "INT8":
        config = each_channel("int-quantized", "int")
        folder = made_once(f"{folder.name}-int8", lambda into: quantised_folder(folder, into, config))
    elif case.quantised:
        args = ["--quantization", case.quantised]
    return servers.start(case.engine, folder, args=args, env={"PYTHONPATH": str(ROOT / "benchmarks")})


def served_bytes(case: Case, weights: Mapping[str, torch.Tensor]) -> int:
    """The bytes of what is served: of a quantised layer one for each weight, and a scale for each row."""
    quantised = [name for name in weights if case.quantised and name.endswith("_proj.weight")]
    saved = sum(weights[name].nbytes - weights[name].numel() - 4 * len(weights[name]) for name in quantised)
    return sum(tensor.nbytes for tensor in weights.values()) - saved


def processes(server: servers.Server) -> dict[str, int]:
    """The trainer, which is this process, and those of the server, by name."""
    found = {"trainer": os.getpid()}
    for process in sorted(server.processes(), key=lambda process: process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            same = sum(other.partition(" #")[0] == name for other in found)
            found[f"{name} #{same + 1}" if same else name] = process.pid
    return found


def measured(case: Case, rounds: int, memory: Memory) -> Iterator[Sample]:
    """One sample of each round; adds to ``memory``. Raises SystemExit if the engine does not serve what was pushed."""
    folders = model_folders(case.kind)
    sets = [load_file(folder / "model.safetensors") for folder in folders]
    shared = {name: tensor.clone().share_memory_() for name, tensor in sets[0].items()}
    nbytes = served_bytes(case, shared)
    buffers = [torch.ones(nbytes, dtype=torch.uint8) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(case, folders[0]))
        pids = processes(server)
        memory |= {"before": sizes(pids), "pushing": {}}
        sender = stack.enter_context(Sender([server.url], timeout_s=300))
        first = digests(sender, server)
        for number in range(1, 1 + 2 * ((WARM_UP + rounds + 1) // 2)):
            sample = {"bytes": nbytes, "memcpy": statistics.median(bare.memcpy(*buffers) for _ in range(MEMCPYS))}
            for name, tensor in shared.items():
                tensor.copy_(sets[number % 2][name])
            with contextlib.nullcontext() if number > WARM_UP else peaks(pids, memory["pushing"]):
                start = time.perf_counter()
                result = sender.push(shared)
                sample["push"] = time.perf_counter() - start
            (engine,) = result.engines.values()
            sample |= {"pause": engine.pause_s, **{f"pause, {name}": took for name, took in engine.seconds.items()}}
            if not case.stays and number % 2 and number > WARM_UP:
                start = time.perf_counter()
                (engine,) = sender.rollback().engines.values()
                sample |= {"rollback": time.perf_counter() - start, "rollback, pause": engine.pause_s}
                if digests(sender, server) != first:
                    sys.exit(f"{case}: a rollback did not bring back what was served")
                sender.rollback()
            if number > WARM_UP:
                yield sample
        memory["after"] = sizes(pids)
        if digests(sender, server) != first:
            sys.exit(f"{case}: the engine does not serve what was pushed")


def all_measured(case: Case, rounds: int) -> tuple[list[Sample], Memory]:
    """As `measured`."""
    memory: Memory = {}
    return list(measured(case, rounds, memory)), memory


def digests(sender: Sender, server: servers.Server) -> list[str]:
    """Of what the ranks serve."""
    return [rank.digest for rank in sender.status(digest=True)[server.url].ranks]


def row(case: Case, samples: Sequence[Sample], memory: Memory) -> list[str]:
    """The lines of a case."""

    def spread(values: Sequence[float], unit: str, scale: float = 1e3) -> str:
        median, low, high = statistics.median(values), min(values), max(values)
        return f"{scale * median:8.2f} ({scale * low:.2f} to {scale * high:.2f}) {unit}"

    lines = []
    for what in ("memcpy", "push", "pause", "rollback", "rollback, pause"):
        if found := [sample[what] for sample in samples if what in sample]:
            copies = [sample[what] / sample["memcpy"] for sample in samples if what in sample]
            lines.append(f"  {what:16}{spread(found, 'ms')}, {spread(copies, 'memcpys', 1)}")
    pauses = [sample["pause"] for sample in samples]
    aim, found = SECONDS_AIMS[case.engine], statistics.median(pauses)
    said = f"a pause of at most {aim:g} s"
    if case.stays:
        aim, found = COPY_AIM, statistics.median(sample["pause"] / sample["memcpy"] for sample in samples)
        said = f"a pause of at most {aim:g} memcpys"
    lines.append(f"  aim: {said}: {found:.3f}: {'met' if found <= aim else 'MISSED'}")
    if back := [sample["rollback"] for sample in samples if "rollback" in sample]:
        met = "met" if statistics.median(back) <= ROLLBACK_AIM else "MISSED"
        lines.append(f"  aim: a rollback in at most {ROLLBACK_AIM:g} s: {statistics.median(back):.3f}: {met}")
    for name, before in memory["before"].items():
        found = [nbytes / 1e9 for nbytes in (before, memory["pushing"].get(name, 0), memory["after"].get(name, 0))]
        lines.append("  memory: {}: {:.2f} GB, at most {:.2f} while pushing, {:.2f} at the end".format(name, *found))
    return [f"{case}, {samples[0]['bytes'] / 1e9:.2f} GB", *lines]


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--only", default="", help="cases with this in their name, as 'INT8'; they are not kept")
    args = parser.parse_args()
    head = {**report.here(), "rounds": args.rounds}
    print(f"{args.rounds} rounds; {report.machine(head)}")
    found, memory = {}, {}
    for case in (case for case in CASES if args.only in str(case)):
        # In a process of its own, which gives back all memory: an engine takes what is free when it starts.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
            found[str(case)], memory[str(case)] = alone.submit(all_measured, case, args.rounds).result()
        print("\n".join(row(case, found[str(case)], memory[str(case)])), flush=True)
        kept = args.rounds >= MIN_ROUNDS and not args.only
        path = report.save({**head, "cases": found, "memory": memory}, kept=kept, name="pauses")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
