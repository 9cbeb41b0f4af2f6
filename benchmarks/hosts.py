"""Measure pushes between hosts whose links are the limit, beside what one plain TCP stream moves: `make bench-hosts`.

Hosts are network namespaces of this machine, joined by a bridge; `tc` limits the link of each, in both directions, by a
token bucket. Trainers are sharded by FSDP2 over one process a host, and engines are reference engines, one a host. In
every round each case pushes once, and one TCP stream sends the same bytes from a trainer's host to an engine's. Seconds
are those of a push's transfer, until every engine has received and verified everything; the limit is what the links
allow by the speed of that stream. Beside the case of most engines, the same bytes reach as many hosts by a TCP stream
to each, as when rank 0 sends to every engine, and by a broadcast of gloo. Needs root and `tc`. Exit code 0 if every
engine served what was pushed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import report
from benchmarks.lines import LIMIT_S, Lines, serve
from benchmarks.trainer import ROOT, made_of
from tests.hosts.network import Host, Network
from tests.hosts.programs import Engine, served
from tools import models, servers
from weightsync import Sender
from weightsync.tensors.layout import digest_of

MBIT, MIN_ROUNDS, PORT = 400, 5, 7999
#: 134 million parameters.
CONFIG = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16}
_CHUNK: bytes = bytes(1 << 20)


class Case(NamedTuple):
    """Hosts of the trainer and of engines, the transport, and how many times the model crosses the fullest link."""

    trainers: int
    engines: int
    transport: str
    crosses: float

    def __str__(self) -> str:
        hosts = f"{self.trainers} trainer host{'s' * (self.trainers > 1)}"
        return f"{hosts}, {self.engines} engine{'s' * (self.engines > 1)}, {self.transport}"


CASES = (
    Case(1, 1, "nccl", 1),
    Case(1, 1, "nixl", 1),
    Case(2, 1, "nccl", 1),
    Case(2, 1, "nixl", 1),
    Case(4, 1, "nccl", 1),
    Case(4, 1, "nixl", 1),
    Case(1, 2, "nccl", 2),
    Case(1, 2, "nixl", 1),
    Case(1, 4, "nixl", 1),
    Case(1, 8, "nixl", 1),
    Case(2, 2, "nccl", 1),
    Case(2, 2, "nixl", 1),
    Case(4, 2, "nccl", 1),
    Case(4, 2, "nixl", 1),
    Case(2, 8, "nixl", 1),
)


def model_folder() -> Path:
    """The model, made once."""
    return made_of("hosts-model", lambda: LlamaForCausalLM(LlamaConfig(vocab_size=259, **CONFIG)))


# ---- on the hosts ----------------------------------------------------------------------------------------------------


def trainer(rank: int, size: int, address: str, port: str, folder: str, transport: str, urls: list[str]) -> None:
    """Run a process of a trainer until its input ends."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    torch.set_num_threads(1)
    model = models.load_reference(Path(folder))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
        mesh = dist.init_device_mesh("cpu", (size,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    with Sender(urls, transport=transport, timeout_s=LIMIT_S) as sender:

        def push(*_: object) -> dict[str, float]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.neg_()
            return dict(sender.push(model).seconds)

        serve(Lines(0, writing), {"push": push})
    os._exit(0)


def broadcast(rank: int, size: int, address: str, port: str, nbytes: int) -> None:
    """Take part in broadcasts of so many bytes from rank 0 until the input ends."""
    writing = os.dup(1)
    os.dup2(2, 1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=size)
    data = torch.zeros(nbytes, dtype=torch.uint8)
    serve(Lines(0, writing), {"broadcast": lambda *_: dist.broadcast(data, 0)})
    os._exit(0)


def receive(address: str) -> None:
    """Accept connections and read from them, for ever."""
    with socket.create_server((address, PORT)) as listening:
        print("listens", flush=True)
        while True:
            with listening.accept()[0] as connection:
                while connection.recv(1 << 20):
                    pass
                connection.sendall(b".")


def send(address: str, nbytes: int) -> None:
    """Print the seconds that one TCP stream takes."""
    with socket.create_connection((address, PORT)) as connection:
        start = time.perf_counter()
        for _ in range(nbytes // len(_CHUNK)):
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(time.perf_counter() - start)


# ---- from outside ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def running(hosts: Sequence[Host], option: str, *asked: object) -> Iterator[list[Lines]]:
    """A process on each of these hosts, which form a group; yields the lines of each."""
    port, env = str(servers.free_port()), {"GLOO_SOCKET_IFNAME": "eth0"}
    with contextlib.ExitStack() as stack:
        lines = []
        for rank, host in enumerate(hosts):
            told = [rank, len(hosts), hosts[0].address, port, *asked]
            command = [sys.executable, __file__, option, json.dumps(told)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(host.popen(*command, environment=env, **pipes))
            stack.callback(process.kill)
            lines.append(Lines(process.stdout.fileno(), process.stdin.fileno()))
        yield lines


def told(lines: Sequence[Lines], word: str) -> Any:
    """Have every process do something; what the first replies. Raises RuntimeError with what a process has raised."""
    for one in lines:
        one.say(word)
    replies = [one.hear(LIMIT_S) for one in lines]
    for reply in replies:
        if reply is None or reply[0] != "done":
            raise RuntimeError(f"{word} failed: {reply}")
    return json.loads(replies[0][2]) if replies[0] is not None else None


def link(sender: Host, receivers: Sequence[Host], nbytes: int) -> float:
    """The seconds that TCP streams take from one host to each of others, at once."""
    commands = [[sys.executable, __file__, "--send", receiver.address, str(nbytes)] for receiver in receivers]
    with contextlib.ExitStack() as stack:
        pipe = {"stdout": subprocess.PIPE, "text": True}
        sending = [stack.enter_context(sender.popen(*command, **pipe)) for command in commands]
        return max(float(process.communicate(timeout=LIMIT_S)[0]) for process in sending)


def peers(rounds: int, sender: Host, receivers: Sequence[Host], nbytes: int) -> dict[str, list[float]]:
    """The seconds in which the bytes reach all receivers by other means."""
    alone = [link(sender, receivers, nbytes) for _ in range(rounds)]
    broadcasts = []
    with running([sender, *receivers], "--broadcast", nbytes) as lines:
        for _ in range(1 + rounds):  # the first connects
            start = time.perf_counter()
            told(lines, "broadcast")
            broadcasts.append(time.perf_counter() - start)
    return {"a TCP stream to each": alone, "a broadcast of gloo": broadcasts[1:]}


def measure(rounds: int, cases: Sequence[Case]) -> report.Record:
    """Measure every one of these cases."""
    folder = model_folder()
    state = models.load_reference(folder).state_dict()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    digests = [digest_of((name, tensor.neg() if odd else tensor) for name, tensor in state.items()) for odd in (0, 1)]
    names = [f"t{number}" for number in range(4)], [f"e{number}" for number in range(8)]
    found: dict[str, Any] = {str(case): {"seconds": [], "link": [], "right": True} for case in cases}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network(*names[0], *names[1])))
        trainers, others = ([network.hosts[name] for name in those] for those in names)
        engines = [Engine(host, folder) for host in others]
        for engine in engines:
            stack.callback(engine.kill)
            engine.wait()
        for name in (*names[0], *names[1]):
            stack.enter_context(network.limited(name, MBIT))
        for host in others:
            command = [sys.executable, __file__, "--receive", host.address]
            receiver = stack.enter_context(host.popen(*command, stdout=subprocess.PIPE, text=True))
            stack.callback(receiver.kill)
            receiver.stdout.readline()
        for case in cases:
            said, urls = found[str(case)], [engine.url for engine in engines[: case.engines]]
            with running(trainers[: case.trainers], "--trainer", str(folder), case.transport, urls) as lines:
                told(lines, "push")
                for number in range(rounds):
                    said["link"].append(link(trainers[0], others[:1], nbytes))
                    said["seconds"].append(told(lines, "push")["transfer"])
                    want = digests[number % 2]  # the first push was of the changed weights
                    said["right"] &= all(served(engine) == want for engine in engines[: case.engines])
            print(row(case, said), flush=True)
        most = any(case.engines == len(others) for case in cases)
        beside = peers(rounds, trainers[0], others, nbytes) if most else {}
        for name, seconds in beside.items():
            print(f"{f'1 host, {len(others)} others: {name}':42}{spread(seconds)}", flush=True)
    return {"nbytes": nbytes, "mbit": MBIT, "cases": found, "peers": beside}


def row(case: Case, said: dict[str, Any]) -> str:
    """A line of the table."""
    limits = [case.crosses * seconds for seconds in said["link"]]
    share = statistics.median(limit / took for limit, took in zip(limits, said["seconds"], strict=True))
    times = f"{statistics.median(limits):7.2f} {spread(said['seconds'])}"
    return f"{case!s:34}{times}{share:6.2f}{'' if said['right'] else '  WRONG'}"


def spread(seconds: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{statistics.median(seconds):8.2f} {f'({min(seconds):.2f} - {max(seconds):.2f})':16}"


def main() -> int:
    """Run the benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS, help=f"{MIN_ROUNDS} by default; fewer are not kept")
    parser.add_argument("--transport", choices=("nccl", "nixl"), help="both by default")
    parser.add_argument("--trainer", help=argparse.SUPPRESS)
    parser.add_argument("--broadcast", help=argparse.SUPPRESS)
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--send", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        trainer(*json.loads(args.trainer))
    if args.broadcast:
        broadcast(*json.loads(args.broadcast))
    if args.receive:
        receive(args.receive)
    if args.send:
        send(args.send[0], int(args.send[1]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # then the namespaces end too
    head = {**report.here(), "torch": torch.__version__}
    print(f"links of {MBIT} Mbit/s, {args.rounds} rounds; {report.machine(head)}")
    print(f"{'':34}{'limit':>7} {'seconds':>8} {'':16}{'share of the limit':>6}", flush=True)
    record = {**head, **measure(args.rounds, [case for case in CASES if args.transport in (None, case.transport)])}
    name = f"hosts-{args.transport}" if args.transport else "hosts"
    path = report.save(record, kept=args.rounds >= MIN_ROUNDS, name=name)
    print(f"raw samples: {path.relative_to(ROOT)}")
    return 0 if all(said["right"] for said in record["cases"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
