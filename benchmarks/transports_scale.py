"""Seconds of a push by the number of receivers, of many bytes and of very few: part of `transports`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import report
from benchmarks.rank import DIGEST, Channel, Rank
from benchmarks.transports_bandwidth import TENSORS, random_bytes
from weightsync.transports import registry

BYTES, CONTROL = "bytes", "control"
CONTROL_BYTES = 1024
MANY = 1000


class Line(NamedTuple):
    """Seconds of a push to n receivers: ``base`` + ``each`` * n."""

    base: float
    each: float

    def at(self, receivers: int) -> float:
        """The seconds with ``receivers``."""
        return self.base + self.each * receivers


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; returns the seconds by transport, by what is pushed, by number of receivers."""
    source = random_bytes(args.mib << 20)
    tensors = {BYTES: torch.split(source, source.numel() // TENSORS), CONTROL: (source[:CONTROL_BYTES],)}
    counts = sorted(set(args.receivers))
    asked = None if args.bucket_mib is None else args.bucket_mib << 20
    loads = []
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Rank(number)) for number in range(counts[-1])]
        channels = {
            (transport, kind, count): stack.enter_context(
                Channel(transport, ranks[:count], kind, tensors[kind], bucket_bytes=asked if kind == BYTES else None)
            )
            for transport in registry.available()
            for kind in (BYTES, CONTROL)
            for count in counts
        }
        for channel in channels.values():
            channel.push(DIGEST)
            channel.check()
        seconds: dict[tuple[str, str, int], list[float]] = {key: [] for key in channels}
        for index in range(args.rounds):
            start = time.perf_counter()
            loads.append(os.getloadavg()[0])
            turn = index * 5 % len(channels)
            keys = list(channels)
            for key in keys[turn:] + keys[:turn]:
                seconds[key].append(channels[key].push().total)
            print(f"  round {index + 1} of {args.rounds} ({time.perf_counter() - start:.1f} s)", flush=True)
        choice = channels[registry.available()[0], BYTES, counts[0]].choice
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    for (transport, kind, count), found in seconds.items():
        samples.setdefault(transport, {}).setdefault(kind, {})[str(count)] = found
    return {
        "nbytes": {BYTES: source.numel(), CONTROL: CONTROL_BYTES},
        "bucket_bytes": choice.bucket_bytes,
        "slots": choice.slots,
        "loads": loads,
        "samples": samples,
        "lines": {name: {kind: fit(found)._asdict() for kind, found in by.items()} for name, by in samples.items()},
    }


def fit(found: dict[str, list[float]]) -> Line:
    """The line through the medians, by least squares."""
    slope, base = np.polyfit([int(count) for count in found], [statistics.median(s) for s in found.values()], 1)
    return Line(float(base), float(slope))


def table(record: report.Record) -> str:
    """The whole report."""
    samples = record["samples"]
    counts = list(next(iter(samples.values()))[BYTES])
    lines = [
        f"milliseconds of a warm push (verify off) to n receivers, all on this machine: medians (min - max), "
        f"{len(record['loads'])} rounds; {record['slots']} buckets of {record['bucket_bytes'] / 2**20:g} MiB",
    ]
    for kind in (BYTES, CONTROL):
        nbytes = record["nbytes"][kind]
        what = f"{nbytes / 1e6:.0f} MB" if kind == BYTES else f"control only ({nbytes} bytes)"
        lines.append(f"{what:24}" + "".join(f"  {'n = ' + count:>21}" for count in counts) + "  a + b*n")
        for transport, by in samples.items():
            cells = "".join(f"  {_spread(by[kind][count]):>21}" for count in counts)
            line = Line(**record["lines"][transport][kind])
            fitted = f"{1000 * line.base:.2f} + {1000 * line.each:.2f}*n; n = {MANY}: {line.at(MANY):.2f} s"
            lines.append(f"{'  ' + transport:24}{cells}  {fitted}")
    cores = record["hardware"]["cores"]
    lines.append(f"the trainer and all receivers share {cores} cores; hosts of their own would not share b")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    values = [1000 * value for value in seconds]
    return f"{statistics.median(values):.1f} ({min(values):.1f} - {max(values):.1f})"


def plot(record: report.Record, path: Path) -> None:
    """Draw time against receivers: medians with their spread, and the fitted lines."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    titles = {BYTES: f"{record['nbytes'][BYTES] / 1e6:.0f} MB", CONTROL: f"control only, {CONTROL_BYTES} bytes"}
    for panel, (kind, title) in zip(panels, titles.items(), strict=True):
        for transport, by in record["samples"].items():
            counts = [int(count) for count in by[kind]]
            found = [[1000 * value for value in seconds] for seconds in by[kind].values()]
            medians = [statistics.median(values) for values in found]
            below = [median - min(values) for median, values in zip(medians, found, strict=True)]
            above = [max(values) - median for median, values in zip(medians, found, strict=True)]
            drawn = panel.errorbar(counts, medians, [below, above], fmt="o", capsize=3, label=transport)
            line = Line(**record["lines"][transport][kind])
            panel.plot(counts, [1000 * line.at(count) for count in counts], color=drawn[0].get_color(), alpha=0.6)
        panel.set(title=title, xlabel="receivers", ylabel="milliseconds of a warm push", xticks=counts, ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"medians, min - max, lines by least squares; {report.machine(record)}", fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
