"""The engines and trainers of scenarios, and what can be done to them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import requests
import torch

from tests.scenarios.nursery import SITE, Child, Nursery
from tests.scenarios.trainer import describe_shared
from tests.scenarios.weights import CONTENTS, RealWeights, TinyWeights
from tools import servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.protocol import http
from weightsync.protocol.auth import TOKEN_VARIABLE, engine_token
from weightsync.trainer.client import EngineClient

_START_S = 60.0
#: Seconds within which a killed process has ended.
_ENDING_S = 2.0
#: The label of an engine before the first push.
FIRST = "default"
#: Ranks of the trainer that is on two hosts.
RANKS = 3
#: Steps between two deaths of a real engine, which takes half a minute to start.
_STEPS_OF_LIFE = 100
#: Seconds between two looks for ranks of a trainer that have stopped.
_LOOK_S = 0.05
#: Seconds for calls that are not part of a scenario.
PATIENCE_S = 30.0


class Fault(NamedTuple):
    """A fault at a point of a process; see `tests/faults/site`.

    A process that is held or stopped continues ``steps`` steps later.
    """

    point: str
    action: str
    where: tuple[tuple[str, Any], ...] = ()
    steps: int = 1


class Suspect:
    """A process for which faults can be ordered."""

    def __init__(self, fault_file: Path):
        self.fault_file, self._fired = fault_file, Path(f"{fault_file}.fired")
        self._goes_on = 0

    def order(self, fault: Fault) -> None:
        """Order a fault for the next time that the process reaches its point."""
        draft = self.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps({"point": fault.point, "action": fault.action, "where": dict(fault.where)}))
        draft.rename(self.fault_file)

    def happened(self) -> bool:
        """Whether the ordered fault has happened."""
        return self._fired.exists()

    def cancel(self) -> None:
        """Withdraw the order, and release a process that is held."""
        self.fault_file.unlink(missing_ok=True)
        self._fired.unlink(missing_ok=True)


class Engine(Suspect):
    """A reference engine that serves `Tiny`."""

    def __init__(self, number: int, nursery: Nursery | None, scratch: Path):
        super().__init__(scratch / f"engine-{number}")
        self.number, self._nursery, self.port = number, nursery, servers.free_port()
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
        recordable = self.number != 2
        self._child = self._nursery.start("engine", self.fault_file, port=self.port, recordable=recordable)
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
        env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))}
        env["FAULT_FILE"] = str(self.fault_file)
        self._server = servers.start(self._kind, self._weights.folder(0), tp=1, port=self.port, env=env)
        self._workers = [rank.pid for rank in self.client.open(Deadline(PATIENCE_S)).ranks]

    @property
    def pids(self) -> list[int]:
        return [self._server.process.pid, *self._workers] if self._server is not None else []

    def alive(self) -> bool:
        if self._server is None or self._server.process.poll() is not None:
            return False
        living = {process.pid for process in self._server.processes()}
        return living.issuperset(self._workers)

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


class Pusher:
    """A trainer in other processes: a single one that maps our parameters, or ranks with shards."""

    def __init__(self, nursery: Nursery, scratch: Path, size: int):
        self._nursery = nursery
        self.ranks = [Suspect(scratch / f"pusher-{size}-{rank}") for rank in range(size)]
        self.children: list[Child] = []
        self.channels: list[socket.socket] = []

    def start(self, weights: TinyWeights, shared: dict[str, torch.Tensor]) -> None:
        """Fork the processes unless they are alive."""
        if self.children and all(child.alive() for child in self.children):
            return
        self.kill()
        port, size = servers.free_port(), len(self.ranks)
        for rank, suspect in enumerate(self.ranks):
            suspect.cancel()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.children.append(self._nursery.start("trainer", suspect.fault_file, [theirs.fileno()]))
            self.channels.append(ours)
            if size == 1:
                described, files = describe_shared(shared)
                socket.send_fds(ours, [json.dumps({"do": "take_parameters", "tensors": described}).encode()], files)
            else:
                folders = [str(weights.folder(content)) for content in range(CONTENTS)]
                self._tell(ours, do="group", port=port, rank=rank, size=size, folders=folders)
        for channel in self.channels:
            self._hear(channel, PATIENCE_S)

    def push(self, timeout_s: float, hosts: Sequence[str], **order: Any) -> dict[int, dict]:
        """Push, from ``hosts``, one for each rank; returns the outcome of each rank that has not ended.

        Ranks that were stopped go on when all others have ended. Raises `TimeoutError`.
        """
        for channel, host in zip(self.channels, hosts, strict=True):
            self._tell(channel, do="push", host=host, **order)
        end, said, missing = time.monotonic() + timeout_s, dict[int, dict](), dict(enumerate(self.channels))
        while missing:
            ready, _, _ = select.select(list(missing.values()), [], [], _LOOK_S)
            for rank in [rank for rank, channel in missing.items() if channel in ready]:
                said[rank] = self._hear(missing.pop(rank), PATIENCE_S)
            if missing and all(self.children[rank].stopped() for rank in missing):
                self.go_on()  # what they were stopped in has ended without them
            if missing and time.monotonic() > end:
                raise TimeoutError(f"ranks {sorted(missing)} have not ended")
        return {rank: one for rank, one in said.items() if one}

    def go_on(self) -> None:
        """Have ranks go on that were stopped."""
        for child in self.children:
            child.send(signal.SIGCONT)

    def left(self) -> list[str]:
        """What each process still uses of its senders, which are closed; empty if one has ended."""
        if not all(child.alive() for child in self.children):
            return []
        for channel in self.channels:
            self._tell(channel, do="left")
        said = [self._hear(channel, PATIENCE_S).get("left", "") for channel in self.channels]
        return [f"rank {rank} of {len(said)} has {one}" for rank, one in enumerate(said) if one]

    @staticmethod
    def _tell(channel: socket.socket, **order: Any) -> None:
        with suppress(OSError):
            channel.send(json.dumps(order).encode())

    @staticmethod
    def _hear(channel: socket.socket, timeout_s: float) -> dict:
        channel.settimeout(timeout_s)
        try:
            return json.loads(channel.recv(1 << 20) or b"{}")
        except ConnectionError:
            return {}

    def kill(self) -> None:
        """Kill all processes."""
        while self.children:
            self.children.pop().close()
        while self.channels:
            self.channels.pop().close()


class World:
    """All engines, trainers and weights of a run. ``kind`` is reference, vllm or sglang."""

    def __init__(self, kind: str = "reference"):
        self.kind = kind
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
            self.weights = TinyWeights(scratch)
            self.engines = [Engine(number, self.nursery, scratch) for number in range(3)]
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
                self.weights.digests = [self._digest(content) for content in range(CONTENTS)]
        except BaseException:
            self.close()
            raise

    def _digest(self, content: int) -> str:
        engine = self.engines[0]
        with Sender([engine.url]) as sender:
            sender.push(self.weights.mapping(content), version=f"content-{content}")
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
        """What living trainers in other processes still use of their senders, which are closed."""
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
