"""Measure the transports next to the bare libraries below them, on this machine's CPU.

    .venv/bin/python benchmarks/transports.py bandwidth chunks scale

One trainer, which is this process, and engine ranks in child processes; no engine, no model, and only the loopback
interface.

``bandwidth``: one rank. GB/s (10^9 bytes a second) of a warm `Outgoing.send`, from its start until the rank has
confirmed, verified and not; of one that sends what is in the arena already, as to a late engine; of the bare library
with the same bytes; and of a memcpy of them in one thread. The aim is 90 % of the faster bare way in the same
direction.

``chunks``: one rank, bare NIXL. GB/s of READs by size of a descriptor and number of descriptors in a request; seconds
to read many small tensors, with one descriptor each or gathered into one piece first.

``scale``: 1 to 8 ranks, each the only one of its engine. Seconds of a warm push of many bytes and of 1 KiB, from the
request (over a pipe, not HTTP) until every rank has the bytes; a line fitted to the medians, and a plot.

In every round of a part each path is measured once, one after the other, and each round begins with another; before the
first round all paths run once, and what has arrived is compared. Exit code 0 if all of that was right. With the default
of ``--mib``, ``bandwidth`` takes 11 GB of memory, and ``scale`` 6 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import weightsync
from benchmarks import report, transports_bandwidth, transports_chunks, transports_scale
from benchmarks.trainer import ROOT

MIN_ROUNDS = 7
#: UCX must not listen on any other interface, and NIXL must not write to stdout.
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}


class Part(NamedTuple):
    """One part: how many MiB it moves by default, and how it is measured and shown."""

    mib: int
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    table: Callable[[report.Record], str]


PARTS = {
    "bandwidth": Part(1024, transports_bandwidth.measure, transports_bandwidth.table),
    "chunks": Part(256, transports_chunks.measure, transports_chunks.table),
    "scale": Part(256, transports_scale.measure, transports_scale.table),
}


def about() -> report.Record:
    """When and on which hardware a run takes place."""
    versions = {"weightsync": weightsync.__version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        versions["nixl"] = importlib.metadata.version("nixl")
    except importlib.metadata.PackageNotFoundError:
        versions["nixl"] = ""
    return {
        **report.here(),
        "versions": versions,
        "environment": {name: value for name, value in os.environ.items() if name.startswith("UCX_")},
    }


def main() -> int:
    """Run the requested parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them by default")
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--mib", type=int, help="what is moved; by default 1024, for chunks and scale 256")
    parser.add_argument("--bucket-mib", type=int, help="size of our buckets; by default as a sender would choose")
    parser.add_argument(
        "--receivers", type=int, nargs="+", default=[1, 2, 4, 8], help="for scale; at least two numbers"
    )
    args = parser.parse_args()
    unknown = set(args.parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}, only {', '.join(PARTS)}")
    if args.rounds < 1 or (args.mib is not None and (args.mib < 64 or args.mib % 64)):
        parser.error("--rounds: at least 1; --mib: a multiple of 64")
    if len(set(args.receivers)) < 2 or min(args.receivers) < 1:
        parser.error("--receivers: a line takes two different numbers")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the children end too
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in dict.fromkeys(args.parts or PARTS):
        part = PARTS[name]
        asked = argparse.Namespace(**{**vars(args), "mib": args.mib or part.mib})
        print(f"{name}: {asked.mib} MiB, {asked.rounds} rounds", flush=True)
        head = {**about(), "part": name, "mib": asked.mib}
        record = {**head, "load_before": os.getloadavg()[0], **part.measure(asked)}
        kept = asked.rounds >= MIN_ROUNDS and asked.mib >= part.mib and args.bucket_mib is None
        path = report.save(record, kept=kept, name=f"transports-{name}")
        print(f"\n{report.machine(record)}\n{part.table(record)}\nraw samples: {path.relative_to(ROOT)}", flush=True)
        if name == "scale":
            picture = path.with_suffix(".png")
            transports_scale.plot(record, picture)
            print(f"plot: {picture.relative_to(ROOT)}", flush=True)
        print(flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
