"""Engine ranks as child processes, for the benchmark of the transports: the child, and what the trainer has of it.

A child does what it is told, one line after the other: take part in a push with the engine end of a transport, or in a
transfer of the bare library (`bare`). Its libraries' output goes to stderr. It ends when its stdin does.
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
from weightsync.transports.base import EngineEnd, Peer, PeerRanks

CPU = torch.device("cpu")
DIGEST = digest.algorithm_for(CPU)
_END_S = 5.0
COMMAND = (sys.executable, "-m", "benchmarks.rank")


# ---- the trainer's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables of this process, for as long as something is made that reads them."""
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
    """A child process, for a ``with`` block; to the transports it is the only rank of the engine ``url``."""

    def __init__(
        self,
        number: int = 0,
        variables: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        command: Sequence[str] = COMMAND,
    ):
        self.url = f"http://{host}:{8001 + number}"  # nobody listens there: requests come as lines
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(variables or {})},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._lines = Lines(self._process.stdout.fileno(), self._process.stdin.fileno())

    def hello(self) -> http.OpenReply:
        """What an engine with this one rank would say when it is opened, as far as transports care."""
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

    def tell(self, verb: str, lane: str = "-", body: bytes = b"{}") -> None:
        """Have the child do something; `answer` is to follow. Raises RuntimeError if it has ended."""
        try:
            self._lines.say(verb, lane, body)
        except BrokenPipeError:
            raise RuntimeError(f"the rank of {self.url} ended: exit code {self._process.wait(_END_S)}") from None

    def answer(self, meanwhile: Callable[[], object] | None = None, look_s: float = bare.LOOK_S) -> bytes:
        """What the child says to what it was told last; ``meanwhile`` is called every ``look_s``.

        Raises RuntimeError for what went wrong there.
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

    def ask(self, verb: str, lane: str = "-", body: object = None) -> Any:
        """Tell and hear, in JSON."""
        self.tell(verb, lane, json.dumps(body).encode())
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


class Pushed(NamedTuple):
    """Seconds of a push: ``total`` with the meeting, ``send`` of it `Outgoing.send`, ``gather`` of that the packing.

    ``tail`` is what is left of `Outgoing.send` after the last tensor was asked for.
    """

    total: float
    send: float
    tail: float
    gather: float
    digest: float
    verify: float


class Lane:
    """A transfer, the ranks it pushes to over one transport, and what it pushes, all for a ``with`` block.

    ``kind`` names the stage that the ranks receive in; lanes of the same tensors share it. Without ``bucket_bytes``
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
        helpers: PeerRanks | None = None,
    ):
        self._transport, self._ranks, self._kind, self._tensors = transport, ranks, kind, tensors
        self._name, self._variables = f"{transport}/{len(ranks)}/{kind}", variables or {}
        self._transfer, self._pushes, self._last = Transfer(CPU, helpers), 0, 0.0
        self._layout = Layout([spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
        free = self._transfer.free_bytes()
        self.choice = choose(self._layout.nbytes, free, free, bucket_bytes, "full", False)

    def push(self, algorithm: str = "") -> Pushed:
        """One push; verified where a digest is named."""
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
        """The push before once more, from the arena as it is: nothing is packed."""
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
            sent = outgoing.resend(None) if again else outgoing.send(self._stream(), None)
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
        """Raise RuntimeError if a rank's stage does not hold what was pushed."""
        held = bare.digest_of([tensor.view(-1).view(torch.uint8) for tensor in self._tensors])
        for rank in self._ranks:
            if rank.ask("staged", self._kind) != held:
                raise RuntimeError(f"the rank of {rank.url} did not get by {self._name} what was sent")

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        self._transfer.close()


# ---- the child -------------------------------------------------------------------------------------------------------


class _Child:
    """What a child has: engine ends by lane, stages by kind, and of the bare libraries one agent or group."""

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
            "agent": self._meet,
            "prepare": self._prepare,
            "read": lambda name, body: self._known().run(self._requests[name], json.loads(body)),
            "drive": self._drive,
            "group": self._join_group,
            "receive": self._receive,
        }

    def serve(self) -> None:
        """Until the trainer hangs up."""
        serve(self._lines, self._verbs)
        for end in self._ends.values():
            end.close()

    def _end(self, lane: str) -> EngineEnd:
        if lane not in self._ends:
            self._ends[lane] = registry.spec(lane.partition("/")[0]).engine_end(CPU)
        return self._ends[lane]

    def _join(self, lane: str, body: bytes) -> bytes:
        kind = registry.spec(lane.partition("/")[0]).handshake
        assert kind is not None, "only a transport with a handshake sends one"
        asked = http.from_json(body, kind)
        return http.to_json(http.JoinReply((self._end(lane).join(asked, 0),), asked.instance))

    def _push(self, lane: str, body: bytes) -> None:
        kind = lane.rpartition("/")[2]
        request, end = http.from_json(body, http.UpdateRequest), self._end(lane)
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
        """Digest of the first bytes of the target, which is emptied."""
        found = bare.digest_of([self._target[: json.loads(body)]])
        self._target.zero_()
        return found

    def _known(self) -> bare.Agent:
        assert self._agent is not None, "agent comes first"
        return self._agent

    def _meet(self, _: str, body: bytes) -> dict[str, Any]:
        self._agent = bare.Agent("rank", self._target)
        self._agent.meet(json.loads(body))
        return self._agent.card()

    def _prepare(self, name: str, body: bytes) -> int:
        self._requests[name] = self._known().prepare("READ", bare.Pieces(**json.loads(body)))
        return len(self._requests[name])

    def _drive(self, lane: str, body: bytes) -> None:
        """Keep the agent going while the trainer writes."""
        look_s = float(json.loads(body))
        self._lines.say("ready", lane)
        while self._lines.hear(look_s) is None:
            self._known().drive()

    def _join_group(self, _: str, body: bytes) -> None:
        self._group = bare.Broadcast(1, int(json.loads(body)))

    def _receive(self, lane: str, body: bytes) -> None:
        assert self._group is not None, "group comes first"
        self._lines.say("ready", lane)
        self._group.run(self._target, int(json.loads(body)))


def main() -> None:
    """The child's command line: no arguments."""
    writing = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    _Child(Lines(0, writing)).serve()
    # Not by the interpreter's own end: a thread of gloo's that lets go of a tensor meanwhile takes the process down.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
