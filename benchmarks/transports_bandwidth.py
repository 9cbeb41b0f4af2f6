"""GB/s of our transports to one rank, and of the same libraries with the same bytes: part of `transports`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks import bare, report
from benchmarks.rank import DIGEST, Channel, Rank, environment
from weightsync.transports.nixl import agents

TENSORS = 64
#: The bytes of one bare read or write.
_BARE_BYTES = 16 << 20
MEMCPY = report.MEMCPY
OURS, VERIFIED = 'ours, verify="off"', f"ours, verified ({DIGEST})"
PACKED = "ours, packed before"
BROADCAST = "bare broadcast"
#: Seconds between two polls by the side that began a transfer, and by the other side, which drives it.
SLEEPS = {
    ", the other sleeps": (0.0, bare.LOOK_S),
    ", both sleep": (bare.LOOK_S, bare.LOOK_S),
    ", none sleeps": (0.0, 0.0),
}
READS, WRITES = [f"bare READ{how}" for how in SLEEPS], [f"bare WRITE{how}" for how in SLEEPS]
AIM = 0.9
#: Parts of our seconds: the rest after the last tensor was taken, packing, hashing, and hashing at the rank.
PARTS = ("tail", "gather", "digest", "verify")

Sample = dict[str, float]
Path = Callable[[], Sample]


class Net(NamedTuple):
    """A path to the rank: our transport, and the environment of both processes."""

    name: str
    transport: str
    variables: dict[str, str]


NETS = (
    Net("nccl (gloo)", "nccl", {}),
    Net("nixl", "nixl", {}),
    Net("nixl, UCX_TLS=tcp", "nixl", {"UCX_TLS": "tcp"}),
)


def nets() -> list[Net]:
    """The paths that can run on this machine."""
    return [net for net in NETS if net.transport != "nixl" or agents.available()]


class Track:
    """One net: its rank, our channel to it, and the bare library; ``paths`` has what is measured, by name."""

    def __init__(self, net: Net, source: torch.Tensor, args: argparse.Namespace, stack: contextlib.ExitStack):
        self.net, self._source = net, source
        self._rank = stack.enter_context(Rank(variables=net.variables))
        self._rank.ask("target", body=source.numel())
        asked = None if args.bucket_mib is None else args.bucket_mib << 20
        tensors = torch.split(source, source.numel() // TENSORS)
        self.channel = stack.enter_context(
            Channel(net.transport, [self._rank], "bytes", tensors, variables=net.variables, bucket_bytes=asked)
        )
        self.paths: dict[str, Path] = {
            OURS: lambda: self._push(""),
            VERIFIED: lambda: self._push(DIGEST),
            PACKED: self._resend,
        }
        self.paths.update(self._nixl() if net.transport == "nixl" else self._gloo())

    def _push(self, algorithm: str) -> Sample:
        found = self.channel.push(algorithm)
        return {"seconds": found.send, **{part: getattr(found, part) for part in PARTS}}

    def _resend(self) -> Sample:
        self.channel.push()
        return {"seconds": self.channel.resend().send}

    def _gloo(self) -> dict[str, Path]:
        store, port = bare.listen()
        self._rank.tell("group", body=b"%d" % port)
        group, bucket_bytes = bare.Broadcast(0, port, store), self.channel.choice.bucket_bytes
        self._rank.answer()

        def broadcast() -> Sample:
            self._rank.tell("receive", body=b"%d" % bucket_bytes)
            self._rank.answer()  # it is ready
            start = time.perf_counter()
            group.run(self._source, bucket_bytes)
            self._rank.answer()
            return {"seconds": time.perf_counter() - start}

        return {BROADCAST: broadcast}

    def _nixl(self) -> dict[str, Path]:
        with environment(self.net.variables):
            agent = bare.Agent("trainer", self._source)
        agent.connect(self._rank.ask("agent", body=agent.card()))
        size = min(_BARE_BYTES, self._source.numel())
        pieces = bare.Pieces(size, self._source.numel() // size, self._source.numel() // size, size)
        self._rank.ask("prepare", "bare", pieces._asdict())
        requests = agent.prepare("WRITE", pieces)

        def write(trainer_s: float, rank_s: float) -> Sample:
            self._rank.tell("drive", body=repr(rank_s).encode())
            self._rank.answer()  # it is ready
            seconds = agent.run(requests, trainer_s)
            self._rank.ask("stop")
            return {"seconds": seconds}

        paths: dict[str, Path] = {}
        for name, sleeps in zip(READS, SLEEPS.values(), strict=True):
            paths[name] = lambda sleeps=sleeps: {"seconds": read_by(self._rank, agent, "bare", *sleeps)}
        for name, sleeps in zip(WRITES, SLEEPS.values(), strict=True):
            paths[name] = lambda sleeps=sleeps: write(*sleeps)
        return paths

    def check(self, path: str) -> None:
        """Raise RuntimeError if the path did not transfer the bytes."""
        if path in (OURS, VERIFIED, PACKED):
            self.channel.check()
        elif self._rank.ask("taken", body=self._source.numel()) != bare.digest_of([self._source]):
            raise RuntimeError(f"{self.net.name}: {path} did not bring what was sent")


def read_by(
    rank: Rank, agent: bare.Agent, name: str, rank_s: float = bare.LOOK_S, trainer_s: float = bare.LOOK_S
) -> float:
    """Seconds, by its own clock, that the rank takes for the READs of that name; here the agent is kept going.

    ``rank_s`` and ``trainer_s`` are how long each sleeps between looks.
    """
    rank.tell("read", name, repr(rank_s).encode())
    return float(rank.answer(agent.drive, trainer_s))


def random_bytes(nbytes: int) -> torch.Tensor:
    """Random bytes, the same every time."""
    words = torch.empty(nbytes // 8, dtype=torch.int64)
    return words.random_(generator=torch.Generator().manual_seed(0)).view(torch.uint8)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; returns the samples of each net and path."""
    source = random_bytes(args.mib << 20)
    target = torch.zeros_like(source)
    with contextlib.ExitStack() as stack:
        tracks = [Track(net, source, args, stack) for net in nets()]
        for track in tracks:
            for name, path in track.paths.items():
                path()
                track.check(name)
        steps = [(track.net.name, name, path) for track in tracks for name, path in track.paths.items()]
        steps.append((MEMCPY, MEMCPY, lambda: {"seconds": bare.memcpy(target, source)}))
        samples: dict[str, dict[str, list[Sample]]] = {}
        loads = []
        for index in range(args.rounds):
            start = time.perf_counter()
            loads.append(os.getloadavg()[0])
            turn = index * 3 % len(steps)
            for net, name, path in steps[turn:] + steps[:turn]:
                samples.setdefault(net, {}).setdefault(name, []).append(path())
            print(f"  round {index + 1} of {args.rounds} ({time.perf_counter() - start:.1f} s)", flush=True)
        choice = tracks[0].channel.choice
    found = {net: {name: samples[net][name] for name in _order(samples[net])} for net in _order(samples)}
    return {
        "nbytes": source.numel(),
        "tensors": TENSORS,
        "bucket_bytes": choice.bucket_bytes,
        "slots": choice.slots,
        "loads": loads,
        "samples": found,
    }


def _order(names: dict[str, Any]) -> list[str]:
    known = [MEMCPY, *(net.name for net in NETS), OURS, VERIFIED, PACKED, BROADCAST, *READS, *WRITES]
    return sorted(names, key=known.index)


def table(record: report.Record) -> str:
    """The whole report."""
    nbytes, samples = record["nbytes"], record["samples"]
    width = max(len(name) for paths in samples.values() for name in paths) + 2
    lines = [
        f"{nbytes / 1e9:.2f} GB in {record['tensors']} tensors, {record['slots']} buckets of "
        f"{record['bucket_bytes'] / 2**20:g} MiB, one rank, {len(record['loads'])} rounds; ratios are medians of each "
        "round's",
        f"{'':{width}}  {'GB/s':>6}  {'min - max':>13}  {'of bare':>7}  {'seconds':>7}  "
        + "  ".join(f"{part:>5}" for part in PARTS),
    ]
    verdicts = []
    for net, paths in samples.items():
        ours = WRITES if "tcp" in net else READS
        base = _fastest(paths, (BROADCAST, *ours))
        if net != MEMCPY:
            lines.append(net)
        for name, found in paths.items():
            speeds = [nbytes / sample["seconds"] / 1e9 for sample in found]
            ratio = f"{_ratio(paths[base], found):7.2f}" if base else f"{'':7}"
            shares = [f"{_median(found, part):{max(5, len(part))}.3f}" for part in PARTS if part in found[0]]
            spread = f"{min(speeds):.2f} - {max(speeds):.2f}"
            lines.append(
                f"{name if net == MEMCPY else '  ' + name:{width}}  {statistics.median(speeds):6.2f}  {spread:>13}  "
                f"{ratio}  {_median(found, 'seconds'):7.3f}  {'  '.join(shares)}".rstrip()
            )
        if base:
            reached = _ratio(paths[base], paths[OURS])
            met = "met" if reached >= AIM else "MISSED"
            packed = _ratio(paths[base], paths[PACKED])
            verdicts.append(f"aim, {net}: ours at least {AIM:g} of {base}; {reached:.2f}: {met}; {packed:.2f} {PACKED}")
        if other := _fastest(paths, READS if ours is WRITES else WRITES):
            verdicts.append(f"{net}: {other} has {_ratio(paths[base], paths[other]):.2f} of the speed of {base}")
    lines.append(
        "seconds of ours: tail: after the last tensor was taken; gather, digest: packing and hashing at the trainer; "
        "verify:\nhashing at the rank. Where transfers overlap with packing, the tail is that of the last bucket"
    )
    return "\n".join(lines + verdicts)


def _fastest(paths: dict[str, list[Sample]], names: Sequence[str]) -> str:
    return min(paths.keys() & set(names), key=lambda name: _median(paths[name], "seconds"), default="")


def _median(found: list[Sample], part: str) -> float:
    return statistics.median(sample[part] for sample in found)


def _ratio(base: list[Sample], found: list[Sample]) -> float:
    """The speed of ``found`` divided by that of ``base``."""
    return statistics.median(one["seconds"] / other["seconds"] for one, other in zip(base, found, strict=True))
