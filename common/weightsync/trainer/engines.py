"""All engines of one sender: they are asked in parallel, and their failures are raised as one error."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, contextmanager
from typing import Final, TypeVar

import msgspec

from weightsync import observe
from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.errors import (
    ManifestUnknown,
    PushTimeout,
    UnsupportedOption,
    Weights,
    WeightSyncError,
    WrongState,
    joined,
)
from weightsync.memory import processes
from weightsync.protocol import auth, http, states
from weightsync.protocol.expected import SINCE_MINOR, ExpectedReply
from weightsync.protocol.http import Handshake
from weightsync.protocol.in_process import Target, name_of
from weightsync.trainer.client import EngineClient, check_distinct, weights_at_open
from weightsync.trainer.engine import Commits, Engine
from weightsync.trainer.lockstep import check_lockstep, in_lockstep
from weightsync.trainer.progress import Shown
from weightsync.transports import registry
from weightsync.transports.base import Peer

logger = logging.getLogger(__name__)

#: Seconds for telling engines to drop a push or this sender: at most, at most past the call's deadline, and at least.
_ABORT_S: Final = 1.0
_SETTLED_S: Final = 0.9
_LEAST_S: Final = 0.1
#: Seconds for asking the engines what they serve after a call has failed for another reason.
_STATUS_S: Final = 0.5
#: Seconds past the deadline to wait for the thread of a commit: more than its client takes to find out the outcome.
_OUTCOME_S: Final = 1.0
#: More than there are calls at once. Threads are started on demand and reused. With a limit that can be reached, some
#: engines of a streamed push would wait for a thread while the others wait for bytes that go to all engines at once.
_MAX_THREADS: Final = 1 << 16

Commit = Future[http.CommitReply | WeightSyncError]
_T = TypeVar("_T")
Pick = Callable[[str, http.OpenReply], tuple[str, str]]


class Engines:
    """All engines, which know this sender as ``owner``; ``pick``, see `registry.pick`, chooses their transports.
    Building opens each of them. Raises `WeightSyncError`."""

    def __init__(self, targets: Sequence[Target], token: str, pause: http.PauseMode, pick: Pick, deadline: Deadline):
        self.owner = secrets.token_hex(8)
        self.holder = processes.this_process()
        self._token, self._pause, self._pick = token, pause, pick
        self._clients = [EngineClient(target, token) for target in targets]
        self._threads = DaemonThread("weightsync-engine", _MAX_THREADS)
        self.by_url: dict[str, Engine] = {}
        #: What each engine's ranks hold of the tensors that the last push left as they are, see `Accepted`.
        self.kept: dict[str, tuple[dict[str, str], ...]] = {}
        #: What is shown of the push that runs.
        self.shown = Shown()
        try:
            self.check_caller()
            self._open(deadline)
        except BaseException:
            self.close()
            raise

    def _open(self, deadline: Deadline) -> None:
        replies = self.try_all(lambda client: client.meet(deadline))
        at_open = {client.url: weights_at_open(reply) for client, reply in zip(self._clients, replies, strict=True)}
        open_replies, url_of = self._succeeded(replies, at_open), dict[str, str]()
        try:
            for client, hello in zip(self._clients, open_replies, strict=True):
                check_distinct(client.url, hello, url_of)
                url_of[hello.instance] = client.url
            for client, hello in zip(self._clients, open_replies, strict=True):
                self._register(client, hello)
            check_lockstep(self.by_url)
        except WeightSyncError as error:
            error.settle(at_open)
            raise

    def _register(self, client: EngineClient, hello: http.OpenReply) -> None:
        if reason := hello.pause_refused.get(self._pause):
            raise UnsupportedOption(f"{client.url} ({hello.engine}) cannot pause with {self._pause!r}: {reason}")
        transport, reason = self._pick(client.url, hello)
        self.by_url[client.url] = Engine(client, hello, hello.version, transport, reason, hello.stopped)

    @property
    def ranks(self) -> list[http.RankInfo]:
        """Every rank of every engine."""
        return [rank for engine in self.by_url.values() for rank in engine.hello.ranks]

    @property
    def peers(self) -> dict[str, set[Peer]]:
        """Every rank of every engine, by transport."""
        found: dict[str, set[Peer]] = {}
        for engine in self.by_url.values():
            found.setdefault(engine.transport, set()).update(engine.peers)
        return found

    @property
    def local(self) -> bool:
        """Whether every rank of every engine can map the trainer's memory."""
        return all(registry.spec(engine.transport).local for engine in self.by_url.values())

    def last_known(self) -> dict[str, Weights]:
        """What each engine serves, by URL, if no push has changed it since it last replied."""
        known = self.by_url  # not all of them while this is built
        return {c.url: known[c.url].weights if c.url in known else "unchanged" for c in self._clients}

    def current_weights(self, deadline: Deadline) -> dict[str, Weights]:
        """What each engine serves now, by URL; for one that does not reply, as `last_known`."""
        if deadline.left():
            self.status(Deadline(min(_STATUS_S, deadline.left())))
        return self.last_known()

    def has_key(self, shown: str) -> bool:
        """Whether ``shown`` is the key that this sender uses."""
        return auth.same(shown, auth.usable(self._token))

    def open_replies(self) -> dict[str, tuple[str, http.OpenReply]]:
        """The transport and the open reply of each engine, by URL."""
        return {url: (engine.transport, engine.hello) for url, engine in self.by_url.items()}

    def check_caller(self) -> None:
        """Raise `UnsupportedOption` if an engine cannot answer requests of the calling thread."""
        for client in self._clients:
            client.check_caller()

    def add(self, target: Target, deadline: Deadline) -> str:
        """Open one more engine and return its URL, or its name. Raises `WeightSyncError`."""
        client = EngineClient(target, self._token)
        client.check_caller()
        if client.url in self.by_url:
            raise UnsupportedOption(f"{client.url} is already among the engines of this sender")
        hello = client.meet(deadline)
        check_distinct(client.url, hello, {engine.hello.instance: url for url, engine in self.by_url.items()})
        self._register(client, hello)
        self._clients.append(client)
        self.expected(deadline)
        return client.url

    def check_has(self, url: str, deadline: Deadline) -> None:
        """Raise `UnsupportedOption` unless one of the engines answers at ``url``, and `WeightSyncError`."""
        with closing(EngineClient(url, self._token)) as client:
            instance = client.open(deadline).instance
        if all(engine.hello.instance != instance for engine in self.by_url.values()):
            raise UnsupportedOption(
                f"the trainer generates at {url}, but its Sender pushes to {', '.join(self.by_url)}: give both the same"
            )

    def removable(self, target: Target) -> str:
        """Return its URL, or name. Raises `UnsupportedOption` if it is not among the engines, or is the only one."""
        known = name_of(target)
        if known not in self.by_url or len(self.by_url) == 1:
            raise UnsupportedOption(f"{known} cannot be removed: the engines are {', '.join(self.by_url)}")
        return known

    def remove(self, url: str) -> None:
        """Remove an engine, by the URL that `removable` returned."""
        self._clients.remove(self.by_url.pop(url).client)
        self.kept.pop(url, None)

    @contextmanager
    def only(self, url: str) -> Iterator[None]:
        """Inside the context, the engine at ``url``, with those in lockstep with it, is the only one."""
        saved = self._clients, self.by_url
        self.by_url = in_lockstep(url, self.by_url)
        self._clients = [engine.client for engine in self.by_url.values()]
        try:
            yield
        finally:
            self._clients, self.by_url = saved

    def reopen(self, deadline: Deadline) -> None:
        """Open every engine again. Raises the failures as one error."""
        if failed := self.reopen_each(deadline):
            raise joined(failed, self.last_known())
        self.expected(deadline)  # here, since a push may wait for its own memory alone

    def reopen_each(self, deadline: Deadline) -> dict[str, WeightSyncError]:
        """Open every engine again; return, by URL, the errors of engines that do not reply or can no longer be used."""
        failed: dict[str, WeightSyncError] = {}
        for client, hello in zip(self._clients, self.try_all(lambda client: client.open(deadline)), strict=True):
            before = self.by_url[client.url]
            try:
                if isinstance(hello, WeightSyncError):
                    raise hello
                self._register(client, hello)
            except WeightSyncError as error:
                failed[client.url] = error
                continue
            engine = self.by_url[client.url]
            engine.noticed, engine.committed = before.noticed, before.committed
            if hello.instance == before.hello.instance:
                engine.unsettled, engine.content = before.unsettled, before.content
            else:
                engine.noticed.append("restarted since this sender last opened it")
        return failed

    def status(self, deadline: Deadline, *, digest: bool = False) -> dict[str, http.StatusReply | WeightSyncError]:
        """Return each engine's status, or its error, by URL; with ``digest``, every rank hashes its weights."""
        replies = self.try_all(lambda client: client.status(deadline, digest=digest))
        for engine, reply in zip(self.by_url.values(), replies, strict=True):
            if not isinstance(reply, WeightSyncError):
                engine.stopped = states.is_stopped(reply.state)
        return dict(zip(self.by_url, replies, strict=True))

    def find_outdated(
        self, pushed: Mapping[str, str], deadline: Deadline
    ) -> tuple[dict[str, list[str]], dict[str, WeightSyncError]]:
        """By URL, what engines lack (see `Engine.lacks`) of what was ``pushed``, and the errors of those that fail."""
        # Half of the time for each request: an engine that is frozen leaves time to reach those that are not.
        failed = self.reopen_each(Deadline(deadline.left() / 2))
        found: dict[str, list[str]] = {}
        for url, reply in self.status(Deadline(deadline.left() / 2)).items():
            if isinstance(reply, WeightSyncError):
                failed.setdefault(url, reply)
            elif url not in failed and (lacking := self.by_url[url].lacks(pushed, reply)):
                found[url] = lacking
        return found, failed

    def expected(self, deadline: Deadline) -> dict[str, ExpectedReply]:
        """What each engine says a complete push is, by URL; asked once. Empty for engines of earlier releases."""

        def run(client: EngineClient) -> None:
            engine = self.by_url[client.url]
            if engine.expected is None:
                asked = engine.hello.protocol >= (engine.hello.protocol[0], SINCE_MINOR)
                engine.expected = client.expected(deadline) if asked else ExpectedReply()

        if any(engine.expected is None for engine in self.by_url.values()):
            self.all(run)
        return {url: engine.expected or ExpectedReply() for url, engine in self.by_url.items()}

    def join(self, asked: Mapping[str, Handshake], deadline: Deadline) -> dict[str, http.JoinReply]:
        """Send engines, by URL, the handshakes of their transports; return their replies."""

        def run(client: EngineClient) -> http.JoinReply | None:
            if client.url not in asked:
                return None
            method = registry.setup_method(self.by_url[client.url].transport)
            named = msgspec.structs.replace(asked[client.url], owner=self.owner, holder=self.holder)
            return client.join(method, named, deadline)

        replies = {c.url: reply for c, reply in zip(self._clients, self.all(run), strict=True) if reply is not None}
        for url, reply in replies.items():
            self.by_url[url].interfaces = ", ".join(sorted({rank.interface for rank in reply.ranks} - {""}))
        return replies

    def prepare(self, requests: Mapping[str, http.UpdateRequest], expected: str | None, deadline: Deadline) -> None:
        """Have every engine check the manifest. Raises `EngineRestarted` if one is not the instance that was opened.

        Raises `WrongState` for an engine that does not serve the version ``expected``, if one is given.
        """
        for engine in self.by_url.values():
            engine.leased = False

        def run(client: EngineClient) -> None:
            engine = self.by_url[client.url]
            request = msgspec.structs.replace(
                requests[client.url], instance=engine.hello.instance, timeout_s=max(deadline.left(), 0.1)
            )
            reply = self._prepared(engine, request, deadline)
            engine.leased, engine.stopped = True, reply.stopped
            engine.record_s, self.kept[client.url] = reply.record_s or 0.0, reply.kept or ()
            if expected is not None and (reply.stopped or reply.version != expected):
                serves = "nothing" if reply.stopped else f"version {reply.version!r}"
                raise WrongState(f"{client.url} serves {serves}, and this push expects version {expected!r}")
            if reply.version != (left := engine.serves(request.lora)):
                engine.noticed.append(f"served {reply.version!r}, not {left!r} as this sender left it")

        self.all(run)

    def _prepared(self, engine: Engine, request: http.UpdateRequest, deadline: Deadline) -> http.UpdateReply:
        """Prepare one engine; a manifest that it already has is sent as its name."""
        if request.lora is msgspec.UNSET and request.known and engine.manifest == request.known:
            try:
                return engine.client.prepare(request.by_name(), engine.transport, deadline)
            except ManifestUnknown:
                logger.debug("%s no longer has the manifest; it is sent in full", engine.client.url)
        before, engine.manifest = engine.manifest, ""
        reply = engine.client.prepare(request, engine.transport, deadline)
        engine.manifest = request.known if request.lora is msgspec.UNSET else before
        return reply

    def commit(self, request: http.CommitRequest, deadline: Deadline) -> list[Commit]:
        """Ask every engine to commit, each in a thread."""
        for engine in self.by_url.values():
            engine.unsettled = request.push

        def ask(client: EngineClient) -> http.CommitReply:
            instance = self.by_url[client.url].hello.instance
            return client.commit(msgspec.structs.replace(request, instance=instance), deadline)

        return self.asked(ask)

    def outcome(self, futures: Sequence[Commit], asked: http.CommitRequest, deadline: Deadline) -> Commits:
        """Wait for the replies to `commit`, by URL. Raises the failures as one error, with what each engine serves."""
        replies: dict[str, http.CommitReply] = {}
        failed: dict[str, WeightSyncError] = {}
        for client, future in zip(self._clients, futures, strict=True):
            engine = self.by_url[client.url]
            try:
                reply = future.result(deadline.extended(_OUTCOME_S).left())
            except FutureTimeout:
                reply = PushTimeout(f"the request to {client.url} to commit did not end in time", weights="unknown")
            if not isinstance(reply, WeightSyncError) or reply.weights != "unknown":
                engine.unsettled = ""
            if isinstance(reply, WeightSyncError):
                failed[client.url] = reply
                engine.stopped |= reply.weights == "dirty"
            else:
                replies[client.url] = reply
                if reply.asleep:
                    engine.noticed.append(f"its memory for {', '.join(reply.asleep)} sleeps, and has to be woken")
                engine.now_serves(asked)
        if failed:
            raise joined(failed, dict.fromkeys(replies, "committed"))
        return replies

    def abort(self, push: str, deadline: Deadline) -> None:
        """Have every engine drop a push. Best effort: an engine that cannot be reached drops it at its own deadline."""
        until = _cleanup_deadline(deadline)
        self.try_all(lambda client: client.abort(push, until, self.owner))

    def release(self, at: Mapping[str, str], deadline: Deadline) -> None:
        """Have engines release this sender, which each knows by its address ``at`` here. Best effort, as `abort`."""
        until = _cleanup_deadline(deadline)
        self.try_all(lambda client: client.release(at[client.url], self.owner, until) if client.url in at else None)

    def all(self, call: Callable[[EngineClient], _T]) -> list[_T]:
        """Call every engine in parallel. Raises the failures as one error."""
        outcome = self.try_all(call)
        return self._succeeded(outcome, self.last_known())

    def _succeeded(self, outcome: list[_T | WeightSyncError], others: Mapping[str, Weights]) -> list[_T]:
        """The replies of all. Raises the failures as one error; ``others`` is what the other engines serve."""
        failed = {
            client.url: reply
            for client, reply in zip(self._clients, outcome, strict=True)
            if isinstance(reply, WeightSyncError)
        }
        if failed:
            raise joined(failed, others)
        return [reply for reply in outcome if not isinstance(reply, WeightSyncError)]

    def try_all(self, call: Callable[[EngineClient], _T]) -> list[_T | WeightSyncError]:
        """Call every engine in parallel; each result is a reply or an error."""
        return [asked.result() for asked in self.asked(call)]

    def asked(self, call: Callable[[EngineClient], _T]) -> list[Future[_T | WeightSyncError]]:
        """Call every engine, each in a thread; the futures have replies or errors."""
        calls = [functools.partial(self._reply_or_error, call, client) for client in self._clients]
        return [self._threads.submit(observe.carried(each)) for each in calls]

    def _reply_or_error(self, call: Callable[[EngineClient], _T], client: EngineClient) -> _T | WeightSyncError:
        try:
            return call(client)
        except WeightSyncError as error:
            return error
        finally:
            self.shown.heard(client.url)

    def show(self, phase: str) -> None:
        """Show that a phase of a push has begun, and the engines that it waits for."""
        waits_for = [] if phase in ("read", "transfer") else list(self.by_url)
        if phase == "prepare" and not all(engine.manifest for engine in self.by_url.values()):
            phase = "prepare (loaders may be recorded)"
        self.shown.phase(phase, waits_for)

    def start(self, call: Callable[[], object]) -> None:
        """Run ``call`` in a thread of its own."""
        self._threads.submit(call)

    def close(self) -> None:
        """End threads and connections; idempotent."""
        for client in self._clients:
            client.close()
        # Requests that are still pending have lost their connections and end by themselves.
        self._threads.close()


def _cleanup_deadline(deadline: Deadline) -> Deadline:
    """How long engines may take to be told to drop a push or this sender, see `_ABORT_S`."""
    return Deadline(max(_LEAST_S, min(_ABORT_S, deadline.extended(_SETTLED_S).left())))
