"""The HTTP client of one engine: open, prepare, commit, abort, status."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import (
    AuthenticationFailed,
    EngineUnreachable,
    PluginNotLoaded,
    ProtocolMismatch,
    PushTimeout,
    TransferFailed,
    UnsupportedOption,
    Weights,
    WeightSyncError,
)
from weightsync.protocol import auth, http
from weightsync.protocol.diagnosis import DiagnoseReply, DiagnoseRequest
from weightsync.protocol.expected import ExpectedReply, ExpectedRequest, Lent
from weightsync.protocol.http import PREFIX, Handshake
from weightsync.protocol.in_process import Target
from weightsync.protocol.names import START_LINES, plain_url
from weightsync.trainer import http_client
from weightsync.trainer.in_process import Local

#: Seconds past the deadline that an engine has to reply that its commit is not finished, and then the least for asking
#: it for the outcome. A push that times out reports what every engine serves within a second of its deadline.
_COMMIT_GRACE_S: Final = 0.5
_OUTCOME_S: Final = 0.25
#: Seconds for a request that only probes a server; a status request after a lost reply gets twice as long.
_PROBE_S: Final = 1.0
#: Seconds by which an engine stops waiting for its ranks before the caller stops waiting for the engine, so that its
#: reply can still name the rank that it waited for.
_ANSWER_S: Final = 0.5
#: How often a new engine is opened again, to see whether it is one. A router that takes turns is found out by one look,
#: one that chooses at random between two engines by 7 of 8 senders; what it does later is noticed by the instance.
_MORE_LOOKS: Final = 3
#: Routes by which an engine is known, and a field of each answer.
_MARKS: Final = (
    ("/version", "vllm", "version"),
    ("/model_info", "sglang", "model_path"),
    ("/get_model_info", "sglang", "model_path"),
)
_R = TypeVar("_R")


class EngineClient:
    """The admin routes of one engine.

    Every method ends by its deadline; what fails is a `WeightSyncError` that names the engine. Building one raises
    `UnsupportedOption` for an invalid URL.
    """

    def __init__(self, engine: Target, token: str):
        self._token = token = auth.usable(token)
        self._server: http_client.Server | Local
        if isinstance(engine, str):
            #: Stands for the engine in errors and results.
            self.url = plain_url(engine)
            self._server = http_client.Server(self.url, {"Authorization": f"Bearer {token}"})
        else:
            self.url, self._server = engine.name, Local(engine)
        self._engine = engine

    def another(self) -> EngineClient:
        """Another client of the same engine, which is closed by itself."""
        return EngineClient(self._engine, self._token)

    def check_caller(self) -> None:
        """Raise `UnsupportedOption` if the engine cannot answer requests of the calling thread."""
        if not isinstance(self._engine, str):
            self._engine.check_caller()

    def open(self, deadline: Deadline) -> http.OpenReply:
        """Ask for the engine's protocol, ranks and pause modes. Raises `ProtocolMismatch` for another major version."""
        request = http.OpenRequest(
            protocol=http.PROTOCOL, package_version=http.package_version(), timeout_s=_engine_timeout_s(deadline)
        )
        reply = self._post("open", request, http.OpenReply, deadline)
        if reply.protocol[0] != http.PROTOCOL[0]:
            raise ProtocolMismatch(
                f"{self.url} speaks protocol {reply.protocol[0]}.{reply.protocol[1]}, this sender "
                f"{http.PROTOCOL[0]}.{http.PROTOCOL[1]}; install the same weightsync on both sides"
            )
        return reply

    def meet(self, deadline: Deadline) -> http.OpenReply:
        """`open`, more than once. Raises `UnsupportedOption` if several engines answer: the URL is a router's."""
        hello = self.open(deadline)
        self.check_alone(hello, deadline)
        return hello

    def check_alone(self, hello: http.OpenReply, deadline: Deadline) -> None:
        """Open again, as often as `meet` does. Raises `UnsupportedOption` if another engine than before answers."""
        for _ in range(_MORE_LOOKS if isinstance(self._engine, str) else 0):
            if self.open(deadline).instance != hello.instance:
                raise UnsupportedOption(
                    f"{self.url} answers for several engines, as a router does, and a push has to reach each of them: "
                    "give the sender the URLs of the engines behind it"
                )

    def diagnose(self, deadline: Deadline, address: str = "", server_key: str = "") -> DiagnoseReply:
        """Ask what hinders pushes, and have every rank dial ``address``, see `DiagnoseRequest`."""
        asked = DiagnoseRequest(_engine_timeout_s(deadline), address, server_key)
        return self._post("diagnose", asked, DiagnoseReply, deadline)

    def expected(self, deadline: Deadline, *, standby: bool = False, lent: Lent | None = None) -> ExpectedReply:
        """Ask for the tensors of a complete push; with ``standby``, have what the first push needs made, and what is
        ``lent`` mapped."""
        asked = ExpectedRequest(_engine_timeout_s(deadline), standby or msgspec.UNSET, lent or msgspec.UNSET)
        return self._post("expected", asked, ExpectedReply, deadline)

    def status(self, deadline: Deadline, *, digest: bool = False) -> http.StatusReply:
        """Return what the engine serves; with ``digest``, every rank hashes its weights."""
        request = http.StatusRequest(digest=digest, timeout_s=_engine_timeout_s(deadline))
        return self._post("status", request, http.StatusReply, deadline)

    def join(self, method: str, asked: Handshake, deadline: Deadline) -> http.JoinReply:
        """Take the lease and have every rank set up a transport; ``method`` is its set-up route."""
        return self._post(method, asked, http.JoinReply, deadline)

    def prepare(self, request: http.UpdateRequest, transport: str, deadline: Deadline) -> http.UpdateReply:
        """Take the lease, and have every rank check the manifest and connect to the sender."""
        return self._post(f"{http.UPDATE}{transport}", request, http.UpdateReply, deadline)

    def add_engine(self, url: str, deadline: Deadline) -> str:
        """Have the sender that listens at this client's URL add the engine at ``url``; return what that then serves."""
        return self._post("add_engine", http.AddEngine(url=url), http.EngineAdded, deadline).version

    def renew(self, owner: str, deadline: Deadline) -> None:
        """Renew the lease. Raises `LeaseHeld` if another trainer has it, `PushTimeout` if no connection is accepted."""
        try:
            self._post("lease", http.LeaseRequest(owner=owner), http.Done, deadline)
        except EngineUnreachable as error:
            if isinstance(error.__cause__, http_client.Late):  # the network may come back: the next renewal can succeed
                raise PushTimeout(f"{self.url} did not accept a connection within {deadline.seconds:g} s") from error
            raise

    def commit(self, request: http.CommitRequest, deadline: Deadline) -> http.CommitReply:
        """Commit a prepared push, or roll back to the version before.

        If the reply is lost, the engine's status is asked for the outcome, until ``deadline`` and a grace have passed.
        """
        # The engine stops waiting for in-flight requests at ``deadline``; in the grace it replies that nothing changed.
        until = deadline.extended(_COMMIT_GRACE_S)
        start = time.perf_counter()
        try:
            return self._post("commit", request, http.CommitReply, until)
        except (EngineUnreachable, PushTimeout) as error:
            if error.weights != "unknown":
                raise
            served = self._outcome(request, until, error)
        if not served:
            raise TransferFailed(f"{self.url}: the connection broke, and the commit was not carried out")
        return http.CommitReply(version=request.version, pause_s=time.perf_counter() - start, seconds={})

    def _outcome(self, request: http.CommitRequest, until: Deadline, error: errors.WeightSyncError) -> bool:
        """Whether the engine has committed. If that cannot be found out, raises ``error`` or a more precise one."""
        # Ask at least once, even past the deadline: one status reply tells what the engine serves.
        until = Deadline(max(until.left(), _OUTCOME_S))
        refused = False
        while until.left():
            try:
                status = self.status(Deadline(min(until.left(), 2 * _PROBE_S)))
                if request.instance not in ("", status.instance):
                    raise errors.EngineRestarted(f"{self.url} was restarted during the commit", weights="unknown")
                if status.committed == request.push:
                    return True
                if status.state.startswith("dirty") and not status.state.endswith("applying"):
                    raise errors.ApplyFailed(f"{self.url}: {status.detail}", weights="dirty") from error
                if refused:
                    return False
                if status.state.endswith("applying"):
                    time.sleep(min(_PROBE_S / 4, until.left()))
                    continue
                # After this, a commit that is queued or still in flight is refused.
                refused = self.abort(request.push, Deadline(until.left()), request.owner) or not request.rollback
                if not refused:
                    break  # an engine of an earlier release may still carry out a rollback
            except (errors.EngineRestarted, errors.ApplyFailed):
                raise
            except errors.WeightSyncError:
                break
        raise error

    def abort(self, push: str, deadline: Deadline, owner: str = "") -> bool:
        """Have every rank drop a push and end its lease; without ``owner``, whichever trainer's push it is.

        Returns whether the engine will refuse a commit of the push that still arrives.
        """
        request = http.AbortRequest(push=push, owner=owner, timeout_s=_engine_timeout_s(deadline))
        return self._post("abort", request, http.AbortReply, deadline).refused

    def release(self, address: str, owner: str, deadline: Deadline) -> None:
        """Give the lease back, and have every rank release what it holds for the sender at ``address``."""
        request = http.AbortRequest(release=address, owner=owner, timeout_s=_engine_timeout_s(deadline))
        self._post("abort", request, http.AbortReply, deadline)

    def close(self) -> None:
        """Shut down the connections of requests in other threads, which then fail."""
        self._server.close()

    def _post(self, route: str, message: msgspec.Struct, kind: type[_R], deadline: Deadline) -> _R:
        deadline.check(f"{route} of {self.url}")
        body = http.to_json(message)
        try:
            reply = self._server.ask("POST", f"{PREFIX}/{route}", body, deadline, limit=http.MAX_BODY_BYTES)
        except http_client.Untrusted as error:
            raise EngineUnreachable(
                f"{self.url} shows a certificate that this host does not trust ({error}): set {http_client.CA_FILE} to "
                "a file with the certificate of the authority that signed it, and use the host name that it is for",
                weights="unknown",
            ) from error
        except http_client.NoAnswer as error:
            if isinstance(error, http_client.Late) and error.connected:
                busy = f": {error.why}" if error.why else ""
                raise PushTimeout(
                    f"{self.url} did not answer {route} within {round(deadline.seconds, 1):g} s{busy}",
                    weights="unknown",
                ) from error
            said = f"no engine answers at {self.url} ({route}): {error}; is it up, and is that its address?"
            if not isinstance(self._engine, str):
                said = f"{self.url} does not answer {route}: {error}"
            raise EngineUnreachable(said, weights="unknown") from error
        if reply.status != 200:
            raise self._refusal(route, reply, deadline)
        try:
            return http.from_json(reply.body, kind)
        except msgspec.MsgspecError as error:
            raise ProtocolMismatch(f"{self.url} answered {route} with a reply that cannot be read: {error}") from error

    def _refusal(self, route: str, reply: http_client.Reply, deadline: Deadline) -> errors.WeightSyncError:
        try:
            refusal = http.from_json(reply.body, http.ErrorReply)
        except msgspec.MsgspecError:
            refusal = None
        if reply.status in (401, 403):
            return AuthenticationFailed(
                f"{self.url} refused the key: this side's is {auth.origin(self._token)}, and the engine's log "
                "says at start which key it requires; set WEIGHTSYNC_TOKEN to the same value on both sides, or run "
                "both as one user where they share /dev/shm"
            )
        if refusal is None and reply.status in (404, 405, 501):
            return PluginNotLoaded(
                f"{self.url} answers, but weightsync is not loaded there. {self._start_line(deadline)}"
            )
        if refusal is None:
            return TransferFailed(f"{self.url} answered {route} with HTTP {reply.status}")
        kind = errors.named(refusal.error)
        return kind(f"{self.url}: {refusal.message}", weights=refusal.weights, engines={self.url: refusal.weights})

    def _start_line(self, deadline: Deadline) -> str:
        """How to start the engine with the plugin; for either kind if the server does not tell which it is."""
        kind = self.kind(deadline)
        lines = [START_LINES[kind]] if kind else START_LINES.values()
        return "Start it as: " + " or: ".join(line.format(model="MODEL") for line in lines)

    def kind(self, deadline: Deadline) -> str:
        """Which engine the server says to be, by a route of its own: a key of `START_LINES`, or empty."""
        until = Deadline(min(_PROBE_S, deadline.left()))
        for path, engine, field in _MARKS:
            try:
                reply = self._server.ask("GET", path, b"", until, limit=http.MAX_BODY_BYTES)
                answer = json.loads(reply.body) if reply.status == 200 else None
            except (http_client.NoAnswer, ValueError):
                continue
            if isinstance(answer, dict) and field in answer:
                return engine
        return ""


def _engine_timeout_s(deadline: Deadline) -> float:
    """Seconds that an engine may wait for its ranks, so that its reply arrives before ``deadline``."""
    left_s = deadline.left()
    return min(max(left_s - min(_ANSWER_S, left_s / 4), 0.01), http.MAX_TIMEOUT_S)


def check_distinct(url: str, hello: http.OpenReply, others: Mapping[str, str]) -> None:
    """Raise `UnsupportedOption` if the engine at ``url`` is one of ``others``, URLs by engine instance."""
    if hello.instance and hello.instance in others:
        raise UnsupportedOption(
            f"{others[hello.instance]} and {url} are one and the same engine ({hello.engine}): give each engine by one "
            "URL"
        )


def weights_at_open(reply: http.OpenReply | WeightSyncError) -> Weights:
    """What an engine serves, by its reply to `EngineClient.open`."""
    if isinstance(reply, WeightSyncError):
        return reply.weights
    return "dirty" if reply.stopped else "unchanged"
