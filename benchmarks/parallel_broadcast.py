"""Time a parallel broadcast between hosts with slow links, beside rank 0 alone: `make bench-parallel-broadcast`.

Hosts are network namespaces of this machine, joined by a bridge. Each trainer process has its own, and the engines have
others. `tc` limits the links of the trainer's hosts, and in some cases those of the engines', by a token bucket in each
direction. A push sends what is in the arena already to the engines' ranks over nccl (gloo): by rank 0 alone, then by
all processes, each its share. Seconds run from the request for the bytes until every rank has verified them; making the
groups is not counted.

Both ends of the transport, the helpers of the other processes, arena, stage and verification are the product's. A
`Sender` refuses a trainer on several hosts, so the rest is not: messages go over pipes, and every trainer process has
the whole stream in its own memory from the start. How it gets there over a network is not measured. Needs root and
`tc`. Exit code 0 if each process sent its share, and none sent faster than its link allows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.lines import LIMIT_S, Lines, serve
from benchmarks.rank import COMMAND, DIGEST, Channel, Rank
from benchmarks.trainer import ROOT
from benchmarks.transports_bandwidth import TENSORS, random_bytes
from tests.hosts.network import Network
from weightsync.deadline import Deadline
from weightsync.errors import WeightSyncError
from weightsync.transports.nccl.parallel_broadcast import BroadcastHelper

NBYTES, MBIT, MIN_ROUNDS = 64 << 20, 200, 5
TRAINERS = (2, 4)
#: The number of engines, on how many hosts, and whether their links are slow too.
ENGINES = ((1, 1, False), (2, 1, False), (1, 1, True), (2, 1, True), (2, 2, True))
WAYS = ALONE, PARALLEL = "rank-0-alone", "parallel"
#: The burst of a token bucket, as a share of a push.
SLACK = 1.02

Case = dict[str, Any]


def sent_bytes() -> int:
    """The bytes that have left this host so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line.split()[9] for line in lines if line.split()[0] == "eth0:"))


class Helpers:
    """See `base.PeerRanks`; the other trainer processes are children that read lines."""

    def __init__(self, children: Sequence[Rank]):
        self._children, self.size, self.filled = children, 1 + len(children), False

    def ask(self, transport: str, message: bytes, deadline: Deadline) -> None:
        """See `base.PeerRanks`."""
        for child in self._children:
            child.tell("help", transport, message)

    def answered(self, to: str, deadline: Deadline) -> None:
        """See `base.PeerRanks`; raises RuntimeError with the error of a process."""
        for child in self._children:
            child.answer()

    def check(self, deadline: Deadline) -> None:
        """See `base.PeerRanks`; does nothing, because `answered` reports a process that has ended."""

    def blamed(self, error: WeightSyncError) -> WeightSyncError:
        """See `base.PeerRanks`; returns the error unchanged."""
        return error

    def sent(self) -> list[int]:
        """The bytes that have left each of the trainer's hosts so far."""
        return [sent_bytes(), *(child.ask("count") for child in self._children)]


def help_rank_0(number: int) -> None:
    """Run a trainer process other than rank 0, until its input ends."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    helper, stream = BroadcastHelper(number), random_bytes(NBYTES)
    verbs = {"help": lambda _, body: helper.help(body, stream, lambda: None), "count": lambda *_: sent_bytes()}
    serve(Lines(0, writing), verbs)
    helper.close()
    os._exit(0)  # as in `rank`


def rank_0(case: Case, path: Path) -> None:
    """Run rank 0 of the trainer on its host: measure a case, and write the result."""
    tensors = torch.split(random_bytes(NBYTES), NBYTES // TENSORS)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    sent: dict[str, list[list[int]]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        program = [sys.executable, __file__, "--help-rank-0"]
        ranks = [
            stack.enter_context(Rank(number, host=address, command=[*entering, *COMMAND]))
            for number, (address, entering) in enumerate(case["engine_hosts"])
        ]
        children = [
            stack.enter_context(Rank(command=[*entering, *program, str(number)]))
            for number, (_, entering) in enumerate(case["trainer_hosts"][1:], start=1)
        ]
        helpers = Helpers(children)
        by_way = {ALONE: None, PARALLEL: helpers}
        channels = {way: stack.enter_context(Channel("nccl", ranks, way, tensors, helpers=by_way[way])) for way in WAYS}
        for channel in channels.values():
            channel.push(DIGEST)
        helpers.filled = True
        channels[PARALLEL].resend()  # the other processes have not sent before
        for index in range(case["rounds"]):
            for way in WAYS[:: -1 if index % 2 else 1]:
                before = helpers.sent()
                seconds[way].append(channels[way].resend().total)
                sent[way].append([now - then for then, now in zip(before, helpers.sent(), strict=True)])
        for channel in channels.values():
            channel.check()
        found = {"bucket_bytes": channels[PARALLEL].choice.bucket_bytes, "seconds": seconds, "sent_bytes": sent}
    path.write_text(json.dumps(found))
    os._exit(0)


def cases(rounds: int) -> Iterator[Case]:
    """Measure every case, each with new processes."""
    path = ROOT / ".work" / "bench" / "parallel-broadcast-case.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"t{number}" for number in range(max(TRAINERS))], ["e0", "e1"]
    with contextlib.closing(Network(*names[0], *names[1])) as network, contextlib.ExitStack() as stack:
        for name in names[0]:
            stack.enter_context(network.limited(name, MBIT))
        trainers, engines = ([(network.hosts[n].address, network.hosts[n].entering) for n in those] for those in names)
        for (count, hosts, slow), size in ((engine, size) for engine in ENGINES for size in TRAINERS):
            case = {
                "trainer_hosts": size,
                "engines": count,
                "engine_hosts": hosts,
                "engine_mbit": MBIT if slow else None,
            }
            use = {"trainer_hosts": trainers[:size], "engine_hosts": (engines[:hosts] * count)[:count]}
            with contextlib.ExitStack() as limits:
                for name in names[1] if slow else ():
                    limits.enter_context(network.limited(name, MBIT))
                command = [sys.executable, __file__, "--rank-0", json.dumps({**use, "rounds": rounds}), str(path)]
                if code := network.hosts["t0"].popen(*command).wait(LIMIT_S * 2):
                    raise RuntimeError(f"rank 0 ended with code {code} in {case}")
            yield {**case, **json.loads(path.read_text()), "load": os.getloadavg()[0]}


def row(case: Case) -> str:
    """A line of the table."""
    alone, parallel = (case["seconds"][way] for way in WAYS)
    link = f"{case['engine_mbit']} Mbit/s" if case["engine_mbit"] else "unlimited"
    times = "".join(f"{statistics.median(s):8.2f} {f'({min(s):.2f} - {max(s):.2f})':15}" for s in (alone, parallel))
    ratio = statistics.median(a / b for a, b in zip(alone, parallel, strict=True))
    where = f"{case['trainer_hosts']:>13}  {case['engines']:>7}  {case['engine_hosts']:>12}  {link:>10}"
    return f"{where}{times}{ratio:6.2f}"


def is_right(case: Case) -> bool:
    """Whether each process has sent its share, and none faster than its link allows."""
    shares = all(sent >= NBYTES / case["trainer_hosts"] for by_host in case["sent_bytes"][PARALLEL] for sent in by_host)
    pushes = [push for way in WAYS for push in zip(case["seconds"][way], case["sent_bytes"][way], strict=True)]
    return shares and all(8 * max(by_host) <= MBIT * 1e6 * SLACK * took for took, by_host in pushes)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--rank-0", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--help-rank-0", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_0:
        rank_0(json.loads(args.rank_0[0]), Path(args.rank_0[1]))
    if args.help_rank_0:
        help_rank_0(args.help_rank_0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the namespaces end too
    head = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "hardware": report.hardware(), "torch": torch.__version__}
    print(f"{NBYTES / 1e6:.1f} MB, trainer hosts at {MBIT} Mbit/s, {args.rounds} rounds; {report.machine(head)}")
    print(f"trainer hosts  engines  engine hosts        link{ALONE:>17}{PARALLEL:>21}{'times':>15}", flush=True)
    record = {**head, "nbytes": NBYTES, "trainer_mbit": MBIT, "cases": []}
    for case in cases(args.rounds):
        record["cases"].append(case)
        print(row(case), flush=True)
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name="parallel-broadcast")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(map(is_right, record["cases"])) else 1


if __name__ == "__main__":
    sys.exit(main())
