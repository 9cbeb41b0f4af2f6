"""Measure what each engine costs a trainer, and extrapolate to fleets: `make bench-fleet`.

One trainer, which is this process, and up to eight reference engines on this machine, each with shared memory of its
own, as if on other hosts. Pushes of few bytes over nixl, in few buckets and in many, say what an engine costs, and what
a bucket costs for each: CPU time of the trainer's process, which Python spends on one core at a time; open files;
threads; memory. The rest is arithmetic, see `predicted`. Exit code 0 if everything was served.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import sys
import time
from typing import Any

import psutil

from benchmarks import report
from benchmarks.blocks import Blocks, engine
from benchmarks.trainer import ROOT
from weightsync import Sender

MIN_ROUNDS, WARM_UP, ENGINES = 7, 3, (1, 2, 4, 8)
#: Buckets of the pushes, each a tensor; and the bytes of a bucket, of these models and of a large one.
FEW, MANY = 8, 64
SMALL_BYTES, BUCKET_BYTES = 64 << 10, 64 << 20
#: The fleets that are extrapolated: engines, bytes of the model, and bytes a second of each link.
FLEETS = (8, 64, 256, 1000)
MODEL_BYTES, LINK = 16_000_000_000, 12_500_000_000
#: A mount of shared memory of its own, so that the engine is as if on another host.
APART = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"', sys.executable)
Sample = dict[str, float]


def measure(rounds: int) -> tuple[dict[str, list[Sample]], bool]:
    """By engines and buckets, what each push took and what the trainer's process holds; whether all was served."""
    samples, served = dict[str, list[Sample]](), True
    for buckets in (FEW, MANY):
        module = Blocks(buckets, SMALL_BYTES, seed=1)
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(engine(buckets, SMALL_BYTES, APART)) for _ in range(max(ENGINES))]
            for count in ENGINES:
                with Sender([server.url for server in servers[:count]], transport="nixl") as sender:
                    found = [_pushed(sender, module) for _ in range(WARM_UP + rounds)]
                    replies = sender.status(digest=True).values()
                    served &= {reply.ranks[0].digest for reply in replies} == {module.digest()}
                samples[f"{count} engines, {buckets} buckets"] = found[WARM_UP:]
    return samples, served


def _pushed(sender: Sender, module: Blocks) -> Sample:
    this, cpu, wall = psutil.Process(), time.process_time(), time.perf_counter()
    sender.push(module)
    return {
        "cpu": time.process_time() - cpu,
        "seconds": time.perf_counter() - wall,
        "files": this.num_fds(),
        "threads": this.num_threads(),
        "bytes": this.memory_full_info().uss,
    }


class Costs:
    """What one more engine costs; ``bucket_s`` is for each bucket beside that."""

    def __init__(self, samples: dict[str, list[Sample]]):
        few, many = (self._slope(samples, "cpu", buckets) for buckets in (FEW, MANY))
        self.bucket_s = max(0.0, (many - few) / (MANY - FEW))
        self.engine_s = max(0.0, few - FEW * self.bucket_s)
        self.files, self.threads, self.bytes = (
            self._slope(samples, what, MANY) for what in ("files", "threads", "bytes")
        )

    @staticmethod
    def _slope(samples: dict[str, list[Sample]], what: str, buckets: int) -> float:
        medians = [statistics.median(one[what] for one in samples[f"{n} engines, {buckets} buckets"]) for n in ENGINES]
        return statistics.linear_regression(ENGINES, medians).slope


def predicted(costs: Costs, engines: int) -> dict[str, float]:
    """A push to so many engines: the seconds that bytes take along the chain, and those of the trainer's CPU.

    A chain of n ranks takes n - 1 buckets longer than one rank. With more ranks than buckets it is a tree, whose ranks
    write to two others each: half of the link's speed, and as many buckets longer as the tree is deep.
    """
    buckets = max(MANY, -(-MODEL_BYTES // BUCKET_BYTES))
    once = MODEL_BYTES / LINK
    chain = once * (1 + (engines - 1) / buckets)
    tree = 2 * once * (1 + engines.bit_length() / buckets)
    return {
        "transfer": chain if engines <= buckets else tree,
        "cpu": engines * (costs.engine_s + buckets * costs.bucket_s),
        "files": engines * costs.files,
        "threads": engines * costs.threads,
        "bytes": engines * costs.bytes,
    }


def table(record: report.Record) -> str:
    """The whole report."""
    costs = Costs(record["samples"])
    lines = [
        f"{record['rounds']} rounds; {report.machine(record)}",
        f"  an engine costs {1e3 * costs.engine_s:.2f} ms of the trainer's CPU a push, and {1e6 * costs.bucket_s:.0f} "
        f"us a bucket; {costs.files:.1f} files, {costs.threads:.1f} threads, {costs.bytes / 1e6:.1f} MB",
        f"extrapolated: {MODEL_BYTES / 1e9:g} GB, links of {LINK * 8 / 1e9:g} Gbit/s; open files allowed: "
        f"{record['files_allowed'][0]}, at most {record['files_allowed'][1]}",
    ]
    for engines in FLEETS:
        found = predicted(costs, engines)
        lines.append(
            f"  {engines:5} engines: transfer {found['transfer']:6.2f} s, CPU {found['cpu']:6.2f} s, "
            f"{found['files']:6.0f} files, {found['threads']:5.0f} threads, {found['bytes'] / 1e6:6.0f} MB"
        )
    lines.append(f"served: {'yes' if record['served'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    args = parser.parse_args()
    samples, served = measure(args.rounds)
    record: dict[str, Any] = {
        **report.here(),
        "rounds": args.rounds,
        "files_allowed": resource.getrlimit(resource.RLIMIT_NOFILE),
        "samples": samples,
        "served": served,
    }
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name="fleet")
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main())
