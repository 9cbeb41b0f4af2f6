"""Trainer-side driver: prepare every engine, then commit every engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar, get_args

import msgspec
import torch
from tqdm import tqdm

from weightsync import security, staging, wire
from weightsync.client import EngineClient
from weightsync.errors import SourceError, UnsupportedOption, Weights, WeightSyncError
from weightsync.layout import ALIGN_BYTES, Layout, align
from weightsync.sources import Source, open_source
from weightsync.sources.module import ModuleSource
from weightsync.transports.base import Deadline, Peer, Progress
from weightsync.transports.ipc_zmq import TrainerIpcZmq

Transport = Literal["auto", "ipc_zmq"]

#: Where less than this share of the free memory holds the whole model, the arena does: it then is the stage.
_HOLD_SHARE: Final = 0.8
#: Elsewhere a bucket takes at most one part in so many, for the ranks need room for a stage.
_BUCKET_SHARE: Final = 32
_MIN_BUCKET_BYTES: Final = 16 << 20
#: How long the engines are given to forget a failed push, or a sender that closes.
_ABORT_S: Final = 1.5

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineResult:
    """One engine's part of a push. ``pause_s``: how long it did not generate; ``seconds``: the steps of its commit."""

    pause_s: float
    seconds: dict[str, float]


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    ``nbytes`` counts the tensors, without padding. ``seconds``: ``prepare`` (the engines check the manifest),
    ``transfer`` (the bytes travel while the engines serve; of it ``gather`` is packing on the trainer), ``commit``
    (pause to resume, slowest engine) and ``total``.
    """

    version: str
    nbytes: int
    seconds: dict[str, float]
    engines: dict[str, EngineResult]
    transport: str


@dataclass
class _Engine:
    client: EngineClient
    hello: wire.OpenReply
    peers: set[Peer] = field(default_factory=set)


class Sender:
    """Pushes a model's weights into engines: ``Sender(urls).push(model)``.

    ``engines`` are base URLs of vLLM or SGLang servers with the plugin loaded. ``token`` defaults to
    ``$WEIGHTSYNC_TOKEN`` or this user's key file. ``timeout_s`` bounds a whole push. ``pause`` says what happens to
    requests in flight at commit. ``bucket_bytes`` is the size of each of the two buckets that hold bytes on their way;
    by default half the model where memory allows, so that nothing is copied twice. ``progress`` shows a bar.

    Building one contacts every engine and raises what would make a push fail: `EngineUnreachable`,
    `PluginNotLoaded`, `AuthenticationFailed`, `ProtocolMismatch`, `UnsupportedOption`. Not for use by several threads.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        transport: Transport = "auto",
        token: str | None = None,
        timeout_s: float = 300.0,
        pause: wire.PauseMode = "retract",
        bucket_bytes: int | None = None,
        progress: bool = False,
    ):
        if isinstance(engines, str) or not engines or len(set(engines)) != len(engines):
            raise UnsupportedOption("engines: give a list of one or more different URLs")
        if transport not in get_args(Transport):
            raise UnsupportedOption(f"transport {transport!r} is unknown; there is {', '.join(get_args(Transport))}")
        if pause not in get_args(wire.PauseMode):
            raise UnsupportedOption(f"pause {pause!r} is unknown; there is {', '.join(get_args(wire.PauseMode))}")
        if bucket_bytes is not None and bucket_bytes < ALIGN_BYTES:
            raise UnsupportedOption(f"bucket_bytes must be at least {ALIGN_BYTES}")
        self._timeout_s, self._pause, self._progress = timeout_s, pause, progress
        self._bucket_bytes = bucket_bytes
        key = security.sender_token() if token is None else token
        self._clients = [EngineClient(url, key) for url in engines]
        self._threads = ThreadPoolExecutor(len(self._clients), thread_name_prefix="weightsync-engine")
        self._end: TrainerIpcZmq | None = None
        self._source: Source | None = None
        self._layout: Layout | None = None
        self._chosen_bucket_bytes = 0
        self._closed = False
        try:
            self._engines = self._open(Deadline(timeout_s))
        except BaseException:
            self.close()
            raise

    def _open(self, deadline: Deadline) -> dict[str, _Engine]:
        hellos = self._all(lambda client: client.open(deadline))
        here, engines = staging.host_id(), {}
        for client, hello in zip(self._clients, hellos, strict=True):
            if reason := hello.pause_refused.get(self._pause):
                raise UnsupportedOption(f"{client.url} ({hello.engine}) cannot pause with {self._pause!r}: {reason}")
            if hello.host != here:
                raise UnsupportedOption(
                    f"{client.url} runs on another host (or in a container with its own /dev/shm): transport ipc_zmq "
                    "needs engine and trainer to share one; run them on one host, containers with --ipc=host"
                )
            peers = {Peer(client.url, rank.rank) for rank in hello.ranks}
            engines[client.url] = _Engine(client, hello, peers)
        return engines

    def push(self, model: object, *, version: str | None = None) -> PushResult:
        """Make every engine serve the weights of ``model``, labelled ``version`` (default: the next number).

        ``model`` is a `torch.nn.Module`, a mapping of names to tensors, a checkpoint folder, or an object in the shape
        of vLLM's ``WeightSource``. On return every rank of every engine serves exactly these weights. On error see
        `WeightSyncError.engines` for what each engine serves.
        """
        deadline, start = Deadline(self._timeout_s), time.perf_counter()
        source = open_source(model, reuse=self._source)
        # Only a module's costs something to open; others might keep a whole gathered model alive until the next push.
        self._source = source if isinstance(source, ModuleSource) else None
        layout = self._layout_of(source)
        push, label = secrets.token_hex(8), self._next_version() if version is None else version
        seconds: dict[str, float] = {}
        try:
            end, bucket_bytes = self._provide_end(source, layout)
            with _timed(seconds, "prepare"):
                requests = {url: end.request(push, url, layout, bucket_bytes, deadline.left()) for url in self._engines}
                self._all(lambda client: client.prepare(requests[client.url], deadline))
            with _timed(seconds, "transfer"), _bar(layout.nbytes, self._progress) as progress:
                staging.synchronize(source.device)
                peers = set[Peer]().union(*(engine.peers for engine in self._engines.values()))
                seconds["gather"] = end.transfer(push, layout, source.tensors(), peers, deadline, progress)
        except BaseException as error:
            self._abort(push)
            if isinstance(error, WeightSyncError):
                error.engines = {url: error.engines.get(url, "unchanged") for url in self._engines}
                raise
            if isinstance(error, (RuntimeError, OSError, ValueError)):
                raise SourceError(
                    f"the weights could not be read or packed: {error}",
                    engines=dict.fromkeys(self._engines, "unchanged"),
                ) from error
            raise
        with _timed(seconds, "commit"):
            commits = self._commit(push, label, deadline)
        seconds["total"] = time.perf_counter() - start
        return PushResult(label, layout.payload_bytes, seconds, commits, "ipc_zmq")

    def status(self, *, digest: bool = False) -> dict[str, wire.StatusReply]:
        """What each engine serves, by URL; ``digest`` has every rank hash the weights it computes with."""
        deadline = Deadline(self._timeout_s)
        replies = self._all(lambda client: client.status(deadline, digest=digest))
        return {client.url: reply for client, reply in zip(self._clients, replies, strict=True)}

    def close(self) -> None:
        """Release memory, sockets and connections; idempotent."""
        if self._end is not None and not self._closed:
            address = self._end.address
            self._try_all(lambda client: client.release(address, Deadline(_ABORT_S)))
            self._end.close()
        self._closed = True
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layout_of(self, source: Source) -> Layout:
        if self._layout is None or tuple(entry.spec for entry in self._layout.entries) != source.specs:
            self._layout = Layout(source.specs)
            self._chosen_bucket_bytes = 0
        return self._layout

    def _provide_end(self, source: Source, layout: Layout) -> tuple[TrainerIpcZmq, int]:
        """The trainer end of the transport, and the size of a bucket; both stay while the model does."""
        ranks = [rank for engine in self._engines.values() for rank in engine.hello.ranks]
        if self._end is None:
            device = source.device
            colocated = device.type == "cuda" and {r.device_uuid for r in ranks} == {staging.device_uuid(device)}
            self._end = TrainerIpcZmq(device if colocated else torch.device("cpu"))
        if not self._chosen_bucket_bytes:
            beside = [rank.free_bytes for rank in ranks if rank.device == self._end.device.type]
            free = min([self._end.free_bytes(), *beside])
            self._chosen_bucket_bytes = choose_bucket_bytes(layout.nbytes, free, self._bucket_bytes)
        return self._end, self._chosen_bucket_bytes

    def _next_version(self) -> str:
        versions = [engine.hello.version for engine in self._engines.values()]
        return str(max((int(v) for v in versions if v.isdecimal()), default=0) + 1)

    def _commit(self, push: str, version: str, deadline: Deadline) -> dict[str, EngineResult]:
        request = wire.CommitRequest(push=push, version=version, pause=self._pause, timeout_s=deadline.left())
        outcome = self._try_all(lambda client: client.commit(request, deadline))
        results: dict[str, EngineResult] = {}
        failed: dict[str, WeightSyncError] = {}
        for client, reply in zip(self._clients, outcome, strict=True):
            if isinstance(reply, WeightSyncError):
                failed[client.url] = reply
                continue
            results[client.url] = EngineResult(reply.pause_s, reply.seconds)
            engine = self._engines[client.url]
            engine.hello = msgspec.structs.replace(engine.hello, version=version)
        if failed:
            self._abort(push)
            raise _joined(failed, dict.fromkeys(results, "committed"))
        return results

    def _abort(self, push: str) -> None:
        # Best effort: an engine that cannot be reached drops the push by its own deadline.
        self._try_all(lambda client: client.abort(push, Deadline(_ABORT_S)))

    def _all(self, call: Callable[[EngineClient], _T]) -> list[_T]:
        """Call every engine at once; raises the failures of all as one error."""
        outcome = self._try_all(call)
        failed = {
            client.url: reply
            for client, reply in zip(self._clients, outcome, strict=True)
            if isinstance(reply, WeightSyncError)
        }
        if failed:
            raise _joined(failed, {client.url: "unchanged" for client in self._clients})
        return [reply for reply in outcome if not isinstance(reply, WeightSyncError)]

    def _try_all(self, call: Callable[[EngineClient], _T]) -> list[_T | WeightSyncError]:
        def run(client: EngineClient) -> _T | WeightSyncError:
            try:
                return call(client)
            except WeightSyncError as error:
                return error

        return list(self._threads.map(run, self._clients))


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start


@contextmanager
def _bar(nbytes: int, shown: bool) -> Iterator[Progress | None]:
    if not shown:
        yield None
        return
    with tqdm(total=nbytes, unit="B", unit_scale=True, desc="push") as bar:
        yield lambda sent: bar.update(sent - bar.n) and None


def choose_bucket_bytes(stream_bytes: int, free_bytes: int, asked: int | None) -> int:
    """Size of each of the two buckets, a multiple of `ALIGN_BYTES`.

    ``asked`` if given, else half the stream where ``free_bytes``, the minimum over the trainer and the ranks beside
    its arena, has room for all of it, else a small part of what is free.
    """
    if asked is not None:
        return align(asked)
    half = max(ALIGN_BYTES, align(-(-stream_bytes // 2)))
    if 2 * half <= free_bytes * _HOLD_SHARE:
        return half
    return min(half, max(_MIN_BUCKET_BYTES, align(free_bytes // _BUCKET_SHARE)))


def _joined(failed: dict[str, WeightSyncError], others: dict[str, Weights]) -> WeightSyncError:
    """One error for what went wrong at several engines, with the state of each."""
    states = dict(others)
    states.update({url: error.weights for url, error in failed.items()})
    first = next(iter(failed.values()))
    joined = type(first)("; ".join(str(error) for error in failed.values()), engines=states)
    joined.__cause__ = first
    return joined
