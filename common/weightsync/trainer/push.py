"""One push, from prepare to commit, to every engine of a sender; `states.PUSH` is its state machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec
from msgspec import UNSET

from weightsync import errors, observe
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
from weightsync.trainer import metrics
from weightsync.trainer.client import EngineClient
from weightsync.trainer.engine import Commits
from weightsync.trainer.engines import Engines
from weightsync.trainer.fit import agree
from weightsync.trainer.lease import renewed
from weightsync.trainer.lockstep import check_lockstep
from weightsync.trainer.outgoing import Outgoing, Sent
from weightsync.trainer.transfer import Transfer
from weightsync.transports.base import Progress

logger = logging.getLogger(__name__)


def connect(transfer: Transfer, engines: Engines, deadline: Deadline) -> None:
    """Set up the transport of every engine that is not set up yet. Raises `WeightSyncError`."""
    transfer.connect(engines.open_replies(), lambda asked: engines.join(asked, deadline), deadline)


def release(transfer: Transfer | None, engines: Engines, urls: Iterable[str], deadline: Deadline) -> None:
    """Have engines release what they hold for this sender, and its lease. ``deadline`` is that of the whole call."""
    transports = {url: engines.by_url[url].transport for url in urls}
    at = dict.fromkeys(transports, engines.owner)  # to an engine that knows no address: it may hold a standby
    if transfer is not None:
        known = {url: transfer.address(url, transport) for url, transport in transports.items()}
        at |= {url: address for url, address in known.items() if address}
    engines.release(at, deadline)
    if transfer is not None:
        for url, transport in transports.items():
            transfer.disconnect(url, transport)


def settle(engines: Engines, deadline: Deadline) -> None:
    """Have every engine refuse a commit whose outcome is unknown, should it still arrive.

    Call it before any other request: a late commit would make false what that reports. Raises `WeightSyncError`, with
    ``weights="unknown"`` for each engine that did not confirm.
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
            raise joined(failed, engines.last_known())


class Payload(Protocol):
    """What a push sends."""

    @property
    def name(self) -> str:
        """The name by which the engines know the push."""

    @property
    def nbytes(self) -> int:
        """The bytes that it transfers."""

    def begin(self, transfer: Transfer) -> Outgoing:
        """Provide the arena, and return the push that goes through it."""

    def send(self, outgoing: Outgoing, deadline: Deadline, progress: Progress) -> Sent:
        """Send the bytes. Raises `SourceError`, `TransferFailed` or `PushTimeout`."""

    def took(self, outgoing: Outgoing, transfer_s: float) -> None:
        """Note how long the transfer took, in seconds."""


class Change:
    """The base of `Push` and `Rollback`. ``seconds`` has the duration of each phase that has ended.

    Every line of the log has the id by which the engines know the push.

    Whatever fails, the engines are told to drop the push, the error says what each engine serves, and the transfer is
    closed if it may still be in use or is broken.
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
        self._kind = type(self).__name__.lower()
        self.seconds: dict[str, float] = {}
        self._phase = ""

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
            return self._engines.outcome(self._engines.commit(request, self._deadline), request, self._deadline)

    def _begin(self, push: str, label: str, nbytes: int) -> None:
        engines = len(self._engines.by_url)
        logger.debug("%s %s: version %r, %d bytes, for %d engines", self._kind, push, label, nbytes, engines)
        observe.describe(push=push, version=label, bytes=nbytes, engines=engines)

    def _committed(self, push: str, label: str) -> None:
        self._machine.move("committed")
        took = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
        number = metrics.committed()
        logger.info(
            "%s %s: every engine serves version %r, commit number %d (%s)", self._kind, push, label, number, took
        )

    @contextmanager
    def _failures_handled(self, push: str) -> Iterator[None]:
        """Inside the context, a failure is cleaned up at the engines, and its error says what each engine serves."""
        try:
            yield
        except BaseException as error:
            logger.info("%s %s: failed while %s: %r", self._kind, push, self._machine.state, error)
            commit_requested = self._machine.state == "committing"
            self._clean_up(push, error)
            with errors.during(self._phase):
                self._report(error, commit_requested)
                raise

    def _clean_up(self, push: str, error: BaseException) -> None:
        transfer = self._transfer
        try:
            if transfer is not None:
                # First, as the rest takes time and may be interrupted: the trainer will write to its memory again.
                transfer.revoke()
            if self._machine.state != "idle":  # idle: it was interrupted before it began
                self._machine.move({"preparing": "refused", "transferring": "lost"}.get(self._machine.state, "failed"))
            if transfer is not None:
                transfer.cancel(error)
            # An engine that is still committing could not be told in time; its commit ends by itself.
            if not (isinstance(error, PushTimeout) and error.weights == "unknown"):
                self._engines.abort(push, self._deadline)
            if transfer is not None and isinstance(error, LeaseHeld):
                # Otherwise two trainers that each hold the leases of some engines would block each other.
                release(transfer, self._engines, self._engines.by_url, self._deadline)
        finally:
            if transfer is not None and not _is_settled(error):
                transfer.close()
            if self._machine.state != "idle":
                self._machine.move("aborted" if self._machine.allows("aborted") else "interrupted")

    def _report(self, error: BaseException, commit_requested: bool) -> None:
        """Add to ``error`` what every engine serves. Raises `SourceError` in place of an error of the tensors.

        ``commit_requested``: engines may have been asked to commit, and have then reported the outcome themselves.
        """
        ask = isinstance(error, Exception) and not commit_requested
        served = self._engines.current_weights(self._deadline) if ask else self._engines.last_known()
        if isinstance(error, WeightSyncError):
            reported: dict[str, Weights] = {
                url: served[url] if state == "unchanged" else state for url, state in error.engines.items()
            }
            error.settle({**served, **reported})
        elif commit_requested and isinstance(error, Exception):
            unknown: dict[str, Weights] = dict.fromkeys(served, "unknown")
            raise WeightSyncError(f"the commit broke off: {type(error).__name__}: {error}", engines=unknown) from error
        elif isinstance(error, (RuntimeError, OSError, ValueError)):
            raise SourceError(f"the weights could not be read or packed: {error}", engines=served) from error

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self._enter(phase)
        with observe.span(f"weightsync.{phase}"):
            yield
        self.seconds[phase] = time.perf_counter() - start

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._engines.show(phase)


class Push(Change):
    """A push of a payload to every engine."""

    def __init__(
        self,
        engines: Engines,
        transfer: Transfer,
        machine: Machine[str],
        deadline: Deadline,
        pause: http.PauseMode,
        *,
        expected: str | None = None,
    ):
        super().__init__(engines, transfer, machine, deadline, pause)
        self._push_transfer, self._expected = transfer, expected
        #: Tensors that stay as the engines have them, and that could not be compared between engines.
        self.unverified: tuple[str, ...] = ()

    def run(self, payload: Payload, label: str) -> tuple[Sent, Commits]:
        """Prepare, send and commit ``payload`` as version ``label``; return sending times and commit replies.

        Raises `WeightSyncError`.
        """
        self._begin(payload.name, label, payload.nbytes)
        with self._failures_handled(payload.name):
            with renewed(self._engines, payload.name, self._deadline):
                outgoing = self._accepted(payload)
                if outgoing.plan.stream:
                    sent, commits = self._stream(payload, outgoing, label)
                else:
                    sent = self._sent(payload, outgoing)
                    self._machine.move("staged")
                    logger.debug("push %s: every rank has received it", payload.name)
            if not outgoing.plan.stream:
                request = self._request(payload.name, label)
                commits = self._commit(msgspec.structs.replace(request, lora=outgoing.plan.lora))
        self._committed(payload.name, label)
        if outgoing.plan.lora is UNSET:
            for engine in self._engines.by_url.values():
                engine.content = outgoing.content
        payload.took(outgoing, self.seconds.get("transfer", 0.0))
        self._push_transfer.served(outgoing)
        return sent, commits

    def rehearse(self, payload: Payload) -> Sent:
        """Prepare and send ``payload``, which no engine is asked to commit: all drop it. Raises `WeightSyncError`."""
        self._begin(payload.name, "", payload.nbytes)
        with self._failures_handled(payload.name), renewed(self._engines, payload.name, self._deadline):
            sent = self._sent(payload, self._accepted(payload))
        self._machine.move("lost")
        self._engines.abort(payload.name, self._deadline)
        self._machine.move("aborted")
        self._push_transfer.dropped()  # the ranks have received everything, and stay connected
        return sent

    def _accepted(self, payload: Payload) -> Outgoing:
        self._machine.move("push")
        self._enter("read")
        self._push_transfer.arena_s = 0.0
        outgoing = payload.begin(self._push_transfer)
        self.seconds["arena"] = self._push_transfer.arena_s
        self._enter("prepare")
        settle(self._engines, self._deadline)
        self._prepare(outgoing)
        return outgoing

    def _sent(self, payload: Payload, outgoing: Outgoing) -> Sent:
        self._machine.move("accepted")
        logger.debug("push %s: every engine has accepted it", payload.name)
        return self._send(payload, outgoing)

    def _prepare(self, outgoing: Outgoing) -> None:
        engines, deadline = self._engines, self._deadline
        check_lockstep(engines.by_url)
        connect(self._push_transfer, engines, deadline)
        # ZMQ sockets are not thread-safe, so requests are built here, not in the threads that send them.
        requests = {url: outgoing.request(url, engine.transport) for url, engine in engines.by_url.items()}
        with self._timed("prepare"):
            engines.prepare(requests, self._expected, deadline)
            if outgoing.plan.kept:
                self.unverified = agree(engines.kept)
            outgoing.await_ranks(engines.peers, deadline)
        self.seconds["record"] = max(engine.record_s for engine in engines.by_url.values())

    def _send(self, payload: Payload, outgoing: Outgoing) -> Sent:
        with self._timed("transfer"):
            return payload.send(outgoing, self._deadline, self._engines.shown.sent)

    def _stream(self, payload: Payload, outgoing: Outgoing, label: str) -> tuple[Sent, Commits]:
        """Send the bytes while the engines are paused, so that no stage is needed."""
        self._machine.move("stream")
        with self._timed("commit"):
            request = self._request(payload.name, label)
            commits = self._engines.commit(request, self._deadline)
            try:
                sent = self._send(payload, outgoing)
            except BaseException as error:
                self._enter("commit")
                self._push_transfer.cancel(error)
                # The engines' own replies say what they serve; this raises for those that failed.
                replies = self._engines.outcome(commits, request, self._deadline)
                raise TransferFailed(
                    f"every engine has committed, but sending ended with an error: {error}",
                    engines=dict.fromkeys(replies, "committed"),
                ) from error
            self._enter("commit")
            return sent, self._engines.outcome(commits, request, self._deadline)


class Rollback(Change):
    """The return of every engine to the version that it kept."""

    def run(self, label: str, lora: str | msgspec.UnsetType) -> Commits:
        """Have every engine serve its kept version, ``label``, of the weights or of an adapter; return the replies.

        Raises `WeightSyncError`.
        """
        request = msgspec.structs.replace(self._request(secrets.token_hex(8), label), rollback=True, lora=lora)
        self._begin(request.push, label, 0)
        with self._failures_handled(request.push):
            check_lockstep(self._engines.by_url)
            self._machine.move("rollback")
            commits = self._commit(request)
        self._committed(request.push, label)
        if self._transfer is not None:
            self._transfer.rolled_back(lora)
        return commits


def _is_settled(error: BaseException) -> bool:
    """Whether no engine can still be using the memory and sockets of a push that failed with ``error``.

    An engine that was asked to load and has not reported the outcome may still be loading, whichever engine raised
    ``error``. After an error of another library, or Ctrl-C, every engine may be. Memory that may still be read is never
    written again: the next push gets new arenas. It also gets new ones, and new sockets, after a transfer that failed
    or timed out.
    """
    if not isinstance(error, WeightSyncError) or isinstance(error, (PushTimeout, TransferFailed, EngineUnreachable)):
        return False
    return "unknown" not in (error.weights, *error.engines.values())
