"""Control plane to one engine, over HTTP."""

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
from weightsync.protocol.http import PREFIX, Handshake
from weightsync.protocol.names import START_LINES, plain_url
from weightsync.trainer import http_client

#: A push that fails by its deadline says within a second of it what it has left: that long an engine may take to say
#: that its commit is not over, and that long to say what became of it.
_COMMIT_GRACE_S: Final = 0.5
_OUTCOME_S: Final = 0.25
_PROBE_S: Final = 1.0
#: The engine gives up before nobody waits for its answer any more, and can then still say whom it waited for.
_ANSWER_S: Final = 0.5
_R = TypeVar("_R")


class EngineClient:
    """One engine's admin routes. Every method raises a `WeightSyncError` that names the engine, by its deadline.

    Raises `UnsupportedOption` for a URL that is none.
    """

    def __init__(self, url: str, token: str):
        self.url = plain_url(url)
        self._token = token = auth.usable(token)
        self._server = http_client.Server(self.url, {"Authorization": f"Bearer {token}"})

    def open(self, deadline: Deadline) -> http.OpenReply:
        """Greet the engine. Raises `ProtocolMismatch` and whatever keeps it from answering."""
        request = http.OpenRequest(
            protocol=http.PROTOCOL, package_version=http.package_version(), timeout_s=_patience(deadline)
        )
        reply = self._post("open", request, http.OpenReply, deadline)
        if reply.protocol[0] != http.PROTOCOL[0]:
            raise ProtocolMismatch(
                f"{self.url} speaks protocol {reply.protocol[0]}.{reply.protocol[1]}, this sender "
                f"{http.PROTOCOL[0]}.{http.PROTOCOL[1]}; install the same weightsync on both sides"
            )
        return reply

    def status(self, deadline: Deadline, *, digest: bool = False) -> http.StatusReply:
        """What the engine serves; ``digest`` has every rank hash its weights."""
        request = http.StatusRequest(digest=digest, timeout_s=_patience(deadline))
        return self._post("status", request, http.StatusReply, deadline)

    def join(self, method: str, asked: Handshake, deadline: Deadline) -> http.JoinReply:
        """Take the lease, and make every rank get a transport ready, by its set-up ``method``."""
        return self._post(method, asked, http.JoinReply, deadline)

    def prepare(self, request: http.UpdateRequest, transport: str, deadline: Deadline) -> http.UpdateReply:
        """Take the lease, and make every rank check the manifest and come for the bytes."""
        return self._post(f"{http.UPDATE}{transport}", request, http.UpdateReply, deadline)

    def add_engine(self, url: str, deadline: Deadline) -> str:
        """Of a sender that listens at this client's URL: have the engine at ``url`` take part; what it then serves."""
        return self._post("add_engine", http.AddEngine(url=url), http.EngineAdded, deadline).version

    def renew(self, owner: str, deadline: Deadline) -> None:
        """Keep the lease through a push. Raises `LeaseHeld` if another has it."""
        try:
            self._post("lease", http.LeaseRequest(owner=owner), http.Done, deadline)
        except EngineUnreachable as error:
            if isinstance(error.__cause__, http_client.Late):  # a network that is slow to come back
                raise PushTimeout(f"{self.url} took no connection within {deadline.seconds:g} s") from error
            raise

    def commit(self, request: http.CommitRequest, deadline: Deadline) -> http.CommitReply:
        """Make a prepared push, or the version before, the served one.

        Where the reply is lost the engine is asked what became of it, as long as ``deadline`` and a grace allow.
        """
        # The engine stops waiting for requests in flight at the same moment as we do, and can say that nothing changed.
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
        """Whether the engine serves what it was asked to commit. Raises what is known where that is not known."""
        # One look is owed even when the time is up: it is the difference between unknown and known.
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
                # A commit that waits for its turn, or is still on its way, is refused after this.
                refused = self.abort(request.push, Deadline(until.left()), request.owner) or not request.rollback
                if not refused:
                    break  # an engine of an earlier release may still carry out a rollback
            except (errors.EngineRestarted, errors.ApplyFailed):
                raise
            except errors.WeightSyncError:
                break
        raise error

    def abort(self, push: str, deadline: Deadline, owner: str = "") -> bool:
        """Make every rank forget a push; without ``owner`` whoever's push it is, and end its lease.

        Returns whether the engine will refuse a commit of the push that still arrives.
        """
        request = http.AbortRequest(push=push, owner=owner, timeout_s=_patience(deadline))
        return self._post("abort", request, http.AbortReply, deadline).refused

    def release(self, address: str, owner: str, deadline: Deadline) -> None:
        """Give the lease back, and make every rank give back what it holds of the sender at ``address``."""
        request = http.AbortRequest(release=address, owner=owner, timeout_s=_patience(deadline))
        self._post("abort", request, http.AbortReply, deadline)

    def close(self) -> None:
        """End the requests that are under way in other threads."""
        self._server.close()

    def _post(self, route: str, message: msgspec.Struct, kind: type[_R], deadline: Deadline) -> _R:
        deadline.check(f"{route} of {self.url}")
        body = http.to_json(message)
        try:
            reply = self._server.ask("POST", f"{PREFIX}/{route}", body, deadline, limit=http.MAX_BODY_BYTES)
        except http_client.Untrusted as error:
            raise EngineUnreachable(
                f"{self.url} shows a certificate that is not trusted here ({error}): set {http_client.CA_FILE} to a "
                "file with the certificate of the authority that signed it, and use the name that it is for",
                weights="unknown",
            ) from error
        except http_client.NoAnswer as error:
            if isinstance(error, http_client.Late) and error.connected:
                raise PushTimeout(
                    f"{self.url} did not answer {route} within {round(deadline.seconds, 1):g} s", weights="unknown"
                ) from error
            raise EngineUnreachable(
                f"no engine answers at {self.url} ({route}): {error}; is it up, and is that its address?",
                weights="unknown",
            ) from error
        if reply.status != 200:
            raise self._refusal(route, reply, deadline)
        try:
            return http.from_json(reply.body, kind)
        except msgspec.MsgspecError as error:
            raise ProtocolMismatch(f"{self.url} answered {route} with something else: {error}") from error

    def _refusal(self, route: str, reply: http_client.Reply, deadline: Deadline) -> errors.WeightSyncError:
        try:
            said = http.from_json(reply.body, http.ErrorReply)
        except msgspec.MsgspecError:
            said = None
        if reply.status in (401, 403):
            return AuthenticationFailed(
                f"{self.url} refused the key: this side's is {auth.origin(self._token)}, and the engine's log "
                "says at start which it asks for; set WEIGHTSYNC_TOKEN to the same value on both sides, or run both as "
                "one user where they share /dev/shm"
            )
        if said is None and reply.status in (404, 405, 501):
            return PluginNotLoaded(
                f"{self.url} answers, but weightsync is not loaded there. {self._start_line(deadline)}"
            )
        if said is None:
            return TransferFailed(f"{self.url} answered {route} with HTTP {reply.status}")
        kind = errors.named(said.error)
        return kind(f"{self.url}: {said.message}", weights=said.weights, engines={self.url: said.weights})

    def _start_line(self, deadline: Deadline) -> str:
        """How to start the engine that answers at the URL."""
        until = Deadline(min(_PROBE_S, deadline.left()))
        for path, engine in (("/version", "vllm"), ("/get_model_info", "sglang"), ("/model_info", "sglang")):
            try:
                reply = self._server.ask("GET", path, b"", until, limit=http.MAX_BODY_BYTES)
                if reply.status == 200 and isinstance(json.loads(reply.body), dict):
                    return f"Start it as: {START_LINES[engine].format(model='MODEL')}"
            except (http_client.NoAnswer, ValueError):
                continue
        return "Start it as: " + " or: ".join(line.format(model="MODEL") for line in START_LINES.values())


def _patience(deadline: Deadline) -> float:
    """How long an engine is to wait for its ranks, in seconds, on behalf of somebody who waits by ``deadline``."""
    left_s = deadline.left()
    return min(max(left_s - min(_ANSWER_S, left_s / 4), 0.01), http.MAX_TIMEOUT_S)


def check_other(url: str, hello: http.OpenReply, others: Mapping[str, str]) -> None:
    """Raise `UnsupportedOption` if the engine at ``url`` is one of ``others``, which are URLs by instance."""
    if hello.instance and hello.instance in others:
        raise UnsupportedOption(
            f"{others[hello.instance]} and {url} are one engine ({hello.engine} on one host, started once): name each "
            "engine by one URL"
        )


def weights_at_open(reply: http.OpenReply | WeightSyncError) -> Weights:
    """What an engine serves that replied so when it was opened."""
    if isinstance(reply, WeightSyncError):
        return reply.weights
    return "dirty" if reply.stopped else "unchanged"
