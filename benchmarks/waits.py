"""Measure how long a trainer waits in `Sender.push_async`, and what conversions add to packing: `make bench-waits`.

One trainer, which is this process, and a reference engine, on this machine's CPU, with a model of 300 tensors. Every
round has memcpys of its bytes, a push in the background of private parameters, one of parameters in shared memory, and
three packings into an arena: of parameters in bfloat16, of float32 masters that are cast to it, and of parameters that
are quantised to FP8 in blocks, beside a loop of torch's operations that does the same. Exit code 0 if everything was
served.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from typing import Any

import torch

from benchmarks import bare, report
from benchmarks.blocks import Blocks, engine
from benchmarks.trainer import MEMCPYS, ROOT
from weightsync import Sender
from weightsync.tensors.conversion import Conversion, Conversions
from weightsync.tensors.formats import formats_of
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.native_copy import Copies, Run
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.pack_plan import PackPlan, pack_plan

MIN_ROUNDS, WARM_UP, TENSORS, NBYTES = 7, 3, 300, 1_190_000_000
#: As buckets of a model of that size are.
BUCKET_BYTES = 64 << 20
#: The aims: memcpys that a trainer waits, the time of a packing with casts over that of one without, and memcpys by as
#: many threads that quantising takes.
WAIT_AIM, CAST_AIM, QUANTISE_AIM = 1.3, 1.5, 2.0
PRIVATE, IN_PLACE = "push_async, private memory", "push_async, shared memory"
PACKED, CAST = "packing bfloat16", "packing float32 masters as bfloat16"
QUANTISED, LOOP = "packing bfloat16 as FP8 in blocks", "torch's loop, FP8 in blocks"
#: The columns of the weights that are quantised, and their blocks.
COLUMNS, SIDE = 2048, 128
Sample = dict[str, float]


def measure(nbytes: int, rounds: int) -> tuple[dict[str, list[Sample]], bool]:
    """By path, the seconds of every round; and whether everything was served."""
    size = nbytes // TENSORS // 512 * 512
    private, shared = Blocks(TENSORS, size, seed=1), Blocks(TENSORS, size, seed=2).share_memory()
    buffers = [torch.ones(private.nbytes, dtype=torch.uint8) for _ in range(2)]
    samples: dict[str, list[Sample]] = {}
    served = True
    with engine(TENSORS, size) as server:
        for way, module in ((PRIVATE, private), (IN_PLACE, shared)):
            with Sender([server.url]) as sender:
                found = [_waited(sender, module, buffers) for _ in range(WARM_UP + rounds)]
                samples[way] = found[WARM_UP:]
                (rank,) = sender.status(digest=True)[server.url].ranks
                served &= rank.digest == module.digest()
    plain = list(private.state_dict().values())
    masters = [tensor.float() for tensor in plain]
    layout = Layout(tuple(spec_of(str(number), tensor) for number, tensor in enumerate(plain)))
    arena = torch.zeros(layout.nbytes, dtype=torch.uint8)
    casts = {number: Conversion(spec_of(str(number), master)) for number, master in enumerate(masters)}
    plans = {PACKED: _plan(layout, arena, plain, {}), CAST: _plan(layout, arena, masters, casts)}
    for _ in range(rounds):
        for way, plan in plans.items():
            samples.setdefault(way, []).append({"memcpy": _memcpy(buffers), "seconds": _seconds(plan)})
            served &= all(torch.equal(e.view(arena), t) for e, t in zip(layout.entries, plain, strict=True))
            arena.zero_()
    return samples, _quantise(plain, buffers, rounds, samples) and served


def _quantise(plain: list[torch.Tensor], buffers: list[torch.Tensor], rounds: int, samples: dict[str, Any]) -> bool:
    """Add to ``samples`` what quantising takes, and memcpys by as many threads; whether torch's loop gives the same."""
    (how,) = formats_of({"quant_method": "fp8", "weight_block_size": [SIDE, SIDE]})
    rows = plain[0].numel() // COLUMNS // SIDE * SIDE
    weights = [tensor.view(-1)[: rows * COLUMNS].view(rows, COLUMNS) for tensor in plain]
    conversions = {2 * number: Conversion(spec_of(str(number), one), how) for number, one in enumerate(weights)}
    layout = Layout([spec for each in conversions.values() for spec in how.made_of(each.source)])
    arena = torch.zeros(layout.nbytes, dtype=torch.uint8)
    plan = _plan(layout, arena, weights, conversions)
    run = Run(buffers[1].data_ptr(), buffers[0].data_ptr(), sum(one.nbytes for one in weights))
    copies, made = Copies([run]), [torch.empty_like(one, dtype=torch.float8_e4m3fn) for one in weights]
    for _ in range(rounds):
        for way, act in ((QUANTISED, lambda: _seconds(plan)), (LOOP, lambda: _loop(weights, made))):
            start = time.perf_counter()
            copies.make()
            memcpy = time.perf_counter() - start
            samples.setdefault(way, []).append({"memcpy": memcpy, "seconds": act()})
    pairs = zip(layout.entries[::2], made, strict=True)
    return all(torch.equal(entry.raw(arena), one.view(-1).view(torch.uint8)) for entry, one in pairs)


def _loop(weights: list[torch.Tensor], made: list[torch.Tensor]) -> float:
    """Quantise each tensor as transformers does; the seconds."""
    start, most = time.perf_counter(), torch.finfo(torch.float8_e4m3fn).max
    for source, target in zip(weights, made, strict=True):
        blocks = source.float().view(-1, SIDE, COLUMNS // SIDE, SIDE)
        largest = blocks.abs().amax((1, 3), keepdim=True)
        factors = torch.where(largest > 0, most / torch.where(largest > 0, largest, 1.0), 1.0)
        target.copy_((blocks * factors).clamp(-most, most).view(source.shape))
    return time.perf_counter() - start


def _memcpy(buffers: list[torch.Tensor]) -> float:
    return statistics.median(bare.memcpy(*buffers) for _ in range(MEMCPYS))


def _waited(sender: Sender, module: Blocks, buffers: list[torch.Tensor]) -> Sample:
    memcpy = _memcpy(buffers)
    start = time.perf_counter()
    future = sender.push_async(module)
    waited = time.perf_counter() - start
    future.result()
    return {"memcpy": memcpy, "seconds": waited, "push": time.perf_counter() - start}


def _plan(layout: Layout, arena: torch.Tensor, tensors: list[torch.Tensor], conversions: Conversions) -> PackPlan:
    """Packs and hashes all of the tensors, in buckets as a push has them."""
    slots = -(-layout.nbytes // BUCKET_BYTES)
    whole, addresses = Wanted([Subset(layout, {})]), [tensor.data_ptr() for tensor in tensors]
    plan = pack_plan(layout, arena, BUCKET_BYTES, slots, "xxh3_64", whole, addresses, conversions)
    assert isinstance(plan, PackPlan), "these tensors can be packed by a plan"
    return plan


def _seconds(plan: PackPlan) -> float:
    start = time.perf_counter()
    for _ in plan.fill(lambda bucket: None):
        pass
    return time.perf_counter() - start


def table(record: report.Record) -> str:
    """The whole report."""
    samples = record["samples"]
    lines = [f"{record['nbytes'] / 1e9:.2f} GB, {record['rounds']} rounds, milliseconds; {report.machine(record)}"]
    for way, found in samples.items():
        seconds, memcpys = [one["seconds"] for one in found], [one["seconds"] / one["memcpy"] for one in found]
        lines.append(
            f"  {way:34} {1e3 * statistics.median(seconds):8.1f} ({1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f})"
            f"  {statistics.median(memcpys):5.2f} memcpys ({min(memcpys):.2f} - {max(memcpys):.2f})"
        )
    waited = statistics.median(one["seconds"] / one["memcpy"] for one in samples[PRIVATE])
    ratio = statistics.median(
        cast["seconds"] / plain["seconds"] for cast, plain in zip(samples[CAST], samples[PACKED], strict=True)
    )
    quantising = statistics.median(one["seconds"] / one["memcpy"] for one in samples[QUANTISED])
    for what, value, aim in (
        ("a trainer waits in push_async, in memcpys", waited, WAIT_AIM),
        ("packing with casts, in packings without", ratio, CAST_AIM),
        ("quantising, in memcpys by as many threads", quantising, QUANTISE_AIM),
    ):
        lines.append(report.at_most(what, value, aim))
    lines.append(f"served: {'yes' if record['served'] else 'NO'}")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--bytes", type=int, default=NBYTES, help="of the model; others are not kept")
    args = parser.parse_args()
    # Every parameter in shared memory is an open file here, and for a moment in the engine.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    samples, served = measure(args.bytes, args.rounds)
    record: dict[str, Any] = {
        **report.here(),
        "rounds": args.rounds,
        "nbytes": args.bytes,
        "samples": samples,
        "served": served,
    }
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS and args.bytes == NBYTES, name="waits")
    print(f"{table(record)}\nraw samples: {path.relative_to(ROOT)}")
    return 0 if served else 1


if __name__ == "__main__":
    sys.exit(main())
