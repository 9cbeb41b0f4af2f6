"""Trainer-side driver: prepare every engine, then commit every engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import torch
from tqdm import tqdm

from weightsync import digest, security, staging, wire
from weightsync.carrier import Carrier, Sent
from weightsync.errors import (
    EngineRestarted,
    LeaseHeld,
    PushTimeout,
    SourceError,
    TransferFailed,
    UnsupportedOption,
    Weights,
    WeightSyncError,
)
from weightsync.fleet import Engine, Fleet
from weightsync.layout import ALIGN_BYTES, Layout
from weightsync.room import Choice, Staging, choose
from weightsync.session import PUSH, Machine
from weightsync.sources import Source, open_source
from weightsync.sources.module import ModuleSource
from weightsync.transports.base import Deadline, Progress

Transport = Literal["auto", "ipc_zmq", "nccl", "nixl"]


@dataclass(frozen=True)
class EngineResult:
    """One engine's part of a push. ``seconds``: the steps of its commit.

    ``pause_s``: how long new requests waited; with ``pause="wait"`` that includes what those in flight took to finish.

    ``noticed`` says what the sender found out about it: that it was restarted, or served another version than expected.
    ``transport`` is how the bytes got there, and ``transport_reason`` why so.
    """

    pause_s: float
    seconds: dict[str, float]
    transport: str
    transport_reason: str
    noticed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    ``nbytes`` counts the tensors, without padding. ``seconds``: ``prepare`` (the engines check the manifest),
    ``transfer`` (the bytes travel while the engines serve; of it ``gather`` is packing on the trainer, ``digest`` its
    hashing, ``verify`` the hashing of the slowest rank), ``commit`` (pause to resume, slowest engine) and ``total``.
    ``verify`` is how it was checked, ``staging`` where the bytes waited, and ``staging_reason`` why there.
    """

    version: str
    nbytes: int
    seconds: dict[str, float]
    engines: dict[str, EngineResult]
    verify: wire.Verify
    staging: Staging
    staging_reason: str


class Sender:
    """Pushes a model's weights into engines: ``Sender(urls).push(model)``.

    ``engines`` are base URLs of vLLM or SGLang servers with the plugin loaded. ``transport``: ``"ipc_zmq"`` through
    memory that engines on this host share, ``"nccl"`` by broadcast in a process group (gloo where there are no GPUs),
    ``"nixl"`` by one-sided reads, ``"auto"`` picks for each engine and says why in the result. ``token`` defaults to
    ``$WEIGHTSYNC_TOKEN`` or this user's key file. ``timeout_s`` bounds a whole push. ``pause`` says what happens to
    requests in flight at commit. ``staging``: ``"full"`` holds a whole version before any engine stops, ``"none"``
    streams the bytes in while the engines are stopped (a failure then leaves them dirty), ``"auto"`` picks. ``verify``:
    ``"digest"`` compares every tensor in every rank's stage with what the trainer held, ``"deep"`` also what the engine
    then computes with, ``"off"`` nothing. ``keep_previous`` has the engines keep the version before, for `rollback` and
    for going back when a commit fails; that takes the memory of the weights twice. ``bucket_bytes`` is the size of each
    of two buckets that hold bytes on their way; by default there are as many as the model fills where memory allows, so
    that on one host nothing is copied twice. ``progress`` shows a bar.

    Building one contacts every engine and raises what would make a push fail: `EngineUnreachable`,
    `PluginNotLoaded`, `AuthenticationFailed`, `ProtocolMismatch`, `UnsupportedOption`. The first push takes the
    engines' lease, with ``"nccl"`` and ``"nixl"`` building one does, and `close` gives it back. Not for use by several
    threads.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        transport: Transport = "auto",
        token: str | None = None,
        timeout_s: float = 300.0,
        pause: wire.PauseMode = "retract",
        staging: Staging = "full",
        verify: wire.Verify = "digest",
        keep_previous: bool = False,
        bucket_bytes: int | None = None,
        progress: bool = False,
    ):
        if isinstance(engines, str) or not engines or len(set(engines)) != len(engines):
            raise UnsupportedOption("engines: give a list of one or more different URLs")
        for name, value, known in (
            ("transport", transport, get_args(Transport)),
            ("pause", pause, get_args(wire.PauseMode)),
            ("staging", staging, get_args(Staging)),
            ("verify", verify, get_args(wire.Verify)),
        ):
            if value not in known:
                raise UnsupportedOption(f"{name} {value!r} is unknown; there is {', '.join(known)}")
        if bucket_bytes is not None and bucket_bytes < ALIGN_BYTES:
            raise UnsupportedOption(f"bucket_bytes must be at least {ALIGN_BYTES}")
        if staging == "none" and (keep_previous or verify == "deep"):
            raise UnsupportedOption('staging "none" holds no version, which keep_previous and verify "deep" need')
        if not 0 < timeout_s <= wire.MAX_TIMEOUT_S:
            raise UnsupportedOption(f"timeout_s must be above 0 and at most {wire.MAX_TIMEOUT_S:g}")
        self._timeout_s, self._pause, self._progress = timeout_s, pause, progress
        self._staging, self._verify, self._keep, self._bucket_bytes = staging, verify, keep_previous, bucket_bytes
        key = security.sender_token() if token is None else token
        self._machine: Machine[str] = Machine(PUSH, "idle", "this sender")
        self._carrier: Carrier | None = None
        self._source: Source | None = None
        self._layout: Layout | None = None
        self._chosen: Choice | None = None
        deadline = Deadline(timeout_s)
        self._fleet = Fleet(engines, key, pause, transport, deadline)
        if self._fleet.peers.keys() != {"ipc_zmq"}:
            try:
                # Groups are made and connections warmed up now, not in the first push.
                self._introduce(self._provide_carrier(None), deadline)
            except BaseException:
                self.close()
                raise

    def push(self, model: object, *, version: str | None = None) -> PushResult:
        """Make every engine serve the weights of ``model``, labelled ``version`` (default: the next number).

        ``model`` is a `torch.nn.Module`, a mapping of names to tensors, a checkpoint folder, or an object in the shape
        of vLLM's ``WeightSource``. On return every rank of every engine serves exactly these weights. On error see
        `WeightSyncError.engines` for what each engine serves.
        """
        self._machine.check("push")
        deadline = Deadline(self._timeout_s)
        try:
            return self._push(model, version, deadline)
        except EngineRestarted:
            self._fleet.reopen(deadline)
            return self._push(model, version, deadline)

    def _push(self, model: object, version: str | None, deadline: Deadline) -> PushResult:
        start = time.perf_counter()
        source = open_source(model, reuse=self._source)
        # Only a module's costs something to open; others might keep a whole gathered model alive until the next push.
        self._source = source if isinstance(source, ModuleSource) else None
        layout = self._layout_of(source)
        label = self._next_version() if version is None else version
        carrier = self._provide_carrier(source)
        choice = self._choose(carrier, layout)
        plan = self._plan(carrier, source, layout, choice, deadline)
        seconds: dict[str, float] = {}
        self._machine.move("push")
        try:
            with self._fleet.renewed(plan.push, deadline):
                self._prepare(carrier, plan, deadline, seconds)
                if choice.staging == "none":
                    sent, commits = self._stream(carrier, source, layout, plan.push, label, deadline, seconds)
                else:
                    sent = self._transfer(carrier, source, layout, seconds)
            if choice.staging == "full":
                commits = self._commit(self._request(plan.push, label, deadline), deadline, seconds)
        except BaseException as error:
            self._failed(plan.push, error)
            self._tell(error)
            raise
        self._machine.move("committed")
        carrier.served()
        seconds.update(gather=sent.gather_s, digest=sent.digest_s, verify=sent.verify_s)
        seconds["total"] = time.perf_counter() - start
        return PushResult(
            label, layout.payload_bytes, seconds, self._results(commits), self._verify, choice.staging, choice.reason
        )

    def _results(self, commits: dict[str, wire.CommitReply]) -> dict[str, EngineResult]:
        results = {}
        for url, reply in commits.items():
            engine = self._fleet.engines[url]
            noticed, engine.noticed = tuple(engine.noticed), []
            results[url] = EngineResult(reply.pause_s, reply.seconds, engine.transport, engine.reason, noticed)
        return results

    def rollback(self) -> PushResult:
        """Serve the version before again, which the engines kept (``keep_previous=True``). Raises as `push`.

        Once more brings the newer one back.
        """
        self._machine.check("rollback")
        deadline, start = Deadline(self._timeout_s), time.perf_counter()
        kept = {rank.previous for status in self.status().values() for rank in status.ranks}
        if len(kept) != 1 or "" in kept:
            raise TransferFailed(
                "there is no version to go back to that every engine keeps; pass keep_previous=True and push twice",
                engines=dict.fromkeys(self._fleet.engines, "unchanged"),
            )
        request = msgspec.structs.replace(self._request(secrets.token_hex(8), kept.pop(), deadline), rollback=True)
        seconds: dict[str, float] = {}
        self._machine.move("rollback")
        try:
            commits = self._commit(request, deadline, seconds)
        except BaseException as error:
            self._failed(request.push, error)
            self._tell(error)
            raise
        self._machine.move("committed")
        if self._carrier is not None:
            self._carrier.served()
        seconds["total"] = time.perf_counter() - start
        return PushResult(request.version, 0, seconds, self._results(commits), "off", "full", "the engines kept it")

    def status(self, *, digest: bool = False) -> dict[str, wire.StatusReply]:
        """What each engine serves, by URL; ``digest`` has every rank hash the weights it computes with."""
        deadline = Deadline(self._timeout_s)
        replies = self._fleet.all(lambda client: client.status(deadline, digest=digest))
        return dict(zip(self._fleet.engines, replies, strict=True))

    def close(self) -> None:
        """Give the lease back; release memory, sockets and connections; idempotent."""
        if not self._machine.allows("close"):
            return
        self._machine.move("close")
        if self._carrier is not None:
            self._release(self._carrier)
            self._carrier.close()
        self._fleet.close()

    def _release(self, carrier: Carrier) -> None:
        engines = self._fleet.engines
        self._fleet.release({url: carrier.address(url, engine.transport) for url, engine in engines.items()})

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layout_of(self, source: Source) -> Layout:
        if self._layout is None or tuple(entry.spec for entry in self._layout.entries) != source.specs:
            self._layout = Layout(source.specs)
            self._chosen = None
        return self._layout

    def _provide_carrier(self, source: Source | None) -> Carrier:
        """What moves the bytes; it stays while the sender does, or until a push fails.

        Its arenas lie on the trainer's GPU where all that read them can, otherwise in the host's memory.
        """
        if self._carrier is None:
            ranks, remote = self._fleet.ranks, self._fleet.peers.keys() - {"ipc_zmq"}
            device = torch.device("cpu")
            if all(rank.device == "cuda" for rank in ranks) and torch.cuda.is_available():
                gpu = torch.device("cuda", torch.cuda.current_device())
                gpu = source.device if source is not None and source.device.type == "cuda" else gpu
                shared = {rank.device_uuid for rank in ranks} == {staging.device_uuid(gpu)}
                if remote or (shared and source is not None and source.device == gpu):
                    device = gpu
            self._carrier, self._chosen = Carrier(device), None
        return self._carrier

    def _introduce(self, carrier: Carrier, deadline: Deadline) -> None:
        carrier.introduce(self._fleet.hellos(), lambda asked: self._fleet.join(asked, deadline), deadline)

    def _choose(self, carrier: Carrier, layout: Layout) -> Choice:
        """How the bytes travel; it stays while the model does."""
        if self._chosen is None:
            ranks, here = self._fleet.ranks, carrier.device.type
            free = min([carrier.free_bytes(), *(rank.free_bytes for rank in ranks if rank.device == here)])
            stages = {device: [r for r in ranks if r.device == device] for device in {r.device for r in ranks}}
            # Ranks on a CPU share its memory, ranks on accelerators have one each.
            rooms = [
                min(rank.free_bytes for rank in those) // (len(those) if device == "cpu" else 1)
                for device, those in stages.items()
            ]
            self._chosen = choose(layout.nbytes, free, min(rooms), self._bucket_bytes, self._staging, self._keep)
        return self._chosen

    def _plan(
        self, carrier: Carrier, source: Source, layout: Layout, choice: Choice, deadline: Deadline
    ) -> wire.UpdateRequest:
        """What every engine is told of a push; the transport adds where to come for the bytes."""
        devices = [source.device, carrier.device, *(torch.device(rank.device) for rank in self._fleet.ranks)]
        return wire.UpdateRequest(
            push=secrets.token_hex(8),
            address="",
            secret="",
            bucket_bytes=choice.bucket_bytes,
            timeout_s=deadline.left(),
            manifest=tuple(entry.spec for entry in layout.entries),
            owner=self._fleet.owner,
            holder=self._fleet.holder,
            verify=self._verify,
            digest="" if self._verify == "off" else digest.algorithm_for(*devices),
            keep=self._keep,
            stream=choice.staging == "none",
            slots=choice.slots,
        )

    def _prepare(
        self, carrier: Carrier, plan: wire.UpdateRequest, deadline: Deadline, seconds: dict[str, float]
    ) -> None:
        carrier.provide(plan)
        self._introduce(carrier, deadline)
        # Here, and not in the threads that ask the engines: a socket is not for several.
        requests = {url: carrier.request(url, engine.transport) for url, engine in self._fleet.engines.items()}

        def make(engine: Engine) -> wire.UpdateRequest:
            return msgspec.structs.replace(
                requests[engine.client.url], instance=engine.hello.instance, timeout_s=max(deadline.left(), 0.1)
            )

        with _timed(seconds, "prepare"):
            self._fleet.prepare(make, deadline)
            carrier.meet(self._fleet.peers, deadline)

    def _transfer(self, carrier: Carrier, source: Source, layout: Layout, seconds: dict[str, float]) -> Sent:
        self._machine.move("accepted")
        with _timed(seconds, "transfer"), _bar(layout.nbytes, self._progress) as progress:
            staging.synchronize(source.device)
            sent = carrier.send(source.tensors(), progress)
        self._machine.move("staged")
        return sent

    def _stream(
        self, carrier: Carrier, source: Source, layout: Layout, push: str, label: str, deadline: Deadline,
        seconds: dict[str, float],
    ) -> tuple[Sent, dict[str, wire.CommitReply]]:  # fmt: skip
        """The bytes travel while the engines are stopped: memory for no stage is needed."""
        self._machine.move("stream")
        with _timed(seconds, "commit"):
            commits = self._fleet.commit(self._request(push, label, deadline), deadline)
            try:
                with _timed(seconds, "transfer"), _bar(layout.nbytes, self._progress) as progress:
                    staging.synchronize(source.device)
                    sent = carrier.send(source.tensors(), progress)
            except BaseException as error:
                carrier.call_off(error)
                # What became of the engines is theirs to say.
                replies = self._fleet.outcome(commits, label, deadline)
                raise TransferFailed(
                    f"every engine has committed, but sending did not end well: {error}",
                    engines=dict.fromkeys(replies, "committed"),
                ) from error
            return sent, self._fleet.outcome(commits, label, deadline)

    def _request(self, push: str, label: str, deadline: Deadline) -> wire.CommitRequest:
        return wire.CommitRequest(
            push=push, version=label, pause=self._pause, timeout_s=max(deadline.left(), 0.1), owner=self._fleet.owner
        )

    def _commit(
        self, request: wire.CommitRequest, deadline: Deadline, seconds: dict[str, float]
    ) -> dict[str, wire.CommitReply]:
        deadline.check("the engines to be asked to commit")
        with _timed(seconds, "commit"):
            return self._fleet.outcome(self._fleet.commit(request, deadline), request.version, deadline)

    def _failed(self, push: str, error: BaseException) -> None:
        self._machine.move({"preparing": "refused", "transferring": "lost"}.get(self._machine.state, "failed"))
        carrier = self._carrier
        try:
            if carrier is not None:
                carrier.call_off(error)
            # An engine that is still in its commit could not be told in time, and ends by itself.
            if not (isinstance(error, PushTimeout) and error.weights == "unknown"):
                self._fleet.abort(push)
            if carrier is not None and isinstance(error, LeaseHeld):
                # Two trainers that each hold some of the engines would keep each other from the rest.
                self._release(carrier)
            if carrier is not None and isinstance(error, (PushTimeout, TransferFailed)):
                # Whatever broke, be it a socket whose file somebody removed, the next push begins with new ones.
                carrier.close()
                self._carrier = self._chosen = None
        finally:
            self._machine.move("aborted")

    def _tell(self, error: BaseException) -> None:
        """Say in the error what every engine serves after it; raises `SourceError` for what the weights raised."""
        urls = self._fleet.engines
        untold: dict[str, Weights] = {url: "dirty" if engine.stopped else "unchanged" for url, engine in urls.items()}
        if isinstance(error, WeightSyncError):
            told = {url: untold[url] if state == "unchanged" else state for url, state in error.engines.items()}
            error.settle({**untold, **told})
        elif isinstance(error, (RuntimeError, OSError, ValueError)):
            raise SourceError(f"the weights could not be read or packed: {error}", engines=untold) from error

    def _next_version(self) -> str:
        versions = [engine.version for engine in self._fleet.engines.values()]
        return str(max((int(v) for v in versions if v.isdecimal()), default=0) + 1)


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
