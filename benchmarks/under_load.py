"""Push a model of a real size into an engine while eight clients read streams: `make bench-load`.

For each engine a server runs on this machine's CPU, and eight streams are read in a process of their own. After some
time without a push a sender is built, then pushes follow one another without a break, in mode keep. A gap is the time
between two tokens of one stream as its client reads them. Trainer, clients and engine share the cores of this machine;
``--nice 19`` gives the trainer only what the engine leaves, as if it ran on cores of its own. Beside it stands what
happens to the streams without weightsync, if another process takes as much new memory as building a sender does, and if
two others copy memory without a break, as a trainer and a rank do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks import report
from benchmarks.bench import ARGS, ENVIRONMENT
from benchmarks.streams import SERVERS, STREAMS
from benchmarks.trainer import ROOT, Trainer, model_folders
from tools import servers
from tools.progress import alive
from weightsync import Sender

KIND = "qwen3_0_6b"
#: Tokens of each stream, more than are read here. Prompts have one: without AVX-512 a CPU takes 14 s for one step with
#: seven prompts of 43 tokens, and streams that began during a push would only show that.
TOKENS = 1500
#: Options that make room for all of them; SGLang takes the last of two.
ROOM = {"sglang": ["--max-total-tokens", str(STREAMS * (TOKENS + 1) + 1024)], "vllm": []}
PUSHES, WARM = 8, 2
#: Tokens of every stream when the time without a push begins, and its seconds.
SETTLED, QUIET_S = 10, 10.0
#: Seconds after which nothing of what went before is in a gap.
SETTLE_S = 2.0
START_S = 120.0
#: Aims: share of the tokens per second, and seconds of a gap beyond the usual one and the pause.
TOKENS_AIM, GAP_AIM_S = 0.5, 0.05
#: The additional options of each server: a pause that keeps requests needs them.
KEEPS = {engine: args for engine, kinds in SERVERS.items() for args, modes in kinds if "keep" in modes}


#: Programs beside the engine. The argument of the first is how many bytes of new memory it takes.
TAKE = "import sys; b'1' * int(sys.argv[1])"
#: That of this one is for how many seconds it copies.
COPY = """
import sys, time
one, other = bytearray(1 << 26), bytearray(b"1" * (1 << 26))
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    one[:] = other
"""
TITLES = {
    "without": "without a push",
    "taken": "another takes memory",
    "copied": "two others copy memory",
    "built": "a sender is built",
    "pushing": "pushes",
}
Window = tuple[float, float]


# ---- the clients, in a process of their own --------------------------------------------------------------------------


def read_streams(engine: servers.Engine, model: str, url: str) -> None:
    """Read streams until stdin is closed; a line for every token says whose it is and when it came."""
    server: Any = types.SimpleNamespace(engine=engine, model=model, url=url, adapter="")

    def read(number: int) -> None:
        for stream in itertools.count(number, STREAMS):
            for _ in servers.stream(server, [number + 1], TOKENS):
                os.write(1, f"{stream} {time.monotonic()}\n".encode())  # one line at once, from any thread

    for number in range(STREAMS):
        threading.Thread(target=read, args=(number,), daemon=True).start()
    sys.stdin.read()
    os._exit(0)


class Clients:
    """The process that reads, for a ``with`` block; ``times`` has the moments of the tokens of each stream."""

    def __init__(self, server: servers.Server):
        asked = [sys.executable, "-m", "benchmarks.under_load", "--read", server.engine, str(server.model), server.url]
        self._process = subprocess.Popen(asked, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.times: dict[int, list[float]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            stream, moment = line.split()
            self.times.setdefault(int(stream), []).append(float(moment))

    def __enter__(self) -> Clients:
        until = time.monotonic() + START_S
        while len(self.times) < STREAMS or min(map(len, list(self.times.values()))) < SETTLED:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the streams did not begin")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def gaps(self, window: Window) -> list[float]:
        """The seconds from each token to the next of its stream, of those that overlap with the window."""
        pairs = [pair for times in list(self.times.values()) for pair in itertools.pairwise(times)]
        return [end - start for start, end in pairs if start < window[1] and end > window[0]]

    def per_s(self, window: Window) -> float:
        """Tokens per second of all streams."""
        found = sum(window[0] <= moment < window[1] for times in list(self.times.values()) for moment in times)
        return found / (window[1] - window[0])


# ---- the trainer -----------------------------------------------------------------------------------------------------


def measure(engine: servers.Engine, folders: list[Path], trainer: Trainer, nice: int) -> report.Record:
    """Start the engine's server, push while it streams, and return the record."""
    args = [*ARGS[engine], *ROOM[engine], *KEEPS[engine]]
    with alive(f"{engine}: starting the server"):
        server = servers.start(engine, folders[0], args=args, env=ENVIRONMENT[engine], max_model_len=2 * TOKENS)
    with server, Clients(server) as clients:
        quiet = _window(lambda: time.sleep(QUIET_S))
        taken = _window(lambda: _beside(TAKE, 2 * trainer.nbytes))  # an arena and a standby
        time.sleep(SETTLE_S)
        copied = _window(lambda: _beside(COPY, QUIET_S, 2))
        time.sleep(SETTLE_S)
        with contextlib.ExitStack() as opened:
            opened.enter_context(_niced(nice))  # only now: the engine and the clients would inherit it
            senders: list[Sender] = []

            def build() -> None:
                senders.append(opened.enter_context(Sender([server.url], pause="keep")))
                time.sleep(QUIET_S)  # as a trainer that trains: ranks record, and make their standby

            built = _window(build)
            (sender,) = senders
            still = [rank.longest_call or "" for rank in sender.status()[server.url].ranks]
            pushes: list[dict[str, float]] = []

            def push() -> None:
                trainer.use(len(pushes) % 2)
                start = time.perf_counter()
                (result,) = sender.push(trainer.module).engines.values()
                pushes.append({"seconds": time.perf_counter() - start, "pause": result.pause_s})

            for _ in range(WARM):
                push()
            pushing = _window(lambda: [push() for _ in range(PUSHES)])
            still += [rank.longest_call or "" for rank in sender.status()[server.url].ranks]
        time.sleep(1.0)  # until the tokens after the last push have come
    return {
        **report.about(engine),
        "engine": engine,
        "model": KIND,
        "nbytes": trainer.nbytes,
        "nice": nice,
        "streams": STREAMS,
        "args": args,
        "pushes": pushes,
        "longest_calls": still,
        "windows": {
            name: {
                "tokens_per_s": clients.per_s(window),
                "median_gap_s": statistics.median(clients.gaps(window)),
                "longest_gap_s": max(clients.gaps(window)),
            }
            for name, window in zip(TITLES, (quiet, taken, copied, built, pushing), strict=True)
        },
    }


@contextlib.contextmanager
def _niced(nice: int) -> Iterator[None]:
    """A priority for this thread, and for those that it starts."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


def _beside(program: str, argument: float, count: int = 1) -> None:
    command = [sys.executable, "-c", program, str(argument)]
    for process in [subprocess.Popen(command) for _ in range(count)]:
        if process.wait():
            raise RuntimeError("a program beside the engine failed")


def _window(act: Callable[[], object]) -> Window:
    start = time.monotonic()
    act()
    return start, time.monotonic()


def table(record: report.Record) -> str:
    """The whole report."""
    engine, windows = record["engine"], record["windows"]
    usual, warm = windows["without"], record["pushes"][WARM:]
    pause = max(each["pause"] for each in warm)
    lines = [
        f"{engine} {record['versions'][engine]}, {record['model']}, {record['nbytes'] / 1e9:.2f} GB, "
        f"{record['streams']} streams, {len(warm)} pushes in a row, trainer with nice {record['nice']}",
        report.machine(record),
        f"{'':28} {'tokens/s':>9} {'median gap':>11} {'longest gap':>12}",
    ]
    for name, title in TITLES.items():
        found = windows[name]
        lines.append(
            f"{title:28} {found['tokens_per_s']:9.1f} {found['median_gap_s']:11.3f} {found['longest_gap_s']:12.3f}"
        )
    share = windows["pushing"]["tokens_per_s"] / usual["tokens_per_s"]
    beyond = windows["pushing"]["longest_gap_s"] - usual["median_gap_s"] - pause
    built = windows["built"]["longest_gap_s"] - usual["median_gap_s"]
    return "\n".join(
        [
            *lines,
            f"a push takes {statistics.median(each['seconds'] for each in warm):.3f} s; longest pause {pause:.3f} s; "
            f"longest calls: {', '.join(filter(None, record['longest_calls'])) or 'none'}",
            f"tokens per second during pushes: {share:.2f} of those without (aim {TOKENS_AIM})",
            f"longest gap during pushes, beyond the usual one and the pause: {beyond:.3f} s (aim {GAP_AIM_S})",
            f"longest gap while a sender is built, beyond the usual one: {built:.3f} s (aim {GAP_AIM_S})",
        ]
    )


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=("sglang", "vllm"), default=["sglang", "vllm"])
    parser.add_argument("--nice", type=int, default=0, help="the priority of the trainer, from 0 to 19 (lowest)")
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        read_streams(*args.read)
    folders = model_folders(KIND)
    with Trainer(folders) as trainer:
        for engine in dict.fromkeys(args.engines):
            record = measure(engine, folders, trainer, args.nice)
            path = report.save(record, kept=True, name=f"load-{engine}-nice-{args.nice}")
            print(f"\n{table(record)}\nraw samples: {path.relative_to(ROOT)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
