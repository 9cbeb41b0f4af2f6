"""The engines and trainers of scenarios, and what can be done to them."""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import requests

from tests.lora.conftest import OPTIONS
from tests.scenarios import adapters
from tests.scenarios.nursery import SITE, Child, Nursery
from tests.scenarios.pusher import RANKS, Pusher
from tests.scenarios.suspect import PATIENCE_S, Suspect
from tests.scenarios.weights import CONTENTS, RealWeights, TinyWeights
from tools import servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.protocol import http
from weightsync.protocol.auth import TOKEN_VARIABLE, engine_token
from weightsync.trainer.client import EngineClient

#: How the engines load, by number: by a load plan that writes what is served, or a standby; or, as vLLM, by their own
#: loader into a standby.
LOADS = ("in the pause", "into a standby", "by its own loader")

_START_S = 60.0
#: Seconds within which a killed process has ended.
_ENDING_S = 2.0
#: The label of an engine before the first push.
FIRST = "default"
#: What real engines are asked, and how far the logprobs of equal weights may be apart.
_PROMPT, _TOKENS, _TOLERANCE = list(b"Once upon a time"), 3, 2e-3
#: Steps between two deaths of a real engine, which takes half a minute to start.
_STEPS_OF_LIFE = 100


class Engine(Suspect):
    """A reference engine that serves `Tiny`, with ``drafts`` beside a draft model."""

    def __init__(self, number: int, nursery: Nursery | None, scratch: Path, *, drafts: bool = False):
        super().__init__(scratch / f"engine-{number}")
        self.number, self._nursery, self.port = number, nursery, servers.free_port()
        self._drafts = drafts
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = EngineClient(self.url, engine_token())
        self._child: Child | None = None
        #: For how many more steps it stands still, in a load or as a whole.
        self.still = 0
        #: For how many steps it has been dead.
        self.down = 0

    def __repr__(self) -> str:
        return f"engine {self.number}"

    def start(self) -> None:
        """Start the engine with content 0, always on the same port."""
        self.cancel()
        self.down = 0
        assert self._nursery is not None
        loads = LOADS[self.number]
        self._child = self._nursery.start("engine", self.fault_file, port=self.port, loads=loads, drafts=self._drafts)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while True:
            with suppress(requests.RequestException):
                requests.get(f"{self.url}/health", timeout=5)
                return
            if time.monotonic() > end or not self.alive():
                raise RuntimeError(f"{self} did not come up: {self.fault_file.with_suffix('.log').read_text()}")
            time.sleep(0.005)

    @property
    def pids(self) -> list[int]:
        """The process ids of the engine."""
        return [self._child.pid] if self._child is not None else []

    def alive(self) -> bool:
        """Whether its processes exist; they may stand still."""
        return self._child is not None and self._child.alive()

    def ends(self) -> bool:
        """Whether the engine has ended, or ends within two seconds."""
        end = time.monotonic() + _ENDING_S
        while self.alive() and time.monotonic() < end:
            time.sleep(0.01)
        return not self.alive()

    def kill(self) -> None:
        """End it now."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self.still = 0

    def adapter(self, weights: TinyWeights, content: int | None) -> int | None:
        """The content of the adapter that it answers with, beside weights of ``content``; None if it is none."""
        held = adapters.served(self.url, PATIENCE_S)
        return weights.adapter_digests.index(held) if held in weights.adapter_digests else None

    def signal(self, what: int) -> None:
        """Send a signal to all its processes."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, what)

    def freeze(self, steps: int) -> None:
        """Stop all its processes for a number of steps."""
        if self.alive():
            self.signal(signal.SIGSTOP)
            self.still = steps

    def go_on(self) -> None:
        """Continue an engine that was held or frozen."""
        self.cancel()
        self.signal(signal.SIGCONT)
        self.still = 0

    def reset(self) -> None:
        """Bring the engine back to its initial state."""
        self.kill()
        self.start()


class RealEngine(Engine):
    """vLLM or SGLang with one rank, started once; a scenario's initial weights are pushed."""

    def __init__(self, kind: str, weights: RealWeights, scratch: Path):
        super().__init__(0, None, scratch)
        self._kind, self._weights = kind, weights
        self._server: servers.Server | None = None
        self._workers: list[int] = []

    def start(self) -> None:
        self.cancel()
        self.down = 0
        env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), str(servers.ROOT), os.environ.get("PYTHONPATH")]))
        }
        env["FAULT_FILE"] = str(self.fault_file)
        model, args = self._weights.folder(0), OPTIONS[self._kind]
        self._server = servers.start(self._kind, model, tp=1, port=self.port, env=env, args=args)
        self._workers = [rank.pid for rank in self.client.open(Deadline(PATIENCE_S)).ranks]

    @property
    def pids(self) -> list[int]:
        return [self._server.process.pid, *self._workers] if self._server is not None else []

    def alive(self) -> bool:
        if self._server is None or self._server.process.poll() is not None:
            return False
        living = {process.pid for process in self._server.processes()}
        return living.issuperset(self._workers)

    def answer(self) -> list[float]:
        """The logprobs of what it answers with its adapter."""
        assert self._server is not None
        return servers.greedy(dataclasses.replace(self._server, adapter=adapters.NAME), _PROMPT, _TOKENS)[1]

    def adapter(self, weights: RealWeights, content: int | None) -> int | None:
        answer = self.answer()
        alike = [
            adapter
            for (of, adapter), known in weights.answers.items()
            if of == content and all(abs(a - b) <= _TOLERANCE for a, b in zip(answer, known, strict=True))
        ]
        return alike[0] if len(alike) == 1 else None

    def kill(self) -> None:
        if self._server is not None:
            self.signal(signal.SIGKILL)
            self._server.stop(deadline_s=3.0)
            self._server = None
        self.still = 0

    def reset(self) -> None:
        self.go_on()
        if not self.alive():
            self.kill()
            self.start()
        self.client.abort("", Deadline(PATIENCE_S))
        with Sender([self.url], timeout_s=PATIENCE_S) as sender:
            sender.push(self._weights.mapping(0), version=FIRST)
            for _ in range(2):  # the engine keeps the one before
                sender.push(self._weights.adapter(0), version=FIRST, lora=adapters.NAME)


class World:
    """All engines, trainers and weights of a run. ``kind`` is reference, vllm or sglang, or drafts: reference engines
    with draft models, which every push has too."""

    def __init__(self, kind: str = "reference"):
        drafts = kind == "drafts"
        self.kind = kind = "reference" if drafts else kind
        #: Seconds by which a call may outlast its deadline.
        self.grace_s = 1.0 if kind == "reference" else 2.0
        #: How much longer calls may take than with reference engines, as a factor.
        self.times = 1.0 if kind == "reference" else 4.0
        self._ended_at = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="ws-")
        scratch = Path(self._scratch.name)
        self._before = os.environ.get(TOKEN_VARIABLE)
        os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)  # for this run only
        self.nursery = Nursery(scratch)
        if kind == "reference":
            self.weights = TinyWeights(scratch, drafts=drafts)
            self.engines = [Engine(number, self.nursery, scratch, drafts=drafts) for number in range(3)]
        else:
            self.weights = RealWeights(scratch)
            self.engines = [RealEngine(kind, self.weights, scratch)]
        self.module = self.weights.module()
        self.mapping = self.weights.copy(0)
        #: The learner's parameters in shared memory, which other processes push, too.
        self.shared = self.weights.copy(0)
        for one in self.shared.values():
            one.share_memory_()
        #: Trainers in other processes: a single one, and ranks on one host and on two.
        self.pusher, self.sharded, self.spread = (Pusher(self.nursery, scratch, size) for size in (1, 2, RANKS))
        try:
            for engine in self.engines:
                engine.start()
            if not self.weights.digests:
                self.weights.digests = [self._learn(content) for content in range(CONTENTS)]
        except BaseException:
            self.close()
            raise

    def _learn(self, content: int) -> str:
        """Learn what the real engine answers with a content and each adapter; returns its digest."""
        (engine,) = self.engines
        with Sender([engine.url]) as sender:
            sender.push(self.weights.mapping(content), version=f"content-{content}")
            for adapter in range(CONTENTS):
                sender.push(self.weights.adapter(adapter), lora=adapters.NAME)
                self.weights.answers[content, adapter] = engine.answer()
            return digest_in(sender.status(digest=True)[engine.url])

    @property
    def trainers(self) -> list[Pusher]:
        """All trainers in other processes."""
        return [self.pusher, self.sharded, self.spread]

    def reset(self) -> None:
        """Bring everything back to its initial state."""
        for trainer in self.trainers:
            trainer.kill()
        for engine in self.engines:
            engine.reset()

    def may_end(self, steps: int) -> bool:
        """Whether an engine may be killed after this many steps; if so, it counts as killed."""
        if self.kind == "reference":
            return True
        may = steps - self._ended_at >= _STEPS_OF_LIFE
        self._ended_at = steps if may else self._ended_at
        return may

    def own_files(self) -> set[int]:
        """Descriptors of this process that the world holds."""
        channels = [self.nursery.channel, *(channel for trainer in self.trainers for channel in trainer.channels)]
        children = [child for trainer in self.trainers for child in trainer.children]
        children += [engine._child for engine in self.engines if engine._child is not None]
        return {channel.fileno() for channel in channels} | {child._file for child in children}

    def left_by_trainers(self) -> list[str]:
        """What living trainers in other processes still use of their senders, once they are closed."""
        return [one for trainer in self.trainers for one in trainer.left()]

    def close(self) -> None:
        """End everything."""
        for trainer in self.trainers:
            trainer.kill()
        for engine in self.engines:
            engine.kill()
        self.nursery.close()
        if self._before is None:
            del os.environ[TOKEN_VARIABLE]
        else:
            os.environ[TOKEN_VARIABLE] = self._before
        self._scratch.cleanup()


def digest_in(status: http.StatusReply) -> str:
    """The digests of all ranks in one string."""
    return " ".join(rank.digest for rank in status.ranks)


def living(engines: Sequence[Engine]) -> list[Engine]:
    """The engines that have not ended."""
    return [engine for engine in engines if engine.alive()]
