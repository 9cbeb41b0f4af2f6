"""Bare NIXL by size and number of descriptors, and small tensors gathered or not: part of `transports`."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import bare, report
from benchmarks.rank import Rank, environment
from benchmarks.transports_bandwidth import Net, nets, random_bytes, read_by
from weightsync.memory import arenas

SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
PER_REQUEST = (1, 4, 16, 64)
#: The gap between pieces at the trainer: of adjacent pieces NIXL would make one descriptor.
GAP = 4096
TOUCHING = "touching"
SMALL = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
#: The bytes of all small tensors: 4096 of 16 KiB.
SMALL_BYTES = 64 << 20


class Track:
    """One net: the rank's READs by name, and its small tensors, scattered at the trainer."""

    def __init__(self, net: Net, total: int, stack: contextlib.ExitStack):
        self.name, self.total = net.name, total
        self._rank = stack.enter_context(Rank(variables=net.variables))
        self._rank.ask("target", body=max(total, SMALL_BYTES))
        #: The large pieces, or the small tensors with gaps of their own size; and an arena behind both.
        arena = max(total + GAP * (total // SIZES[0]), 2 * SMALL_BYTES)
        self._memory = random_bytes(arena + SMALL_BYTES)
        self._arena = self._memory[arena:]
        with environment(net.variables):
            self._agent = bare.Agent("trainer", self._memory)
        self._agent.connect(self._rank.ask("agent", body=self._agent.card()))
        self.steps: dict[str, Callable[[], dict[str, float]]] = {}
        for size in SIZES:
            for count in PER_REQUEST:
                if size * count <= total:
                    self._large(f"{size}/{count}", bare.Pieces(size, total // size, count, size + GAP))
        for size in SIZES[:-1]:
            count = SIZES[-1] // size
            self._large(f"{size}/{TOUCHING}", bare.Pieces(size, total // size, count, size))
        for size in SMALL:
            self._small(size, SMALL_BYTES // size)

    def _large(self, name: str, pieces: bare.Pieces) -> None:
        self._rank.ask("prepare", name, pieces._asdict())
        self._checked(name, pieces)
        self.steps[name] = lambda: {"seconds": self._read(name)}

    def _small(self, size: int, count: int) -> None:
        scattered = bare.Pieces(size, count, count, 2 * size)
        gathered = bare.Pieces(SMALL_BYTES, 1, 1, SMALL_BYTES, self._memory.numel() - SMALL_BYTES)
        tensors = [self._memory[at * 2 * size :][:size] for at in range(count)]
        places = torch.split(self._arena, size)

        def gather() -> float:
            start = time.perf_counter()
            for place, tensor in zip(places, tensors, strict=True):
                arenas.copy(place, tensor)
            return time.perf_counter() - start

        names = f"small/{size}/descriptors", f"small/{size}/gathered"
        gather()
        for name, pieces in zip(names, (scattered, gathered), strict=True):
            self._rank.ask("prepare", name, pieces._asdict())
            self._checked(name, pieces)
        self.steps[names[0]] = lambda: {"seconds": self._read(names[0])}

        def both() -> dict[str, float]:
            gather_s = gather()
            return {"seconds": gather_s + self._read(names[1]), "gather": gather_s}

        self.steps[names[1]] = both

    def _read(self, name: str) -> float:
        return read_by(self._rank, self._agent, name)

    def _checked(self, name: str, pieces: bare.Pieces) -> None:
        """Read once. Raises RuntimeError if other bytes arrived."""
        self._read(name)
        parts = [self._memory[pieces.start + n * pieces.stride :][: pieces.nbytes] for n in range(pieces.count)]
        if self._rank.ask("taken", body=pieces.count * pieces.nbytes) != bare.digest_of(parts):
            raise RuntimeError(f"{self.name}: {name} did not bring what lay there")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds; returns the samples of each net by name."""
    total = (args.mib << 20) // SIZES[-1] * SIZES[-1]
    samples: dict[str, dict[str, list[dict[str, float]]]] = {}
    loads = []
    with contextlib.ExitStack() as stack:
        tracks = [Track(net, total, stack) for net in nets() if net.transport == "nixl"]
        steps = [(track.name, name, step) for track in tracks for name, step in track.steps.items()]
        for net, name, _ in steps:
            samples.setdefault(net, {})[name] = []
        for index in range(args.rounds):
            start = time.perf_counter()
            loads.append(os.getloadavg()[0])
            turn = index * 7 % max(1, len(steps))
            for net, name, step in steps[turn:] + steps[:turn]:
                samples[net][name].append(step())
            print(f"  round {index + 1} of {args.rounds} ({time.perf_counter() - start:.1f} s)", flush=True)
    return {"nbytes": total, "small_bytes": SMALL_BYTES, "gap_bytes": GAP, "loads": loads, "samples": samples}


def table(record: report.Record) -> str:
    """The whole report."""
    lines = [
        f"bare NIXL READs, {bare.IN_FLIGHT} requests under way, both sides sleep between looks; "
        f"medians (min - max), {len(record['loads'])} rounds"
    ]
    for net, samples in record["samples"].items():
        lines += [f"{net}: GB/s by descriptors in a request, {record['nbytes'] / 1e9:.2f} GB"]
        heads = [*map(str, PER_REQUEST), f"{SIZES[-1] >> 20} MiB, {TOUCHING} *"]
        lines.append(f"{'descriptor':>12}" + "".join(f"  {head:>20}" for head in heads))
        for size in SIZES:
            cells = [_speeds(record["nbytes"], samples.get(f"{size}/{column}")) for column in (*PER_REQUEST, TOUCHING)]
            lines.append(f"{_size(size):>12}" + "".join(f"  {cell:>20}" for cell in cells))
        lines.append(
            "* pieces without gaps at either side, which NIXL makes one descriptor of; elsewhere there are gaps"
        )
        lines += _small_table(net, samples, record["small_bytes"])
    return "\n".join(lines)


def _small_table(net: str, samples: dict[str, list[dict[str, float]]], total: int) -> list[str]:
    heads = ("one descriptor each", "gathered, then read", "of that gathering", "the longer of the two")
    lines = [
        f"{net}: milliseconds to read {total >> 20} MiB of small tensors; what overlaps takes the longer of the two"
    ]
    lines.append(f"{'tensors':>19}" + "".join(f"  {head:>23}" for head in heads))
    after, overlapped = [], []
    for size in SMALL:
        each = [sample["seconds"] for sample in samples[f"small/{size}/descriptors"]]
        found = samples[f"small/{size}/gathered"]
        gathered, gather = [sample["seconds"] for sample in found], [sample["gather"] for sample in found]
        longer = [max(part, whole - part) for part, whole in zip(gather, gathered, strict=True)]
        columns = (each, gathered, gather, longer)
        cells = "".join(f"  {_spread([1000 * value for value in column], '.1f'):>23}" for column in columns)
        lines.append(f"{total // size:>7} of {_size(size):>8}{cells}")
        after.append(_faster(gathered, each))
        overlapped.append(_faster(longer, each))
    return [
        *lines,
        f"{net}: gathering and then reading is faster than a descriptor each {_where(after)}",
        f"{net}: gathering while reading can be faster than a descriptor each {_where(overlapped)}",
    ]


def _faster(found: list[float], other: list[float]) -> bool:
    return statistics.median(one / two for one, two in zip(found, other, strict=True)) < 1


def _where(wins: list[bool]) -> str:
    """In words: the tensor sizes for which something holds."""
    count = sum(wins)
    if not count:
        return f"at no size from {_size(SMALL[0])} on"
    if all(wins[:count]):
        return f"up to {_size(SMALL[count - 1])}" + ("" if count < len(SMALL) else ", the largest")
    return "at " + ", ".join(_size(size) for size, won in zip(SMALL, wins, strict=True) if won)


def _speeds(nbytes: int, found: list[dict[str, float]] | None) -> str:
    return _spread([nbytes / sample["seconds"] / 1e9 for sample in found], ".2f") if found else ""


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
