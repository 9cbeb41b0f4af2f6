"""Push hundreds of times and see that nothing grows: `make soak`, `make soak PUSHES=2000 ENGINE=vllm`.

For each engine one server runs on this machine's CPU with a tiny model. Two sets of weights are pushed in turn, by a
new sender every 50 pushes. After each push the resident memory, open files and threads of the trainer and of every
process of the server are sampled, and the numbers of shared-memory files and private directories. Exit code 0 if none
grows after the first ten pushes, by the rule below, and the last push leaves, bit by bit, the weights that the same set
left before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks import report
from benchmarks.trainer import ROOT, Trainer, model_folders
from tools import servers
from tools.progress import alive
from weightsync import Sender
from weightsync.memory import arenas
from weightsync.protocol import directories

KIND = "qwen3"
PUSHES = 500
WARM_UP = 10
#: Samples in each of the two windows that are compared, and pushes of one sender.
WINDOW = 50
#: The allowed growth of a mean count: a sample may include a thread that is about to end.
JITTER = 1.0
MEMORY_SHARE, MEMORY_BYTES = 0.01, 8 << 20
RULE = (
    f"flat after the first {WARM_UP} pushes: from the {WINDOW} pushes after them to the last {WINDOW},\n"
    "the means of open files, threads, processes, shared-memory files and private directories\n"
    f"grow by at most {JITTER:g}, the median of a process's memory by at most {MEMORY_SHARE:.0%} or "
    f"{MEMORY_BYTES >> 20} MiB, whichever\nis more; closing the last sender leaves no such file or directory"
)
TRAINER = "trainer"
#: The quantities sampled of each process, and overall.
PARTS = ("memory_bytes", "open_files", "threads")
COUNTS = ("shm_files", "directories", "processes")

Series = dict[str, list[float]]


class Growth(NamedTuple):
    """One comparison; ``last`` may exceed ``first`` by ``allowed``."""

    what: str
    part: str
    first: float
    last: float
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it has not grown."""
        return self.last - self.first <= self.allowed


class Watch:
    """Samples of the trainer's process, which is this one, and of the server's processes."""

    def __init__(self, processes: Callable[[], Sequence[psutil.Process]]):
        self._processes = processes
        self._trainer = psutil.Process()
        self._names: dict[int, str] = {}
        self.processes: dict[str, Series] = {}
        self.counts: Series = {name: [] for name in COUNTS}

    def sample(self) -> None:
        """Take one sample of everything."""
        found = [self._trainer, *sorted(self._processes(), key=lambda process: process.pid)]
        for process in found:
            try:
                with process.oneshot():
                    values = (process.memory_info().rss, process.num_fds(), process.num_threads())
                    series = self.processes.setdefault(self._name(process), {part: [] for part in PARTS})
            except psutil.NoSuchProcess:
                continue  # a helper process of the engine that has just ended
            for part, value in zip(PARTS, values, strict=True):
                series[part].append(value)
        files, directories = self.left([process.pid for process in found])
        for name, value in zip(COUNTS, (files, directories, len(found)), strict=True):
            self.counts[name].append(value)

    def left(self, pids: Sequence[int] = ()) -> tuple[int, int]:
        """The numbers of shared-memory files of these processes and the trainer, and of private directories."""
        owners = {f"weightsync-{pid}" for pid in (*pids, self._trainer.pid)}
        files = [path for path in arenas.SHM_DIRECTORY.iterdir() if path.name.rpartition("-")[0] in owners]
        return len(files), len(list(directories.directory().glob(f"weightsync-{self._trainer.pid}-*")))

    def _name(self, process: psutil.Process) -> str:
        if process.pid not in self._names:
            name = TRAINER if process.pid == self._trainer.pid else process.name()
            same = sum(other.partition(" #")[0] == name for other in self._names.values())
            self._names[process.pid] = f"{name} #{same + 1}" if same else name
        return self._names[process.pid]

    def growth(self) -> list[Growth]:
        """All comparisons; a process that did not run all the time counts in the number of processes only."""
        found = []
        samples = len(self.counts[COUNTS[0]])
        for name, series in self.processes.items():
            if len(series[PARTS[0]]) == samples:
                found += [_growth(name, part, series[part]) for part in PARTS]
        return found + [_growth("", name, series) for name, series in self.counts.items()]


def _growth(what: str, part: str, values: list[float]) -> Growth:
    average = statistics.median if part == "memory_bytes" else statistics.fmean
    first, last = average(values[:WINDOW]), average(values[-WINDOW:])
    allowed = max(MEMORY_SHARE * first, MEMORY_BYTES) if part == "memory_bytes" else JITTER
    return Growth(what, part, first, last, allowed)


def soak(url: str, watch: Watch, trainer: Trainer, pushes: int) -> dict[str, Any]:
    """Push and sample; returns the findings other than the samples."""
    seconds, digests = [], []
    sender = Sender([url])
    try:
        for number in range(1, pushes + 1):
            if number % WINDOW == 1 and number > 1:
                sender.close()
                sender = Sender([url])
            trainer.use(number % 2)
            start = time.perf_counter()
            sender.push(trainer.module)
            seconds.append(time.perf_counter() - start)
            if number > WARM_UP:
                watch.sample()
            if number in (1, 2, pushes):
                digests.append(sender.status(digest=True)[url].ranks[0].digest)
            if number % 100 == 0:
                print(
                    f"  {number} of {pushes} pushes, {1000 * statistics.median(seconds[-100:]):.0f} ms each", flush=True
                )
    finally:
        sender.close()
    files, directories = watch.left()
    return {
        "seconds": [round(value, 5) for value in seconds],
        "left": {"shm_files": files, "directories": directories},
        "same_bits": digests[0] != digests[1] and digests[2] == digests[(pushes + 1) % 2],
    }


def table(record: report.Record) -> str:
    """The whole report."""
    engine, growth = record["engine"], [Growth(**line) for line in record["growth"]]
    head = ("memory, MiB", "open files", "threads")
    names = list(dict.fromkeys(line.what for line in growth if line.what))
    width = max(map(len, (*names, "private directories")))
    lines = [
        f"{engine} {record['versions'][engine]}, {record['model']}, {record['nbytes'] / 1e6:.1f} MB, one server, "
        f"{record['pushes']} pushes by senders of {WINDOW} each; first window -> last window (growth)",
        report.machine(record),
        f"{'':{width}}" + "".join(f"  {text:>27}" for text in head),
    ]
    for name in names:
        parts = [line for line in growth if line.what == name]
        lines.append(f"{name:{width}}" + "".join(f"  {_shown(line):>27}" for line in parts))
    labels = {"shm_files": "files in /dev/shm", "directories": "private directories", "processes": "processes"}
    lines += [f"{labels[line.part]:{width}}  {_shown(line):>27}" for line in growth if not line.what]
    left = record["left"]
    lines.append(f"left after the last close: {left['shm_files']} files, {left['directories']} directories")
    lines.append(
        f"the last push's weights: {'the same bits as before' if record['same_bits'] else 'NOT THE SAME BITS'}"
    )
    grown = [f"{line.part} of {line.what or 'all'}" for line in growth if not line.flat]
    return "\n".join([*lines, record["rule"], f"FLAT: {'no, ' + ', '.join(grown) if grown else 'yes'}"])


def _shown(line: Growth) -> str:
    unit = 2**20 if line.part == "memory_bytes" else 1
    first, last = line.first / unit, line.last / unit
    return f"{first:.1f} -> {last:.1f} ({last - first:+.1f})" + ("" if line.flat else " !")


def measure(engine: servers.Engine, folders: list[Path], trainer: Trainer, pushes: int) -> report.Record:
    """Start the engine and soak it; returns the record."""
    with alive(f"{engine}: starting the server"):
        server = servers.start(engine, folders[0])
    with server:
        watch = Watch(server.processes)
        found = soak(server.url, watch, trainer, pushes)
    growth = watch.growth()
    found["flat"] = all(line.flat for line in growth) and not any(found["left"].values())
    return {
        **report.about(engine),
        "engine": engine,
        "model": KIND,
        "nbytes": trainer.nbytes,
        "pushes": pushes,
        "rule": RULE,
        "growth": [line._asdict() for line in growth],
        **found,
        "processes": watch.processes,
        "counts": watch.counts,
    }


def main() -> int:
    """Run the soak; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    parser.add_argument("--pushes", type=int, default=PUSHES)
    args = parser.parse_args()
    least = WARM_UP + 2 * WINDOW
    if args.pushes < least:
        parser.error(f"--pushes: two windows after the warm-up take at least {least}")
    folders = model_folders(KIND)
    ran_well = True
    with Trainer(folders) as trainer:
        for engine in dict.fromkeys(args.engines):
            record = measure(engine, folders, trainer, args.pushes)
            path = report.save(record, kept=args.pushes >= PUSHES, name=f"soak-{engine}")
            print(f"\n{table(record)}\nraw samples: {path.relative_to(ROOT)}\n", flush=True)
            ran_well &= record["flat"] and record["same_bits"]
    return 0 if ran_well else 1


if __name__ == "__main__":
    sys.exit(main())
