"""Measure deltas between two versions of a tensor: `make bench-deltas`.

No engine: finding what changed, making the delta and applying it, beside memcpys of the same bytes by as many threads,
with one element in a hundred changed to random bits, and what writing a version into memory costs with half of the
elements changed, beside one that is complete. Then the bytes of each element that changed: of those, and of a Llama in
bfloat16 after a step of AdamW on float32 masters. Exit code 0 if everything was restored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.trainer import ROOT
from weightsync.files import Folder
from weightsync.tensors import delta, native_copy

MIN_ROUNDS, NBYTES, ITEM = 7, 1_070_000_000, 2
#: The aims: memcpys that finding takes; bytes of a changed element, random and of an optimiser step; dense by density.
FIND_AIM, RANDOM_AIM, STEP_AIM, DENSE_AIM = 2.0, 3.3, 2.5, 1.05
STEPS, RATES = 12, (1e-5, 1e-6)
FIND, ENCODE, APPLY = "finding what changed", "making the delta", "applying the delta"
FULL, HALF = "writing all of a version", "writing half changed"
Sample = dict[str, float]


def timed(act: Callable[[], object]) -> float:
    """The seconds of a call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def versions(nbytes: int, density: float) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Random elements of two bytes, the same with a share of them replaced at random; and how many differ."""
    chance = np.random.default_rng(0)
    old = chance.integers(0, 1 << 16, nbytes // ITEM, dtype=np.uint16)
    new = old.copy()
    at = np.flatnonzero(chance.random(len(new), dtype=np.float32) < density)
    new[at] = chance.integers(0, 1 << 16, len(at), dtype=np.uint16)
    count = int(np.count_nonzero(old != new))
    return torch.from_numpy(old.view(np.uint8)), torch.from_numpy(new.view(np.uint8)), count


def found(old: torch.Tensor, new: torch.Tensor) -> None:
    """Find what changed, as `delta.encode` does."""
    before, after = old.numpy(), new.numpy()
    step = delta.TOGETHER * delta.PIECE_BYTES
    pieces = [slice(at, at + step) for at in range(0, len(before), step)]
    native_copy.each(lambda piece: len(delta.changes(before[piece], after[piece], ITEM)[0]), pieces)


def speeds(nbytes: int, rounds: int) -> tuple[dict[str, list[Sample]], Sample, bool]:
    """By what was done, the seconds of every round and of a memcpy; the size of the delta; whether it was restored."""
    old, new, count = versions(nbytes, 0.01)
    copy = torch.ones_like(old)
    memcpy = native_copy.Copies([native_copy.Run(old.data_ptr(), copy.data_ptr(), old.nbytes)])
    made, samples, right = b"", {FIND: [], ENCODE: [], APPLY: []}, True
    for _ in range(rounds):
        samples[FIND].append({"memcpy": timed(memcpy.make), "seconds": timed(lambda: found(old, new))})
        before = timed(memcpy.make)
        start = time.perf_counter()
        made = delta.encode(old, new, ITEM)
        samples[ENCODE].append({"memcpy": before, "seconds": time.perf_counter() - start})
        before = timed(memcpy.make)
        start = time.perf_counter()
        delta.apply(made, copy, ITEM)
        samples[APPLY].append({"memcpy": before, "seconds": time.perf_counter() - start})
        right &= torch.equal(copy, new)
    return samples, {"density": 2 * count / nbytes, "bytes_per_change": len(made) / count, "nbytes": len(made)}, right


def written(nbytes: int, rounds: int) -> dict[str, list[Sample]]:
    """Second versions in shared memory, in full or what half of the elements changed: their seconds and bytes."""
    old, new, _ = versions(nbytes, 0.5)
    samples: dict[str, list[Sample]] = {FULL: [], HALF: []}
    for _ in range(rounds):
        for way, full_every in ((FULL, 1), (HALF, 2)):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
                folder = Folder(Path(where), token="benchmark", full_every=full_every)
                # Another tensor does not change: if both did, it would be a full version anyway.
                for model in (old, new):
                    done = folder.write({"changed": model.view(torch.bfloat16), "same": torch.ones(1)})
                assert done.full == (full_every == 1)
                samples[way].append({"seconds": done.seconds, "nbytes": done.nbytes})
    return samples


def steps() -> Iterator[tuple[str, Sample, bool]]:
    """Of one step at each rate, after some others: its density, the bytes of each change; whether it was restored."""
    import transformers

    for rate in RATES:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4
        )
        model = transformers.LlamaForCausalLM(config)
        optimiser, before = torch.optim.AdamW(model.parameters(), lr=rate), dict[str, torch.Tensor]()
        for _ in range(STEPS):
            before = {name: raw(parameter) for name, parameter in model.named_parameters()}
            tokens = torch.randint(0, 2048, (4, 64))
            optimiser.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            optimiser.step()
        nbytes, changed, elements, right = 0, 0, 0, True
        for name, parameter in model.named_parameters():
            old, new = before[name], raw(parameter)
            made = delta.encode(old, new, ITEM)
            nbytes += len(new if made is None else made)
            changed += int((old.view(torch.int16) != new.view(torch.int16)).sum())
            elements += parameter.numel()
            if made is not None:
                delta.apply(made, old, ITEM)
                right &= torch.equal(old, new)
        sample = {"density": changed / elements, "bytes_per_change": nbytes / changed, "nbytes": nbytes}
        yield f"one step of AdamW, rate {rate:g}", sample, right


def raw(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of a parameter as engines get it."""
    return parameter.detach().bfloat16().view(-1).view(torch.uint8).clone()


def table(record: report.Record) -> str:
    """The whole report."""
    lines = [f"{record['nbytes'] / 1e9:.2f} GB, {record['rounds']} rounds, milliseconds; {report.machine(record)}"]
    for way, samples in record["samples"].items():
        seconds = [one["seconds"] for one in samples]
        text = (
            f"  {way:40} {1e3 * statistics.median(seconds):8.1f} ({1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f})"
        )
        if "memcpy" in samples[0]:
            ratios = [one["seconds"] / one["memcpy"] for one in samples]
            text += f"  {statistics.median(ratios):5.2f} memcpys ({min(ratios):.2f} - {max(ratios):.2f})"
        lines.append(text)
    for what, one in record["sizes"].items():
        lines.append(f"  {what:30} {100 * one['density']:.2f} % changed, {one['bytes_per_change']:.2f} bytes each")
    finding = statistics.median(one["seconds"] / one["memcpy"] for one in record["samples"][FIND])
    pairs = list(zip(record["samples"][HALF], record["samples"][FULL], strict=True))
    slower = statistics.median(half["seconds"] / full["seconds"] for half, full in pairs)
    random, *real = (one["bytes_per_change"] for one in record["sizes"].values())
    for what, value, aim in (
        ("finding what changed, in memcpys by as many threads", finding, FIND_AIM),
        ("bytes of an element that changed at random", random, RANDOM_AIM),
        ("bytes of an element that changed in a step", max(real), STEP_AIM),
        ("half changed, in the time of all", slower, DENSE_AIM),
        ("half changed, in the size of all", pairs[0][0]["nbytes"] / pairs[0][1]["nbytes"], DENSE_AIM),
    ):
        lines.append(report.at_most(what, value, aim))
    lines.append(f"restored: {'yes' if record['restored'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--bytes", type=int, default=NBYTES, help="of the tensor; others are not kept")
    args = parser.parse_args()
    samples, random, right = speeds(args.bytes, args.rounds)
    samples |= written(args.bytes, args.rounds)
    sizes = {"1 % at random": random}
    for what, size, restored in steps():
        sizes[what], right = size, right and restored
    record: dict[str, Any] = {
        **report.here(),
        "rounds": args.rounds,
        "nbytes": args.bytes,
        "threads": native_copy.most_threads(),
        "samples": samples,
        "sizes": sizes,
        "restored": right,
    }
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS and args.bytes == NBYTES, name="deltas")
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
