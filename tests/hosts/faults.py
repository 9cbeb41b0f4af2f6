"""Random faults of hosts, links and processes during pushes between many hosts: `make faults-hosts ROUNDS=200`.

A trainer is sharded over two hosts, and engines are on three others; all hosts are network namespaces. In every round
something happens to one of them at a random moment of a push: a process is killed or frozen, a link is cut, or carries
10 Mbit/s for the rest of the push. The push ends in time, every engine that lives serves what was pushed or what it
served before, all that an error says of it is true, and once what was killed runs again the next push succeeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaConfig, LlamaForCausalLM

from tests.hosts.network import Network
from tests.hosts.programs import Engine, served
from tests.sharded.conftest import Trainer
from tools import models
from weightsync.tensors.layout import digest_of

TRAINERS, ENGINES = ("t0", "t1"), ("e0", "e1", "e2")
#: Seconds: the limit of a push, what it may take more, and that of a push after a fault.
LIMIT_S, LATE_S, PATIENCE_S = 12.0, 5.0, 120.0
SLOW_MBIT = 10
#: 8 million parameters in bfloat16.
CONFIG = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 4}


class Fault(NamedTuple):
    """What happens to whom, and when: seconds after the push has begun."""

    kind: str
    host: str
    after_s: float

    def __str__(self) -> str:
        return f"{self.kind} {self.host} after {self.after_s:.2f} s"


class Hosts:
    """The hosts with all that runs on them; ``mbit`` limits every link if it is not 0."""

    def __init__(self, folder: Path, transport: str, mbit: int):
        self._folder, self._transport, self._made = folder, transport, contextlib.ExitStack()
        self.network = self._made.enter_context(contextlib.closing(Network(*TRAINERS, *ENGINES)))
        self.engines = {name: Engine(self.network.hosts[name], folder) for name in ENGINES}
        for engine in self.engines.values():
            self._made.callback(engine.kill)
            engine.wait()
        #: Seconds that a push may take.
        self.limit_s = 4 * LIMIT_S if mbit else LIMIT_S
        for name in (*TRAINERS, *ENGINES) if mbit else ():
            self._made.enter_context(self.network.limited(name, mbit))
        state = models.load_reference(folder).state_dict()
        self.digests = [digest_of((n, t.neg() if odd else t) for n, t in state.items()) for odd in (0, 1)]
        self.trainer: Trainer | None = None
        self.start()

    def start(self) -> None:
        """A new trainer. `odd` says which weights it holds."""
        if self.trainer is not None:
            self.trainer.stop()
        hosts = [self.network.hosts[name] for name in TRAINERS]

        def popen(rank, *command, **how):
            return hosts[rank].popen(*command, environment={"GLOO_SOCKET_IFNAME": "eth0"}, **how)

        self.trainer = Trainer(self._folder, len(TRAINERS), hosts[0].address, popen)
        self._told("shard fsdp")
        self.odd = 0
        self.build()

    def _told(self, word: str) -> None:
        said = self.trainer.all(word)
        assert said == [None] * len(TRAINERS), said

    def build(self) -> None:
        """A new sender."""
        urls = [engine.url for engine in self.engines.values()]
        options = {"urls": urls, "timeout_s": self.limit_s, "transport": self._transport}
        said = self.trainer.all("build " + json.dumps(options))
        assert said == [None] * len(TRAINERS), said

    def change(self) -> None:
        """Train."""
        self._told("change")
        self.odd = 1 - self.odd

    def served(self) -> dict[str, str]:
        """The digest of each engine."""
        return {name: served(engine) for name, engine in self.engines.items()}

    def pid(self, host: str) -> int:
        """The process on a host."""
        return self.engines[host].pid if host in ENGINES else self.trainer.processes[TRAINERS.index(host)].pid

    def close(self) -> None:
        """End everything."""
        if self.trainer is not None:
            self.trainer.stop()
        self._made.close()


def suffer(hosts: Hosts, fault: Fault) -> str:
    """One round. Returns how the push ended. Raises AssertionError if anything is wrong."""
    before = hosts.served()
    hosts.change()
    limit_s = hosts.limit_s + LATE_S
    with contextlib.ExitStack() as over:
        begin = time.monotonic()
        hosts.trainer.tell("push")
        time.sleep(fault.after_s)
        happen(hosts, fault, over)
        replies: dict[int, dict] = {}
        silent = fault.kind in ("kill", "freeze")
        living = [rank for rank, name in enumerate(TRAINERS) if not (silent and fault.host == name)]
        reading = [threading.Thread(target=_hear, args=(hosts, rank, replies), daemon=True) for rank in living]
        for thread in reading:
            thread.start()
        for thread in reading:
            thread.join(max(0.1, begin + limit_s - time.monotonic()))
        assert sorted(replies) == living, f"{fault}: ranks that did not end: {sorted(set(living) - replies.keys())}"
    if fault.kind == "freeze" and fault.host in TRAINERS:
        hosts.trainer.hear(TRAINERS.index(fault.host))
    dead = {fault.host} if fault.kind == "kill" else set[str]()
    told = replies[min(replies)]
    want = hosts.digests[hosts.odd]
    for name, engine in hosts.engines.items():
        if name in dead:
            continue
        now = served(engine)
        assert now in (want, before[name]), f"{fault}: {name} serves a mix: {told}"
        if "error" not in told:
            assert now == want, f"{fault}: the push succeeded, and {name} serves something else"
        elif told["engines"].get(engine.url) == "unchanged":
            assert now == before[name], f"{fault}: {name} is not unchanged: {told}"
    heal(hosts, fault)
    hosts.change()
    end = time.monotonic() + PATIENCE_S
    while any("error" in reply for reply in hosts.trainer.all("push")):
        assert time.monotonic() < end, f"{fault}: no push succeeds afterwards"
    assert set(hosts.served().values()) == {hosts.digests[hosts.odd]}, f"{fault}: the next push"
    return told.get("error", "committed")


def _hear(hosts: Hosts, rank: int, replies: dict[int, dict]) -> None:
    replies[rank] = hosts.trainer.hear(rank)[0]


def happen(hosts: Hosts, fault: Fault, over: contextlib.ExitStack) -> None:
    """Have a fault happen; ``over`` ends it."""
    if fault.kind == "kill":
        os.kill(hosts.pid(fault.host), signal.SIGKILL)
    elif fault.kind == "freeze":
        pid = hosts.pid(fault.host)
        over.callback(os.kill, pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
    elif fault.kind == "cut":
        over.enter_context(hosts.network.cut(fault.host))
    else:
        over.enter_context(hosts.network.limited(fault.host, SLOW_MBIT))


def heal(hosts: Hosts, fault: Fault) -> None:
    """Start what was killed."""
    if fault.kind == "kill" and fault.host in ENGINES:
        engine = hosts.engines[fault.host]
        engine.kill()
        engine.start()
        engine.wait()
    elif fault.kind == "kill":
        hosts.start()


def main() -> int:
    """Run the rounds; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.hosts.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--mbit", type=int, default=0, help="the limit of every link; none by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    chance, found = random.Random(asked.seed), []
    with tempfile.TemporaryDirectory(prefix="ws-") as scratch:
        folder = Path(scratch)
        LlamaForCausalLM(LlamaConfig(vocab_size=259, **CONFIG)).bfloat16().save_pretrained(folder)
        models.make_tokenizer().save_pretrained(folder)
        for transport in ("nixl", "nccl"):
            hosts = Hosts(folder, transport, asked.mbit)
            try:
                begin = time.monotonic()
                assert not any("error" in said for said in hosts.trainer.all("push"))
                usual_s = time.monotonic() - begin
                kinds = ["kill", "freeze", "cut"] + ([] if asked.mbit else ["slow"])
                for number in range(asked.rounds // 2):
                    fault = Fault(
                        kinds[number % len(kinds)],
                        chance.choice(TRAINERS + ENGINES),
                        chance.uniform(0, 1.2 * usual_s),
                    )
                    begin = time.monotonic()
                    outcome = suffer(hosts, fault)
                    found.append([transport, fault.kind, fault.host, round(fault.after_s, 3), outcome])
                    print(f"{transport:5} {fault!s:32} {outcome:20} {time.monotonic() - begin:6.1f} s", flush=True)
            finally:
                hosts.close()
    counted = Counter(outcome for *_, outcome in found)
    print(f"{len(found)} faults, 0 mixed, 0 hung: {', '.join(f'{n} {what}' for what, n in counted.most_common())}")
    if asked.results:
        name = f"faults-hosts{f'-{asked.mbit}' if asked.mbit else ''}.json"
        record = {"date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "seed": asked.seed, "mbit": asked.mbit, "faults": found}
        asked.results.mkdir(parents=True, exist_ok=True)
        (asked.results / name).write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
