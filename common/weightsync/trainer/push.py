"""Trainer side: one push on its way, from prepare to commit, to every engine of a fleet; `states.PUSH` says what may
follow what."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from tqdm import tqdm

from weightsync.deadline import Deadline
from weightsync.errors import (
    EngineUnreachable,
    LeaseHeld,
    PushTimeout,
    SourceError,
    TransferFailed,
    Weights,
    WeightSyncError,
    joined,
)
from weightsync.protocol import http
from weightsync.protocol.states import Machine
from weightsync.trainer.client import EngineClient
from weightsync.trainer.engines import Engines
from weightsync.trainer.outgoing import Outgoing, Sent
from weightsync.trainer.transfer import Transfer
from weightsync.transports.base import Progress

Commits = dict[str, http.CommitReply]


def connect(transfer: Transfer, engines: Engines, deadline: Deadline) -> None:
    """Make every engine ready to be pushed to; those that are, hear nothing. Raises as `Transfer.connect`."""
    transfer.connect(engines.open_replies(), lambda asked: engines.join(asked, deadline), deadline)


def release(transfer: Transfer, engines: Engines, urls: Iterable[str], deadline: Deadline) -> None:
    """Have engines give back what they hold of this sender, and its lease. ``deadline`` is that of the whole call."""
    by = {url: engines.by_url[url].transport for url in urls}
    engines.release({url: transfer.address(url, transport) for url, transport in by.items()}, deadline)
    for url, transport in by.items():
        transfer.disconnect(url, transport)


def settle(engines: Engines, deadline: Deadline) -> None:
    """Make sure that no engine still carries out a commit whose outcome is not known: it will refuse it.

    It comes before anything else is asked of them: what is told of that would not stay true. Raises `WeightSyncError`,
    with ``weights="unknown"`` for the engines that cannot be told.
    """

    def run(client: EngineClient) -> None:
        engine = engines.by_url[client.url]
        if engine.unsettled:
            client.abort(engine.unsettled, deadline, engines.owner)
            engine.unsettled = ""

    if any(engine.unsettled for engine in engines.by_url.values()):
        outcome = zip(engines.by_url, engines.try_all(run), strict=True)
        failed = {url: error for url, error in outcome if isinstance(error, WeightSyncError)}
        for error in failed.values():
            error.weights = "unknown"
        if failed:
            raise joined(failed, engines.untouched())


class Payload(Protocol):
    """What a push sends."""

    @property
    def name(self) -> str:
        """What the engines call the push."""

    @property
    def nbytes(self) -> int:
        """How many bytes are on their way in it."""

    def begin(self, transfer: Transfer) -> Outgoing:
        """Have memory for it."""

    def send(self, outgoing: Outgoing, deadline: Deadline, progress: Progress | None) -> Sent:
        """Send the bytes. Raises as `Outgoing.send`."""


class Change:
    """What is common to a push and to going back. ``seconds`` are those of its phases, once it is over.

    Whatever fails, the engines are told to forget it, the error says what each of them serves, and a transfer through
    which something broke is closed.
    """

    def __init__(
        self,
        engines: Engines,
        transfer: Transfer | None,
        machine: Machine[str],
        deadline: Deadline,
        pause: http.PauseMode,
    ):
        self._engines, self._transfer, self._machine, self._deadline = engines, transfer, machine, deadline
        self._pause: http.PauseMode = pause
        self.seconds: dict[str, float] = {}

    def _request(self, push: str, label: str) -> http.CommitRequest:
        return http.CommitRequest(
            push=push,
            version=label,
            pause=self._pause,
            timeout_s=max(self._deadline.left(), 0.1),
            owner=self._engines.owner,
        )

    def _commit(self, request: http.CommitRequest) -> Commits:
        self._deadline.check("the engines to be asked to commit")
        with self._timed("commit"):
            return self._engines.outcome(self._engines.commit(request, self._deadline), request.version, self._deadline)

    @contextmanager
    def _settled(self, push: str) -> Iterator[None]:
        """Inside, whatever goes wrong is settled with the engines and told in full."""
        try:
            yield
        except BaseException as error:
            asked = self._machine.state == "committing"
            self._failed(push, error)
            self._tell(error, asked)
            raise

    def _failed(self, push: str, error: BaseException) -> None:
        transfer = self._transfer
        try:
            if transfer is not None:
                # Before anything that takes time or may be interrupted: the trainer's memory is its own again.
                transfer.revoke()
            if self._machine.state != "idle":  # else it was interrupted before it began
                self._machine.move({"preparing": "refused", "transferring": "lost"}.get(self._machine.state, "failed"))
            if transfer is not None:
                transfer.cancel(error)
            # An engine that is still in its commit could not be told in time, and ends by itself.
            if not (isinstance(error, PushTimeout) and error.weights == "unknown"):
                self._engines.abort(push, self._deadline)
            if transfer is not None and isinstance(error, LeaseHeld):
                # Two trainers that each hold some of the engines would keep each other from the rest.
                release(transfer, self._engines, self._engines.by_url, self._deadline)
        finally:
            if transfer is not None and not _is_settled(error):
                transfer.close()
            if self._machine.state != "idle":
                self._machine.move("aborted" if self._machine.allows("aborted") else "interrupted")

    def _tell(self, error: BaseException, asked: bool) -> None:
        """Say in the error what every engine serves after it; raises `SourceError` for what the weights raised.

        ``asked``: engines may have been asked to commit by then.
        """
        failed = isinstance(error, Exception) and not asked  # who was asked has said what became of it
        untold = self._engines.look(self._deadline) if failed else self._engines.untouched()
        if isinstance(error, WeightSyncError):
            told: dict[str, Weights] = {
                url: untold[url] if state == "unchanged" else state for url, state in error.engines.items()
            }
            error.settle({**untold, **told})
        elif asked and isinstance(error, Exception):
            unknown: dict[str, Weights] = dict.fromkeys(untold, "unknown")
            raise WeightSyncError(f"the commit broke off: {type(error).__name__}: {error}", engines=unknown) from error
        elif isinstance(error, (RuntimeError, OSError, ValueError)):
            raise SourceError(f"the weights could not be read or packed: {error}", engines=untold) from error

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start


class Push(Change):
    """One push of a payload to every engine, under a label."""

    def __init__(
        self,
        engines: Engines,
        transfer: Transfer,
        machine: Machine[str],
        deadline: Deadline,
        pause: http.PauseMode,
        *,
        progress: bool = False,
        expected: str | None = None,
    ):
        super().__init__(engines, transfer, machine, deadline, pause)
        self._through, self._progress, self._expected = transfer, progress, expected

    def run(self, payload: Payload, label: str) -> tuple[Sent, Commits]:
        """Prepare, send and commit. Raises `WeightSyncError`."""
        with self._settled(payload.name):
            self._machine.move("push")
            with self._engines.renewed(payload.name, self._deadline):
                outgoing = payload.begin(self._through)
                self._prepare(outgoing)
                if outgoing.plan.stream:
                    sent, commits = self._stream(payload, outgoing, label)
                else:
                    self._machine.move("accepted")
                    sent = self._send(payload, outgoing)
                    self._machine.move("staged")
            if not outgoing.plan.stream:
                commits = self._commit(self._request(payload.name, label))
        self._machine.move("committed")
        self._through.served(outgoing)
        return sent, commits

    def _prepare(self, outgoing: Outgoing) -> None:
        engines, deadline = self._engines, self._deadline
        connect(self._through, engines, deadline)
        # Here, and not in the threads that ask the engines: a socket is not for several.
        requests = {url: outgoing.request(url, engine.transport) for url, engine in engines.by_url.items()}
        with self._timed("prepare"):
            engines.prepare(requests, self._expected, deadline)
            outgoing.await_ranks(engines.peers, deadline)
        self.seconds["record"] = max(engine.record_s for engine in engines.by_url.values())

    def _send(self, payload: Payload, outgoing: Outgoing) -> Sent:
        with self._timed("transfer"), _bar(payload.nbytes, self._progress) as progress:
            return payload.send(outgoing, self._deadline, progress)

    def _stream(self, payload: Payload, outgoing: Outgoing, label: str) -> tuple[Sent, Commits]:
        """The bytes travel while the engines are stopped: memory for no stage is needed."""
        self._machine.move("stream")
        with self._timed("commit"):
            commits = self._engines.commit(self._request(payload.name, label), self._deadline)
            try:
                sent = self._send(payload, outgoing)
            except BaseException as error:
                self._through.cancel(error)
                # What became of the engines is theirs to say.
                replies = self._engines.outcome(commits, label, self._deadline)
                raise TransferFailed(
                    f"every engine has committed, but sending did not end well: {error}",
                    engines=dict.fromkeys(replies, "committed"),
                ) from error
            return sent, self._engines.outcome(commits, label, self._deadline)


class Rollback(Change):
    """The return to the version that the engines kept."""

    def run(self, label: str) -> Commits:
        """Have the engines serve it. Raises `WeightSyncError`."""
        request = msgspec.structs.replace(self._request(secrets.token_hex(8), label), rollback=True)
        with self._settled(request.push):
            self._machine.move("rollback")
            commits = self._commit(request)
        self._machine.move("committed")
        if self._transfer is not None:
            self._transfer.rolled_back()
        return commits


def _is_settled(error: BaseException) -> bool:
    """Whether nobody can be using the memory and the sockets of a push that failed like this.

    An engine that was asked to load and has not said how that ended may be loading still, whichever engine's error is
    the one that is told; so may all of them after an error that is none of ours, Ctrl-C for one. Memory that they read
    is never written again: the next push gets other. So it does where something broke, be it a socket whose file
    somebody removed.
    """
    if not isinstance(error, WeightSyncError) or isinstance(error, (PushTimeout, TransferFailed, EngineUnreachable)):
        return False
    return "unknown" not in (error.weights, *error.engines.values())


@contextmanager
def _bar(nbytes: int, shown: bool) -> Iterator[Progress | None]:
    if not shown:
        yield None
        return
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc="push") as bar:
        yield lambda sent: bar.update(sent - bar.n) and None
