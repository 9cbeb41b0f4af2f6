"""Measure a push by the size of the model and by the number of its tensors: `make bench-sizes`.

One trainer, which is this process, and a reference engine that loads by its load plan, on this machine's CPU. For every
model and way to push it (from private or shared memory, verified or not), every round has memcpys of its bytes and a
warm push; afterwards the engine's weights are compared with what was pushed. One series of models varies the number of
tensors at one size, where 16 bytes a tensor show the cost apart from the bytes; another varies the size at one number.
With ``--engine vllm`` or ``--engine sglang`` it measures what a push costs that moves nothing, into that engine, see
`control`. Exit code 0 if everything was served.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import bare, control, report
from benchmarks.blocks import Blocks, InProcess, engine
from benchmarks.trainer import MEMCPYS, ROOT
from tools import servers
from weightsync import PushResult, Sender
from weightsync.protocol.http import Verify

MIN_ROUNDS = 7
SMALL, NOTHING, TENSORS = 15 << 10, 16, 300
#: The share of a memcpy's speed to reach with many small tensors.
AIM, CONTROL_AIM_S, IN_PROCESS_AIM_S = 0.50, 0.005, 0.002
PHASES = ("look", "prepare", "gather", "digest", "verify", "commit", "rest")


class Model(NamedTuple):
    """``count`` tensors of ``nbytes`` each."""

    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.count} x {self.nbytes} bytes"


COUNTS = [Model(count, SMALL) for count in (300, 1000, 3000, 9000, 18000)]
EMPTY = [Model(count, NOTHING) for count in (300, 1000, 3000, 9000, 18000)]
SIZES = [Model(TENSORS, mib * (1 << 20) // TENSORS // 512 * 512) for mib in (16, 64, 256, 1024)]

WAYS: dict[str, tuple[bool, Verify]] = {
    "private memory, verified": (False, "digest"),
    "private memory, not verified": (False, "off"),
    "shared memory, verified": (True, "digest"),
    "shared memory, not verified": (True, "off"),
}
IN_PROCESS = "engine of this process, verified"
Sample = dict[str, float]


def measure(model: Model, rounds: int) -> dict[str, Any]:
    """The seconds of every round, by path and phase."""
    private = Blocks(*model, seed=1)
    shared = Blocks(*model, seed=2).share_memory()
    buffers = [torch.ones(private.nbytes, dtype=torch.uint8) for _ in range(2)]
    samples: dict[str, list[Sample]] = {}
    served = True
    with engine(*model) as server:
        for way, (in_place, verify) in WAYS.items():
            module = shared if in_place else private
            with Sender([server.url], verify=verify) as sender:
                for _ in range(2):
                    sender.push(module)
                samples[way] = [_sample(sender, module, buffers) for _ in range(rounds)]
                (rank,) = sender.status(digest=True)[server.url].ranks
                served &= rank.digest == module.digest()
    with Sender([InProcess(*model)]) as sender:
        for _ in range(2):
            sender.push(private)
        samples[IN_PROCESS] = [_sample(sender, private, buffers) for _ in range(rounds)]
        (reply,) = sender.status(digest=True).values()
        served &= reply.ranks[0].digest == private.digest()
    return {**model._asdict(), "samples": samples, "served": served}


def _sample(sender: Sender, module: Blocks, buffers: list[torch.Tensor]) -> Sample:
    memcpy = statistics.median(bare.memcpy(*buffers) for _ in range(MEMCPYS))
    start = time.perf_counter()
    result = sender.push(module)
    return {"memcpy": memcpy, **_phases(result, time.perf_counter() - start)}


def _phases(result: PushResult, seconds: float) -> Sample:
    """The phases of a push; ranks verify while the trainer packs, if there are cores for both."""
    parts = result.seconds
    known = parts["prepare"] + parts["transfer"] + parts["commit"]
    return {
        "seconds": seconds,
        "look": seconds - known,
        "prepare": parts["prepare"],
        "gather": parts["gather"],
        "digest": parts["digest"],
        "verify": parts["verify"],
        "commit": parts["commit"],
        "rest": max(0.0, parts["transfer"] - parts["gather"] - parts["digest"] - parts["verify"]),
    }


def _median(found: list[Sample], phase: str = "seconds") -> float:
    return statistics.median(sample[phase] for sample in found)


def _of_memcpy(found: list[Sample], phase: str = "seconds") -> float:
    return statistics.median(sample["memcpy"] / sample[phase] for sample in found)


def table(record: report.Record) -> str:
    """The whole report."""
    lines = [f"reference engine, medians of {record['rounds']} rounds, milliseconds; {report.machine(record)}"]
    for one in record["models"]:
        memcpy = [sample["memcpy"] for found in one["samples"].values() for sample in found]
        nbytes = one["count"] * one["nbytes"]
        lines.append(f"{Model(one['count'], one['nbytes'])}: {nbytes / 1e6:.1f} MB, memcpy {_ms(memcpy)}")
        for way, found in one["samples"].items():
            of = _of_memcpy(found)
            phases = ", ".join(f"{phase} {1e3 * _median(found, phase):.1f}" for phase in PHASES)
            seconds = [sample["seconds"] for sample in found]
            lines.append(f"  {way:34} {_ms(seconds):>24}  {of:5.2f} of memcpy's speed: {phases}")
    lines += _verdicts(record)
    lines.append(f"served: {'yes' if _served(record) else 'NO'}")
    return "\n".join(lines)


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f})"


def _verdicts(record: report.Record) -> list[str]:
    by_model = {Model(one["count"], one["nbytes"]): one for one in record["models"]}
    many, lines = by_model.get(COUNTS[-1]), []
    if many is not None:
        found = many["samples"]["shared memory, not verified"]
        for what, phase in (("a push, parameters in shared memory and not verified,", "seconds"), ("apply", "commit")):
            of = _of_memcpy(found, phase)
            text = f"aim: {COUNTS[-1]}: {what} at least {AIM:g} of memcpy's speed: {of:.2f}"
            lines.append(f"{text}: {'met' if of >= AIM else 'MISSED'}")
    for model in EMPTY:
        if model in by_model:
            for way, aim_s in (("private memory, verified", CONTROL_AIM_S), (IN_PROCESS, IN_PROCESS_AIM_S)):
                if found := by_model[model]["samples"].get(way):
                    found_s = _median(found)
                    text = f"aim: {model}, {way}: at most {1e3 * aim_s:g} ms: {1e3 * found_s:.1f}"
                    lines.append(f"{text}: {'met' if found_s <= aim_s else 'MISSED'}")
    return lines


def _served(record: report.Record) -> bool:
    return all(one["served"] for one in record["models"])


def plot(record: report.Record, path: Path) -> None:
    """Draw the stacked medians of the phases, by size and by number of tensors."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    by_model = {Model(one["count"], one["nbytes"]): one for one in record["models"]}
    series = (
        ("size, MB", SIZES, 1e-6),
        (f"tensors of {SMALL >> 10} KiB", COUNTS, 0),
        ("tensors of 16 bytes", EMPTY, 0),
    )
    ways = ("private memory, verified", "shared memory, not verified")
    figure, panels = pyplot.subplots(len(ways), len(series), figsize=(14, 8), layout="constrained")
    for row, way in zip(panels, ways, strict=True):
        for panel, (label, models, scale) in zip(row, series, strict=True):
            there = [model for model in models if model in by_model]
            xs = [f"{m.count * m.nbytes * scale:.0f}" if scale else str(m.count) for m in there]
            below = [0.0] * len(there)
            for phase in PHASES:
                heights = [1e3 * _median(by_model[model]["samples"][way], phase) for model in there]
                panel.bar(xs, heights, bottom=below, label=phase)
                below = [a + b for a, b in zip(below, heights, strict=True)]
            memcpys = [1e3 * _median(by_model[model]["samples"][way], "memcpy") for model in there]
            panel.plot(xs, memcpys, "k_", markersize=24, label="memcpy of the bytes")
            panel.set(title=way, xlabel=label, ylabel="milliseconds of a warm push")
            panel.grid(alpha=0.3, axis="y")
    panels[0][0].legend()
    figure.suptitle(
        f"reference engine, medians, ranks verify while the trainer packs; {report.machine(record)}", fontsize=8
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _control(engine: servers.Engine, rounds: int) -> int:
    record = control.record(engine, rounds)
    path = report.save(record, kept=rounds >= MIN_ROUNDS, name=f"control-{engine}")
    print(f"{control.table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if control.is_served(record) else 1


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("reference", "vllm", "sglang"), default="reference")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--only", help="models with this in their name, as '18000 x'")
    args = parser.parse_args()
    if args.engine != "reference":
        return _control(args.engine, args.rounds)
    # Every parameter in shared memory is an open file here, and for a moment in the engine.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    models = [model for model in (*SIZES, *COUNTS, *EMPTY) if (args.only or "") in str(model)]
    measured = []
    for number, model in enumerate(models, 1):
        print(f"{number} of {len(models)}: {model}", flush=True)
        measured.append(measure(model, args.rounds))
    record = {
        **report.here(),
        "rounds": args.rounds,
        "models": measured,
    }
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS and not args.only, name="sizes")
    picture = path.with_suffix(".png")
    plot(record, picture)
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}, plot: {picture.relative_to(ROOT)}")
    return 0 if _served(record) else 1


if __name__ == "__main__":
    sys.exit(main())
