"""Engine ranks as child processes, for the benchmark of the transports: the child, and the trainer's side of it.

A child handles one request after the other: to take part in a push with the engine end of a transport, or in a transfer
of the bare library (`bare`). The output of its libraries goes to stderr. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from types import TracebackType
from typing import Any, NamedTuple

import torch

from benchmarks import bare
from benchmarks.lines import LIMIT_S, Lines, serve
from weightsync.deadline import Deadline
from weightsync.engine.stage import Stages
from weightsync.protocol import http
from weightsync.protocol.http import Handshake
from weightsync.tensors import digest
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset
from weightsync.trainer.buckets import choose
from weightsync.trainer.outgoing import Outgoing
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry
from weightsync.transports.base import EngineEnd, Peer

CPU = torch.device("cpu")
DIGEST = digest.algorithm_for(CPU)
_END_S = 5.0


# ---- the trainer's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Rank:
    """A child process, as a context manager; to the transports it is the only rank of the engine ``url``."""

    def __init__(self, number: int = 0, variables: Mapping[str, str] | None = None):
        self.url = f"http://127.0.0.1:{8001 + number}"  # nothing listens there: requests are sent as lines
        self._process = subprocess.Popen(
            (sys.executable, "-m", "benchmarks.rank"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(variables or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout.fileno(), self._process.stdin.fileno())

    def hello(self) -> http.OpenReply:
        """The reply of an engine with this one rank when it is opened, as far as transports use it."""
        return http.OpenReply(
            protocol=http.PROTOCOL,
            engine="bench",
            engine_version="",
            package_version="",
            host="",
            model="",
            version="",
            ranks=(http.RankInfo(rank=0, pid=self._process.pid, device="cpu"),),
            instance="1",
        )

    def tell(self, verb: str, channel: str = "-", body: bytes = b"{}") -> None:
        """Send the child a request; `answer` reads the reply. Raises RuntimeError if the child has ended."""
        try:
            self._lines.say(verb, channel, body)
        except BrokenPipeError:
            raise RuntimeError(f"the rank of {self.url} ended: exit code {self._process.wait(_END_S)}") from None

    def answer(self, meanwhile: Callable[[], object] | None = None, look_s: float = bare.LOOK_S) -> bytes:
        """The child's reply to the last request; ``meanwhile`` is called every ``look_s`` seconds.

        Raises RuntimeError with the child's error.
        """
        until = time.monotonic() + LIMIT_S
        try:
            while (heard := self._lines.hear(LIMIT_S if meanwhile is None else look_s)) is None:
                if time.monotonic() > until:
                    raise RuntimeError(f"the rank of {self.url} did not answer within {LIMIT_S:g} s")
                if meanwhile is not None:
                    meanwhile()
        except EOFError:
            raise RuntimeError(f"the rank of {self.url} ended: exit code {self._process.wait(_END_S)}") from None
        verb, _, body = heard
        if verb == "error":
            raise RuntimeError(f"the rank of {self.url}: {json.loads(body)}")
        return body

    def ask(self, verb: str, channel: str = "-", body: object = None) -> Any:
        """Send a request and read the reply, both in JSON."""
        self.tell(verb, channel, json.dumps(body).encode())
        return json.loads(self.answer())

    def __enter__(self) -> Rank:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            if kind is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        finally:
            self._process.kill()
            self._process.wait(_END_S)
            self._process.stdout.close()


def _unseen(nbytes: int) -> None:
    """The progress that nobody watches."""


class Pushed(NamedTuple):
    """Seconds of a push: ``total`` includes connecting, ``send`` is `Outgoing.send`, ``gather`` is packing within that.

    ``tail`` is the part of `Outgoing.send` after the last tensor was requested.
    """

    total: float
    send: float
    tail: float
    gather: float
    digest: float
    verify: float


class Channel:
    """A transfer over one transport, its ranks, and the tensors that it pushes; a context manager.

    ``kind`` names the stage that the ranks receive in; channels of the same tensors share it. Without ``bucket_bytes``
    buckets are what a sender would choose.
    """

    def __init__(
        self,
        transport: str,
        ranks: Sequence[Rank],
        kind: str,
        tensors: Sequence[torch.Tensor],
        *,
        variables: Mapping[str, str] | None = None,
        bucket_bytes: int | None = None,
    ):
        self._transport, self._ranks, self._kind, self._tensors = transport, ranks, kind, tensors
        self._name, self._variables = f"{transport}/{len(ranks)}/{kind}", variables or {}
        self._transfer, self._pushes, self._last = Transfer(CPU), 0, 0.0
        self._layout = Layout([spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
        free = self._transfer.free_bytes()
        self.choice = choose(self._layout.nbytes, free, free, bucket_bytes, "full", False)

    def push(self, algorithm: str = "") -> Pushed:
        """Push once; verified if there is a digest."""
        self._pushes += 1
        plan = http.UpdateRequest(
            push=f"{self._name}-{self._pushes}",
            address="",
            secret="",
            timeout_s=LIMIT_S,
            bucket_bytes=self.choice.bucket_bytes,
            slots=self.choice.slots,
            manifest=tuple(entry.spec for entry in self._layout.entries),
            verify="digest" if algorithm else "off",
            digest=algorithm,
        )
        return self._carry(self._transfer.begin(plan, self._layout), again=False)

    def resend(self) -> Pushed:
        """Send the previous push again from the arena, without packing."""
        outgoing, self._last = self._transfer.again(), time.perf_counter()
        assert outgoing is not None, "the arena holds all that was pushed"
        return self._carry(outgoing, again=True)

    def _carry(self, outgoing: Outgoing, *, again: bool) -> Pushed:
        transfer, deadline, start = self._transfer, Deadline(LIMIT_S), time.perf_counter()
        try:
            with environment(self._variables):
                hellos = {rank.url: (self._transport, rank.hello()) for rank in self._ranks}
                transfer.connect(hellos, self._join, deadline)
            for rank in self._ranks:
                rank.tell("push", self._name, http.to_json(outgoing.request(rank.url, self._transport)))
            outgoing.await_ranks({self._transport: {Peer(rank.url, 0) for rank in self._ranks}}, deadline)
            met = time.perf_counter()
            sent = outgoing.resend(_unseen) if again else outgoing.send(self._stream(), _unseen)
            end = time.perf_counter()
        except BaseException as error:
            transfer.cancel(error)
            transfer.close()
            raise
        transfer.served(outgoing)
        for rank in self._ranks:
            rank.answer()
        return Pushed(end - start, end - met, end - self._last, sent.gather_s, sent.digest_s, sent.verify_s)

    def _stream(self) -> Iterator[torch.Tensor]:
        for tensor in self._tensors:
            self._last = time.perf_counter()
            yield tensor

    def _join(self, asked: Mapping[str, Handshake]) -> dict[str, http.JoinReply]:
        told = [rank for rank in self._ranks if rank.url in asked]
        for rank in told:
            rank.tell("join", self._name, http.to_json(asked[rank.url]))
        return {rank.url: http.from_json(rank.answer(), http.JoinReply) for rank in told}

    def check(self) -> None:
        """Raise RuntimeError if a rank's stage is not what was pushed."""
        held = bare.digest_of([tensor.view(-1).view(torch.uint8) for tensor in self._tensors])
        for rank in self._ranks:
            if rank.ask("staged", self._kind) != held:
                raise RuntimeError(f"the rank of {rank.url} did not get by {self._name} what was sent")

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self._transfer.close()


# ---- the child -------------------------------------------------------------------------------------------------------


class _Child:
    """The state of a child: engine ends by channel, stages by kind, and one agent or group of the bare libraries."""

    def __init__(self, lines: Lines):
        self._lines = lines
        self._ends: dict[str, EngineEnd] = {}
        self._stages: dict[str, Stages] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._target = torch.empty(0, dtype=torch.uint8)
        self._agent: bare.Agent | None = None
        self._group: bare.Broadcast | None = None
        self._requests: dict[str, bare.Requests] = {}
        self._verbs: dict[str, Callable[[str, bytes], object]] = {
            "join": self._join,
            "push": self._push,
            "staged": lambda kind, _: bare.digest_of([self._staged[kind]]),
            "target": self._make_target,
            "taken": self._taken,
            "agent": self._connect,
            "prepare": self._prepare,
            "read": lambda name, body: self._known().run(self._requests[name], json.loads(body)),
            "drive": self._drive,
            "group": self._join_group,
            "receive": self._receive,
        }

    def serve(self) -> None:
        """Handle requests until the input ends."""
        serve(self._lines, self._verbs)
        for end in self._ends.values():
            end.close()

    def _end(self, channel: str) -> EngineEnd:
        if channel not in self._ends:
            self._ends[channel] = registry.spec(channel.partition("/")[0]).engine_end(CPU)
        return self._ends[channel]

    def _join(self, channel: str, body: bytes) -> bytes:
        kind = registry.spec(channel.partition("/")[0]).handshake
        assert kind is not None, "only a transport with a handshake sends one"
        asked = http.from_json(body, kind)
        return http.to_json(http.JoinReply((self._end(channel).join(asked, 0),), asked.instance))

    def _push(self, channel: str, body: bytes) -> None:
        kind = channel.rpartition("/")[2]
        request, end = http.from_json(body, http.UpdateRequest), self._end(channel)
        stages, parts = self._stages.setdefault(kind, Stages(0, CPU)), Subset(Layout(request.manifest), {})
        try:
            incoming = end.open(request, parts, 0, Event())
            staged, verify_s = stages.fill(incoming, request, parts, None)
        except BaseException as error:
            end.fail(request.push, error)
            raise
        end.confirm(request.push, verify_s)
        self._staged[kind] = staged.data

    def _make_target(self, _: str, body: bytes) -> None:
        self._target = torch.zeros(int(json.loads(body)), dtype=torch.uint8)

    def _taken(self, _: str, body: bytes) -> int:
        """The digest of the first bytes of the target, which is then zeroed."""
        found = bare.digest_of([self._target[: json.loads(body)]])
        self._target.zero_()
        return found

    def _known(self) -> bare.Agent:
        assert self._agent is not None, "agent comes first"
        return self._agent

    def _connect(self, _: str, body: bytes) -> dict[str, Any]:
        self._agent = bare.Agent("rank", self._target)
        self._agent.connect(json.loads(body))
        return self._agent.card()

    def _prepare(self, name: str, body: bytes) -> int:
        self._requests[name] = self._known().prepare("READ", bare.Pieces(**json.loads(body)))
        return len(self._requests[name])

    def _drive(self, channel: str, body: bytes) -> None:
        """Drive the agent while the trainer writes."""
        look_s = float(json.loads(body))
        self._lines.say("ready", channel)
        while self._lines.hear(look_s) is None:
            self._known().drive()

    def _join_group(self, _: str, body: bytes) -> None:
        self._group = bare.Broadcast(1, int(json.loads(body)))

    def _receive(self, channel: str, body: bytes) -> None:
        assert self._group is not None, "group comes first"
        self._lines.say("ready", channel)
        self._group.run(self._target, int(json.loads(body)))


def main() -> None:
    """The child's command line: no arguments."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not look like a reply
    _Child(Lines(0, writing)).serve()
    # Without interpreter shutdown: a gloo thread that frees a tensor during it would crash the process.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
