"""Measure pushes into one SGLang over two hosts, each of whose ranks keeps half of the model: `make bench-nodes`.

Hosts are network namespaces whose links carry 400 Mbit/s, as in `make bench-hosts`, and trainers are sharded by FSDP2
over one process a host. Each rank needs half of the model, so that is what the fullest link has to carry. Besides the
seconds of a push's transfer, the bytes are counted that leave the trainer's hosts, on their interfaces. Needs root and
`tc`. Exit code 0 if the engine served what was pushed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks import report
from benchmarks.hosts import MBIT, MIN_ROUNDS, link, running, told
from benchmarks.trainer import ROOT, made_of
from tests.hosts.network import Network
from tests.hosts.programs import Nodes

#: 134 million parameters; ranks keep 4096 and more bytes of each row of the layers that they split by columns.
CONFIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 259,
}
TRAINERS, RANKS, TRANSPORT = (1, 2, 4), 2, "nixl"
#: The aims: the share of what the links allow, by the number of trainer hosts; and bytes sent, of those that are kept.
AIMS, BYTES_AIM = {1: 0.9, 2: 0.85, 4: 0.8}, 1.05


def model_folder() -> Path:
    """The model, made once."""
    return made_of("nodes-model", lambda: Qwen3ForCausalLM(Qwen3Config(**CONFIG)))


def kept(folder: Path) -> tuple[int, int]:
    """The bytes of the model, and those that both ranks keep together: norms are kept by each."""
    with safe_open(folder / "model.safetensors", "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    whole = sum(tensor.nbytes for tensor in tensors.values())
    return whole, whole + (RANKS - 1) * sum(tensor.nbytes for name, tensor in tensors.items() if "norm" in name)


def measure(rounds: int, counts: tuple[int, ...]) -> report.Record:
    """Measure every number of trainer hosts."""
    folder = model_folder()
    whole, halves = kept(folder)
    names = [f"t{number}" for number in range(max(counts))], ["a", "b"]
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network(*names[0], *names[1])))
        trainers, hosts = ([network.hosts[name] for name in those] for those in names)
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine = Nodes(hosts, folder, work)
        stack.callback(engine.kill)
        engine.wait()
        for name in (*names[0], *names[1]):
            stack.enter_context(network.limited(name, MBIT))
        command = [sys.executable, "-m", "benchmarks.hosts", "--receive", hosts[0].address]
        receiver = stack.enter_context(hosts[0].popen(*command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        stack.callback(receiver.kill)
        receiver.stdout.readline()
        first: list[str] = []
        for count in counts:
            said: dict[str, Any] = {"seconds": [], "link": [], "bytes": [], "right": True}
            found[str(count)] = said
            with running(trainers[:count], "--trainer", str(folder), TRANSPORT, [engine.url]) as lines:
                for _ in range(3):  # by the engine's loader, by the plan, and then by its half
                    told(lines, "push")
                for number in range(rounds):
                    said["link"].append(link(trainers[0], hosts[:1], whole))
                    before = sum(host.sent() for host in trainers[:count])
                    said["seconds"].append(told(lines, "push")["transfer"])
                    said["bytes"].append(sum(host.sent() for host in trainers[:count]) - before)
                    digests = [rank["digest"] for rank in engine.status()["ranks"]]
                    first = first or digests
                    said["right"] &= (digests == first) == (number % 2 == 0)
            print(row(count, said, whole, halves), flush=True)
    return {"nbytes": whole, "kept": halves, "mbit": MBIT, "cases": found}


def row(count: int, said: dict[str, Any], whole: int, halves: int) -> str:
    """A line of the table."""
    # One trainer's link carries both halves; of several, each engine host's link carries one.
    limits = [seconds * halves / whole / (1 if count == 1 else RANKS) for seconds in said["link"]]
    share = statistics.median(limit / took for limit, took in zip(limits, said["seconds"], strict=True))
    sent = statistics.median(said["bytes"]) / halves
    spread = f"({min(said['seconds']):.2f} - {max(said['seconds']):.2f})"
    times = f"{statistics.median(limits):7.2f} {statistics.median(said['seconds']):8.2f} {spread:16}"
    return (
        f"{count} trainer host{'s' * (count > 1):1}, TP 2 on 2 hosts {times} {share:.2f} of the limit (aim "
        f"{AIMS[count]:g}), {sent:.3f} of the bytes kept (aim {BYTES_AIM}){'' if said['right'] else '  WRONG'}"
    )


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--trainers", type=int, nargs="+", default=list(TRAINERS), choices=TRAINERS)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the namespaces end too
    head = {**report.here(), "torch": torch.__version__}
    print(f"links of {MBIT} Mbit/s, {args.rounds} rounds; {report.machine(head)}")
    print(f"{'':34}{'limit':>7} {'seconds':>8}", flush=True)
    record = {**head, **measure(args.rounds, tuple(args.trainers))}
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS and set(args.trainers) == set(TRAINERS), name="nodes")
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(said["right"] for said in record["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
