"""Push while eight clients read long streams, and see what each of them notices: `make streams`.

For each engine a server runs on this machine's CPU with a tiny model, and a second one without a prefix cache for the
pause mode that needs that. In each mode there are a few pushes, each with eight new streams; a ninth client requests
single tokens, one after the other. A gap is the time between two tokens of one stream as its client reads them: one
that overlaps with a push, or one that ended before the push began. Exit code 0 if no stream breaks off or ends early;
streams that end early in mode abort, as that promises, are counted apart.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from benchmarks import report
from benchmarks.trainer import ROOT, Trainer, model_folders
from tools import servers
from tools.progress import alive
from weightsync import Sender
from weightsync.protocol.http import PauseMode

KIND = "qwen3"
PROMPT = list(b"Once upon a time there was a policy that ")
STREAMS, TOKENS = 8, 320
#: Tokens of every stream when gaps without a push begin to count, and when the push begins.
SETTLED, BEFORE = 20, 100
ROUNDS = 2
START_S, READ_S = 120.0, 300.0

#: The additional options of each server, and its pause modes.
SERVERS: dict[servers.Engine, list[tuple[list[str], tuple[PauseMode, ...]]]] = {
    "vllm": [([], ("retract", "wait", "abort")), (["--no-enable-prefix-caching"], ("keep",))],
    "sglang": [([], ("retract", "wait", "abort")), (["--disable-radix-cache"], ("keep",))],
}

Interval = tuple[float, float]


class Reader(threading.Thread):
    """A client that reads one stream; ``times`` has the time of each token."""

    def __init__(self, server: servers.Server, number: int):
        super().__init__(name=f"reader-{number}", daemon=True)
        self._server, self._number = server, number
        self.times: list[float] = []
        self.error = ""

    def run(self) -> None:
        """Read to the end."""
        try:
            for _ in servers.stream(self._server, [*PROMPT, self._number], TOKENS):
                self.times.append(time.perf_counter())
        except (requests.RequestException, RuntimeError, OSError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def gaps(self) -> list[Interval]:
        """The seconds from each token to the next."""
        return list(itertools.pairwise(self.times))


class Newcomer(threading.Thread):
    """A client that requests one token again and again; ``waits`` has the start and end of each request."""

    def __init__(self, server: servers.Server):
        super().__init__(name="newcomer", daemon=True)
        self._server = server
        self.over = threading.Event()
        self.waits: list[Interval] = []
        self.refused = 0

    def run(self) -> None:
        """Send requests until it is stopped."""
        while not self.over.wait(0.05):
            start = time.perf_counter()
            try:
                servers.answer(self._server, PROMPT, 1)
            except requests.RequestException:
                self.refused += 1
            self.waits.append((start, time.perf_counter()))


def watch(server: servers.Server, sender: Sender, trainer: Trainer) -> dict[str, Any]:
    """Push once while eight streams are read; returns what the clients measured."""
    readers = [Reader(server, number) for number in range(STREAMS)]
    newcomer = Newcomer(server)
    for reader in readers:
        reader.start()
    _wait_for(readers, SETTLED)
    settled = time.perf_counter()
    newcomer.start()
    _wait_for(readers, BEFORE)
    start = time.perf_counter()
    result = sender.push(trainer.module)
    end = time.perf_counter()
    time.sleep(0.05)
    newcomer.over.set()
    for thread in (*readers, newcomer):
        thread.join(READ_S)
    (engine,) = result.engines.values()
    quiet, push = (settled, start), (start, end)
    without = [seconds for reader in readers for seconds in _inside(reader.gaps(), quiet)]
    return {
        "push_s": end - start,
        "pause_s": engine.pause_s,
        "streams": [
            {
                "tokens": len(reader.times),
                "tokens_at_end_of_push": sum(moment < end for moment in reader.times),
                "longest_gap_s": max(_overlapping(reader.gaps(), push), default=0.0),
                "error": "still reading" if reader.is_alive() else reader.error,
            }
            for reader in readers
        ],
        "without_a_push": {"median_gap_s": statistics.median(without), "longest_gap_s": max(without)},
        "new_requests": {
            "longest_s": max(_overlapping(newcomer.waits, push), default=0.0),
            "median_without_a_push_s": statistics.median(_inside(newcomer.waits, quiet)),
            "refused": newcomer.refused,
        },
    }


def _wait_for(readers: list[Reader], tokens: int) -> None:
    """Wait until every stream has so many tokens. Raises RuntimeError if one ends before."""
    until = time.monotonic() + START_S
    while any(len(reader.times) < tokens for reader in readers):
        ended = [reader.error or "it ended" for reader in readers if not reader.is_alive()]
        if ended or time.monotonic() > until:
            raise RuntimeError(f"a stream did not reach {tokens} tokens before the push: {(*ended, 'too slow')[0]}")
        time.sleep(0.002)


def _inside(spans: list[Interval], window: Interval) -> list[float]:
    return [end - start for start, end in spans if window[0] <= start and end <= window[1]]


def _overlapping(spans: list[Interval], window: Interval) -> list[float]:
    return [end - start for start, end in spans if start < window[1] and end > window[0]]


def measure(engine: servers.Engine, folders: list[Path], trainer: Trainer, rounds: int) -> report.Record:
    """Start the engine's servers and push in each mode; returns the record."""
    found: dict[str, list[dict[str, Any]]] = {}
    for args, modes in SERVERS[engine]:
        with alive(" ".join((f"{engine}: starting the server", *args))):
            server = servers.start(engine, folders[0], args=args)
        with server:
            for mode in modes:
                found[mode] = []
                with Sender([server.url], pause=mode) as sender:
                    trainer.use(1)
                    sender.push(trainer.module)  # the first push of a sender maps memory
                    for number in range(rounds):
                        trainer.use(number % 2)
                        found[mode].append(watch(server, sender, trainer))
                print(f"  {mode}: {rounds} pushes", flush=True)
    return {
        **report.about(engine),
        "engine": engine,
        "model": KIND,
        "nbytes": trainer.nbytes,
        "streams": STREAMS,
        "tokens": TOKENS,
        "servers": [{"args": args, "modes": modes} for args, modes in SERVERS[engine]],
        "modes": found,
    }


def broken(mode: str, pushes: list[dict[str, Any]]) -> tuple[int, int]:
    """How many streams were lost, and how many ended early as the mode promises."""
    streams = [stream for push in pushes for stream in push["streams"]]
    failed = sum(bool(stream["error"]) for stream in streams)
    early = sum(not stream["error"] and stream["tokens"] < TOKENS for stream in streams)
    return (failed, early) if mode == "abort" else (failed + early, 0)


HEAD = (
    ("", "", "ended", "tokens per", "", "", "median", "longest", "longest wait of", "longest gap during the push,"),
    ("pause", "lost", "early", "stream", "push", "pause", "gap *", "gap *", "a new request *", "client by client"),
)


def table(record: report.Record) -> str:
    """The whole report."""
    engine = record["engine"]
    rows = [row for mode, pushes in record["modes"].items() for row in _rows(mode, pushes)]
    widths = [max(map(len, column)) for column in zip(*HEAD, *rows, strict=True)]
    errors = {stream["error"] for pushes in record["modes"].values() for push in pushes for stream in push["streams"]}
    return "\n".join(
        [
            f"{engine} {record['versions'][engine]}, {record['model']}, {record['nbytes'] / 1e6:.1f} MB, "
            f"{STREAMS} streams of {TOKENS} tokens at each push; milliseconds",
            report.machine(record),
            *("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (*HEAD, *rows)),
            "* gaps of all streams without a push; a new request asks for one token; its median without a push",
            *sorted(errors - {""}),
        ]
    )


def _rows(mode: str, pushes: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line for each push of a mode."""
    told = (mode, *map(str, broken(mode, pushes)))
    for push in pushes:
        tokens = [stream["tokens"] for stream in push["streams"]]
        quiet, new = push["without_a_push"], push["new_requests"]
        yield (
            *told,
            f"{min(tokens)}-{max(tokens)}",
            _ms(push["push_s"]),
            _ms(push["pause_s"]),
            _ms(quiet["median_gap_s"]),
            _ms(quiet["longest_gap_s"]),
            f"{_ms(new['longest_s'])} ({_ms(new['median_without_a_push_s'])})",
            " ".join(f"{_ms(stream['longest_gap_s']):>4}" for stream in push["streams"]),
        )
        told = ("", "", "")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"pushes in each mode; {ROUNDS} by default")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    folders = model_folders(KIND)
    ran_well = True
    with Trainer(folders) as trainer:
        for engine in dict.fromkeys(args.engines):
            record = measure(engine, folders, trainer, args.rounds)
            path = report.save(record, kept=args.rounds >= ROUNDS, name=f"streams-{engine}")
            print(f"\n{table(record)}\nraw samples: {path.relative_to(ROOT)}\n", flush=True)
            ran_well &= not any(broken(mode, pushes)[0] for mode, pushes in record["modes"].items() if mode != "abort")
    return 0 if ran_well else 1


if __name__ == "__main__":
    sys.exit(main())
