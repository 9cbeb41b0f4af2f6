"""Trainer side: all engines of one sender, asked at once, their failures told as one error."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from weightsync.deadline import Deadline
from weightsync.errors import (
    EngineUnreachable,
    LeaseHeld,
    ManifestUnknown,
    PushTimeout,
    TransferFailed,
    UnsupportedOption,
    Weights,
    WeightSyncError,
    joined,
)
from weightsync.memory import processes
from weightsync.protocol import auth, http, states
from weightsync.protocol.http import Handshake
from weightsync.protocol.names import plain_url
from weightsync.trainer.client import EngineClient, check_distinct, weights_at_open
from weightsync.transports import registry
from weightsync.transports.base import Peer

logger = logging.getLogger(__name__)

#: How long engines are given to forget a failed push or a sender that closes, and how long past the call's deadline.
_ABORT_S: Final = 1.0
_SETTLED_S: Final = 0.9
_LEAST_S: Final = 0.1
#: How long the engines are given to say what they serve where a call has failed for another reason.
_LOOK_S: Final = 0.5
#: How often a sender in the middle of a push says that it is alive.
_RENEW_EVERY_S: Final = 1.0
#: A renewal that is not answered by then is not missed: the next one follows.
_RENEW_S: Final = 2.0
#: Every so many renewals the ranks are asked too, which takes a moment of their time.
_LOOK_EVERY: Final = 3
#: The client waits for a commit by the deadline and asks what became of it; this is more than that takes.
_OUTCOME_S: Final = 1.0
#: More than there will be calls at once. Threads are started as they are needed and used again; a limit that calls can
#: reach would have some engines of a streamed push wait for others, which wait for bytes that no engine is to miss.
_MAX_THREADS: Final = 1 << 16

Commit = Future[http.CommitReply | WeightSyncError]
_T = TypeVar("_T")


@dataclass
class Engine:
    """One engine: what it said when it was opened, and the version it served when it was last heard of.

    ``transport``: how it is reached, and ``reason`` why so. ``stopped``: it served none, being dirty or never synced.
    ``leased``: it has answered the prepare of this push. ``noticed``: what the next result is to tell of it.
    ``interfaces``: what its ranks said they will use. ``manifest``: the name of the one it was sent last.
    ``committed``: which instance of it was the last to commit what this sender pushed. ``record_s``: how long it stood
    still to find out what its loader does with that.
    """

    client: EngineClient
    hello: http.OpenReply
    version: str
    transport: str
    reason: str
    stopped: bool = False
    leased: bool = False
    noticed: list[str] = field(default_factory=list)
    interfaces: str = ""
    manifest: str = ""
    committed: str = ""
    record_s: float = 0.0

    @property
    def peers(self) -> set[Peer]:
        """Its ranks."""
        return {Peer(self.client.url, rank.rank) for rank in self.hello.ranks}


class Engines:
    """The engines at ``urls``. ``owner`` is what they know this sender by. Raises as `Sender` when built."""

    def __init__(self, urls: Sequence[str], token: str, pause: http.PauseMode, transport: str, deadline: Deadline):
        self.owner = secrets.token_hex(8)
        self.holder = processes.this_process()
        self._pause, self._transport = pause, transport
        self._clients = [EngineClient(url, token) for url in urls]
        self._token = token
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="weightsync-engine")
        self.by_url: dict[str, Engine] = {}
        try:
            self._open(deadline)
        except BaseException:
            self.close()
            raise

    def _open(self, deadline: Deadline) -> None:
        replies = self.try_all(lambda client: client.open(deadline))
        now = {client.url: weights_at_open(reply) for client, reply in zip(self._clients, replies, strict=True)}
        open_replies, by = self._succeeded(replies, now), dict[str, str]()
        try:
            for client, hello in zip(self._clients, open_replies, strict=True):
                check_distinct(client.url, hello, by)
                by[hello.instance] = client.url
            for client, hello in zip(self._clients, open_replies, strict=True):
                self._admit(client, hello)
        except WeightSyncError as error:
            error.settle(now)
            raise

    def _admit(self, client: EngineClient, hello: http.OpenReply) -> None:
        if reason := hello.pause_refused.get(self._pause):
            raise UnsupportedOption(f"{client.url} ({hello.engine}) cannot pause with {self._pause!r}: {reason}")
        transport, reason = registry.pick(self._transport, client.url, hello)
        self.by_url[client.url] = Engine(client, hello, hello.version, transport, reason, hello.stopped)

    @property
    def ranks(self) -> list[http.RankInfo]:
        """Every rank of every engine."""
        return [rank for engine in self.by_url.values() for rank in engine.hello.ranks]

    @property
    def peers(self) -> dict[str, set[Peer]]:
        """The same by transport, as transports know them."""
        found: dict[str, set[Peer]] = {}
        for engine in self.by_url.values():
            found.setdefault(engine.transport, set()).update(engine.peers)
        return found

    @property
    def local(self) -> bool:
        """Whether every rank of every engine maps the trainer's memory."""
        return all(registry.spec(engine.transport).local for engine in self.by_url.values())

    def untouched(self) -> dict[str, Weights]:
        """What each engine serves, by URL, if a push has not changed it."""
        known = self.by_url  # not all of them while this is built
        return {c.url: "dirty" if c.url in known and known[c.url].stopped else "unchanged" for c in self._clients}

    def look(self, deadline: Deadline) -> dict[str, Weights]:
        """As `untouched`, of what engines say now; of one that does not, of what it said last."""
        if deadline.left():
            self.status(Deadline(min(_LOOK_S, deadline.left())))
        return self.untouched()

    def has_key(self, shown: str) -> bool:
        """Whether this is the key that the engines are shown."""
        return auth.same(shown, auth.usable(self._token))

    def open_replies(self) -> dict[str, tuple[str, http.OpenReply]]:
        """By URL, how each engine is reached and what it said of itself."""
        return {url: (engine.transport, engine.hello) for url, engine in self.by_url.items()}

    def add(self, url: str, deadline: Deadline) -> str:
        """One more engine; its URL as it is known from then on. Raises as `Sender` when built."""
        client = EngineClient(url, self._token)
        if client.url in self.by_url:
            raise UnsupportedOption(f"{client.url} is among the engines already")
        hello = client.open(deadline)
        check_distinct(client.url, hello, {engine.hello.instance: url for url, engine in self.by_url.items()})
        self._admit(client, hello)
        self._clients.append(client)
        return client.url

    def removable(self, url: str) -> str:
        """The URL as it is known here. Raises `UnsupportedOption` for one that is not there, or is the last."""
        known = plain_url(url)
        if known not in self.by_url or len(self.by_url) == 1:
            raise UnsupportedOption(f"{url} cannot be removed: the engines are {', '.join(self.by_url)}")
        return known

    def remove(self, url: str) -> None:
        """One engine less, which is `removable`."""
        self._clients.remove(self.by_url.pop(url).client)

    @contextmanager
    def only(self, url: str) -> Iterator[None]:
        """Inside, there is this one engine alone."""
        whole = self._clients, self.by_url
        engine = self.by_url[url]
        self._clients, self.by_url = [engine.client], {url: engine}
        try:
            yield
        finally:
            self._clients, self.by_url = whole

    def reopen(self, deadline: Deadline) -> None:
        """Greet every engine again. Raises as `Sender` when built."""
        if failed := self.greet(deadline):
            raise joined(failed, self.untouched())

    def greet(self, deadline: Deadline) -> dict[str, WeightSyncError]:
        """Greet every engine again; by URL what keeps those that do not answer, or cannot be used any more."""
        failed: dict[str, WeightSyncError] = {}
        for client, hello in zip(self._clients, self.try_all(lambda client: client.open(deadline)), strict=True):
            before = self.by_url[client.url]
            try:
                if isinstance(hello, WeightSyncError):
                    raise hello
                self._admit(client, hello)
            except WeightSyncError as error:
                failed[client.url] = error
                continue
            engine = self.by_url[client.url]
            engine.noticed, engine.committed = before.noticed, before.committed
            if hello.instance != before.hello.instance:
                engine.noticed.append("restarted since this sender last met it")
        return failed

    def status(self, deadline: Deadline, *, digest: bool = False) -> dict[str, http.StatusReply | WeightSyncError]:
        """What each engine serves, by URL, or why it does not say so; ``digest`` has every rank hash its weights."""
        replies = self.try_all(lambda client: client.status(deadline, digest=digest))
        for engine, reply in zip(self.by_url.values(), replies, strict=True):
            if not isinstance(reply, WeightSyncError):
                engine.stopped = states.is_stopped(reply.state)
        return dict(zip(self.by_url, replies, strict=True))

    def behind(self, version: str, deadline: Deadline) -> tuple[list[str], dict[str, WeightSyncError]]:
        """The engines that do not serve ``version`` as this sender pushed it, and what keeps others from answering."""
        # Who answers is not to wait for who is frozen until the time is up.
        failed = self.greet(Deadline(deadline.left() / 2))
        found: list[str] = []
        for url, reply in self.status(Deadline(deadline.left() / 2)).items():
            if isinstance(reply, WeightSyncError):
                failed.setdefault(url, reply)
            elif url not in failed:
                engine = self.by_url[url]
                if engine.stopped or reply.version != version or engine.committed != reply.instance:
                    found.append(url)
        return found, failed

    def join(self, asked: Mapping[str, Handshake], deadline: Deadline) -> dict[str, http.JoinReply]:
        """Tell engines, by URL, what a transport has to say before a push."""

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

    def prepare(self, requests: Mapping[str, http.UpdateRequest], deadline: Deadline) -> None:
        """Have every engine check the manifest. Raises `EngineRestarted` where another answers than was opened."""
        for engine in self.by_url.values():
            engine.leased = False

        def run(client: EngineClient) -> None:
            engine = self.by_url[client.url]
            request = msgspec.structs.replace(
                requests[client.url], instance=engine.hello.instance, timeout_s=max(deadline.left(), 0.1)
            )
            reply = self._prepared(engine, request, deadline)
            engine.leased, engine.stopped = True, reply.stopped
            engine.record_s = reply.record_s or 0.0
            if reply.version != engine.version:
                engine.noticed.append(f"served {reply.version!r}, not {engine.version!r} as this sender left it")

        self.all(run)

    def _prepared(self, engine: Engine, request: http.UpdateRequest, deadline: Deadline) -> http.UpdateReply:
        """Ask one engine; of a manifest that it has seen it is told the name."""
        if request.known and engine.manifest == request.known:
            try:
                return engine.client.prepare(msgspec.structs.replace(request, manifest=()), engine.transport, deadline)
            except ManifestUnknown:
                logger.debug("%s was pushed something else meanwhile", engine.client.url)
        engine.manifest = ""
        reply = engine.client.prepare(request, engine.transport, deadline)
        engine.manifest = request.known
        return reply

    def commit(self, request: http.CommitRequest, deadline: Deadline) -> list[Commit]:
        """Ask every engine to commit, each in a thread."""

        def ask(client: EngineClient) -> http.CommitReply:
            asked = msgspec.structs.replace(request, instance=self.by_url[client.url].hello.instance)
            return client.commit(asked, deadline)

        return [self._threads.submit(_caught, lambda c=client: ask(c)) for client in self._clients]

    def outcome(self, futures: Sequence[Commit], version: str, deadline: Deadline) -> dict[str, http.CommitReply]:
        """What became of it, by URL. Raises one error for the engines that failed, with the state of each."""
        replies: dict[str, http.CommitReply] = {}
        failed: dict[str, WeightSyncError] = {}
        for client, future in zip(self._clients, futures, strict=True):
            try:
                reply = future.result(deadline.extended(_OUTCOME_S).left())
            except FutureTimeout:
                reply = PushTimeout(f"no thread came to ask {client.url} about its commit", weights="unknown")
            if isinstance(reply, WeightSyncError):
                failed[client.url] = reply
                self.by_url[client.url].stopped |= reply.weights == "dirty"
            else:
                replies[client.url] = reply
                engine = self.by_url[client.url]
                engine.version, engine.stopped, engine.committed = version, False, engine.hello.instance
        if failed:
            raise joined(failed, dict.fromkeys(replies, "committed"))
        return replies

    @contextmanager
    def renewed(self, push: str, deadline: Deadline) -> Iterator[None]:
        """Inside, a thread tells the engines that this sender lives, and ends ``deadline`` when ``push`` is in vain.

        That is when an engine is gone or another's, or when a rank has given up and had no means to say so.
        """
        over, beats = threading.Event(), itertools.count(1)
        # Its own connections: one that waits for a frozen engine may outlive this push.
        asked = [(engine, EngineClient(url, self._token)) for url, engine in self.by_url.items()]

        def run() -> None:
            while not over.wait(_RENEW_EVERY_S):
                look = next(beats) % _LOOK_EVERY == 0
                for engine, client in asked:
                    if over.is_set() or not engine.leased:
                        continue
                    try:
                        client.renew(self.owner, Deadline(_RENEW_S))
                        for rank in client.status(Deadline(_RENEW_S)).ranks if look else ():
                            if rank.failed == push:
                                deadline.end(TransferFailed(f"{client.url}: rank {rank.rank}: {rank.detail}"))
                    except (EngineUnreachable, LeaseHeld) as error:
                        error.engines.setdefault(client.url, error.weights)
                        deadline.end(error)
                    except WeightSyncError:
                        continue  # slow, or busy: its absence shows elsewhere
            for _, client in asked:
                client.close()

        try:  # before it starts: Ctrl-C may come while it does, and it would go on for ever
            threading.Thread(target=run, name="weightsync-lease", daemon=True).start()
            yield
        finally:
            over.set()

    def abort(self, push: str, deadline: Deadline) -> None:
        """Have all forget a push. Best effort: an engine that cannot be reached drops it by its own deadline."""
        until = _moment(deadline)
        self.try_all(lambda client: client.abort(push, until, self.owner))

    def release(self, addresses: Mapping[str, str], deadline: Deadline) -> None:
        """Have all forget this sender, which each knows by the address of its URL. Best effort, as `abort`."""
        told, until = {url: address for url, address in addresses.items() if address}, _moment(deadline)
        self.try_all(lambda client: client.release(told[client.url], self.owner, until) if client.url in told else None)

    def all(self, call: Callable[[EngineClient], _T]) -> list[_T]:
        """Call every engine at once; raises the failures of all as one error."""
        outcome = self.try_all(call)
        return self._succeeded(outcome, self.untouched())

    def _succeeded(self, outcome: list[_T | WeightSyncError], others: Mapping[str, Weights]) -> list[_T]:
        """What all replied. Raises the failures as one error; ``others`` is what is served where there was none."""
        failed = {
            client.url: reply
            for client, reply in zip(self._clients, outcome, strict=True)
            if isinstance(reply, WeightSyncError)
        }
        if failed:
            raise joined(failed, others)
        return [reply for reply in outcome if not isinstance(reply, WeightSyncError)]

    def try_all(self, call: Callable[[EngineClient], _T]) -> list[_T | WeightSyncError]:
        """Call every engine at once; a failure takes the place of the result."""
        return list(self._threads.map(lambda client: _caught(lambda: call(client)), self._clients))

    def close(self) -> None:
        """End threads and connections; idempotent."""
        for client in self._clients:
            client.close()
        # Whatever is still being waited for has lost its connection: nobody needs to wait for that, too.
        self._threads.shutdown(wait=False)


def _moment(deadline: Deadline) -> Deadline:
    """For telling engines that something is over: as long as that takes, though `_SETTLED_S` past the deadline."""
    return Deadline(max(_LEAST_S, min(_ABORT_S, deadline.extended(_SETTLED_S).left())))


def _caught(call: Callable[[], _T]) -> _T | WeightSyncError:
    try:
        return call()
    except WeightSyncError as error:
        return error
