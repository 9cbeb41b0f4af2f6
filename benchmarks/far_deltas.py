"""Measure pushes of what has changed to an engine on another host over a slow link: `make bench-far-deltas`.

Two hosts are network namespaces of this machine; `tc` limits the link of each to 400 Mbit/s. A trainer pushes a model
of random bfloat16 weights into a reference engine over NIXL: everything (`delta="never"`), then, with `delta="auto"`,
one element in a hundred changed at random places to random values, then half of them. Seconds are those of a whole
push. Needs root and `tc`. Exit code 0 if the engine served what was pushed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.lines import LIMIT_S, Lines, serve
from benchmarks.trainer import ROOT, made_of
from tests.hosts.network import Host, Network
from tests.hosts.programs import Engine, served
from tools import models
from weightsync import Sender
from weightsync.tensors.layout import digest_of

MBIT, MIN_ROUNDS = 400, 5
#: The aims: how many times as fast as everything one in a hundred is; the time of half of it, in that of everything.
FAST_AIM, HALF_AIM = 15.0, 1.05
ALL, FEW, HALF = "everything", "1 % changed", "50 % changed"
#: By case: `Sender`'s delta, and the share of the elements that changes before each push.
CASES = {ALL: ("never", 0.01), FEW: ("auto", 0.01), HALF: ("auto", 0.5)}
#: Millions of bytes, and the layers of a model of that size.
LAYERS = {67: 2, 134: 4, 268: 8, 537: 16, 1070: 32}


def model_folder(size: int) -> Path:
    """The model of so many million bytes, made once."""
    config = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 259}
    return made_of(
        f"far-deltas-{size}", lambda: LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS[size], **config))
    )


# ---- on the trainer's host -------------------------------------------------------------------------------------------


def trainer(folder: str, url: str) -> None:
    """Push as the lines of the input say, until it ends."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    model, chance = models.load_reference(Path(folder)), torch.Generator().manual_seed(0)
    senders: dict[str, Sender] = {}

    def push(case: str, _: bytes) -> dict[str, Any]:
        delta, share = CASES[case.replace("_", " ")]
        if delta not in senders:
            while senders:
                senders.popitem()[1].close()
            senders[delta] = Sender([url], transport="nixl", timeout_s=LIMIT_S, delta=delta)
        for parameter in model.parameters():
            change(parameter.data.view(-1), share, chance)
        result = senders[delta].push(model)
        sent = None if result.delta is None else {"nbytes": result.delta.nbytes, "find_s": result.delta.find_s}
        want = digest_of(model.state_dict().items())
        return {
            "seconds": result.seconds,
            "nbytes": result.nbytes,
            "delta": sent,
            "want": want,
            "why": result.delta_reason,
        }

    serve(Lines(0, writing), {"push": push})
    os._exit(0)


def change(values: torch.Tensor, share: float, chance: torch.Generator) -> None:
    """Set a share of the elements, at random places, to random values."""
    at = (torch.rand(len(values), generator=chance) < share).nonzero()[:, 0]
    values[at] = torch.randint(-(1 << 14), 1 << 14, (len(at),), generator=chance, dtype=torch.int16).view(values.dtype)


# ---- from outside ----------------------------------------------------------------------------------------------------


def measure(size: int, rounds: int) -> report.Record:
    """Every case, one after the other; the first push of each sender is not counted."""
    folder = model_folder(size)
    found: dict[str, Any] = {case: {"pushes": [], "right": True} for case in CASES}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network("trainer", "engine")))
        engine = Engine(network.hosts["engine"], folder)
        stack.callback(engine.kill)
        engine.wait()
        for name in network.hosts:
            stack.enter_context(network.limited(name, MBIT))
        with running(network.hosts["trainer"], folder, engine.url) as lines:
            for case, said in found.items():
                for number in range(rounds + (case != HALF)):
                    pushed = told(lines, case)
                    said["right"] &= served(engine) == pushed.pop("want")
                    if number or case == HALF:
                        said["pushes"].append(pushed)
                print(row(case, said), flush=True)
    return {"megabytes": size, "mbit": MBIT, "cases": found}


@contextlib.contextmanager
def running(host: Host, folder: Path, url: str) -> Any:
    """The trainer on its host; yields its lines."""
    command = [sys.executable, "-m", "benchmarks.far_deltas", "--trainer", str(folder), url]
    with host.popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as process:
        try:
            yield Lines(process.stdout.fileno(), process.stdin.fileno())
        finally:
            process.kill()


def told(lines: Lines, case: str) -> Any:
    """Have the trainer push; what it replies. Raises RuntimeError with what it has raised."""
    lines.say("push", case.replace(" ", "_"))
    reply = lines.hear(LIMIT_S)
    if reply is None or reply[0] != "done":
        raise RuntimeError(f"the push failed: {reply}")
    return json.loads(reply[2])


def row(case: str, said: dict[str, Any]) -> str:
    """A line of the table."""
    seconds = totals(said)
    nbytes = [one["nbytes"] if one["delta"] is None else one["delta"]["nbytes"] for one in said["pushes"]]
    spread = f"{statistics.median(seconds):7.2f} ({min(seconds):.2f} - {max(seconds):.2f})"
    parts = ", ".join(
        f"{name} {statistics.median(one['seconds'][name] for one in said['pushes']):.2f}"
        for name in ("gather", "digest", "transfer", "verify", "commit")
    )
    finds = [one["delta"]["find_s"] for one in said["pushes"] if one["delta"] is not None]
    parts += f", finding {statistics.median(finds):.2f}" if finds else ""
    return (
        f"{case:14}{spread:24} {statistics.median(nbytes) / 1e6:8.1f} MB  {parts}{'' if said['right'] else '  WRONG'}"
    )


def totals(said: dict[str, Any]) -> list[float]:
    """The seconds of each push."""
    return [one["seconds"]["total"] for one in said["pushes"]]


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--size", type=int, choices=LAYERS, default=268, help="of the model, in million bytes")
    parser.add_argument("--trainer", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer(*args.trainer)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the namespaces end too
    head = {**report.here(), "torch": torch.__version__, "rounds": args.rounds}
    print(f"links of {MBIT} Mbit/s, {args.size} MB, {args.rounds} rounds, seconds; {report.machine(head)}", flush=True)
    record = {**head, **measure(args.size, args.rounds)}
    every, few, half = (statistics.median(totals(record["cases"][case])) for case in (ALL, FEW, HALF))
    print(report.at_most(f"{FEW}, in the time of {ALL}", few / every, 1 / FAST_AIM))
    print(report.at_most(f"{HALF}, in the time of {ALL}", half / every, HALF_AIM))
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name=f"far-deltas-{args.size}")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(said["right"] for said in record["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
