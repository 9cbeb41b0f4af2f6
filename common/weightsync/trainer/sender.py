"""Trainer-side driver: prepare every engine, then commit every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar, get_args

import torch

from weightsync.deadline import Deadline
from weightsync.errors import EngineRestarted, TransferFailed, UnsupportedOption, Weights, WeightSyncError, joined
from weightsync.memory import arenas
from weightsync.protocol import auth, http
from weightsync.protocol.names import check_label, plain_url
from weightsync.protocol.states import PUSH, Machine
from weightsync.sources import Source, open_source
from weightsync.sources.mapping import MappingSource, Seen
from weightsync.sources.module import ModuleSource
from weightsync.tensors.layout import ALIGN_BYTES
from weightsync.trainer import buckets
from weightsync.trainer.buckets import Staging
from weightsync.trainer.engines import Fleet
from weightsync.trainer.join_server import Reception
from weightsync.trainer.push import Delivery, introduce, release
from weightsync.trainer.push_plan import Options, Preparation
from weightsync.trainer.ranks.coordinator import crew
from weightsync.trainer.results import EngineResult, PushResult
from weightsync.trainer.transfer import Carrier, Sent
from weightsync.trainer.turns import Turns
from weightsync.transports.base import Progress
from weightsync.transports.control.sockets import own_address

Transport = Literal["auto", "ipc_zmq", "nccl", "nixl"]
_T = TypeVar("_T")

#: A call that fails by its deadline has ended by then.
_OTHERS_S: Final = 2.0
#: What takes the sender to be where this move of `states.PUSH` may follow.
_MOVES: Final = {
    "push": "push", "add_engine": "push", "remove_engine": "push", "catch_up": "push", "rollback": "rollback",
}  # fmt: skip


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
    that on one host nothing is copied twice. ``progress`` shows a bar. ``address``, a number or a name, is that of this
    host at which engines elsewhere find the trainer; by default the one from which the trainer reaches each.

    Building one contacts every engine and raises what would make a push fail: `EngineUnreachable`,
    `PluginNotLoaded`, `AuthenticationFailed`, `ProtocolMismatch`, `UnsupportedOption`. The first push takes the
    engines' lease, with ``"nccl"`` and ``"nixl"`` building one does, and `close` gives it back. Not for use by several
    threads.

    In a trainer of several processes (an initialised `torch.distributed` group of more than one) every rank builds one,
    with the same arguments, and every rank makes each call of it; all return the same, or raise the same. Rank 0 alone
    talks to the engines. Each rank sends what it holds: nothing is gathered, and no collective is started. Of plain
    tensors that several ranks hold, as with DistributedDataParallel, the lowest sends. `close` waits for nobody. The
    ranks must be on one host, whose shared memory holds the whole model.
    """

    def __init__(
        self,
        engines: Sequence[str],
        *,
        transport: Transport = "auto",
        token: str | None = None,
        timeout_s: float = 300.0,
        pause: http.PauseMode = "retract",
        staging: Staging = "full",
        verify: http.Verify = "digest",
        keep_previous: bool = False,
        bucket_bytes: int | None = None,
        progress: bool = False,
        address: str | None = None,
    ):
        if isinstance(engines, str) or not engines:
            raise UnsupportedOption("engines: give a list of one or more different URLs")
        urls = [plain_url(url) for url in engines]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise UnsupportedOption(f"engines: give different URLs; {', '.join(twice)} is there more than once")
        for name, value, known in (
            ("transport", transport, get_args(Transport)),
            ("pause", pause, get_args(http.PauseMode)),
            ("staging", staging, get_args(Staging)),
            ("verify", verify, get_args(http.Verify)),
        ):
            if value not in known:
                raise UnsupportedOption(f"{name} {value!r} is unknown; there is {', '.join(known)}")
        if bucket_bytes is not None and bucket_bytes < ALIGN_BYTES:
            raise UnsupportedOption(f"bucket_bytes must be at least {ALIGN_BYTES}")
        if staging == "none" and (keep_previous or verify == "deep"):
            raise UnsupportedOption('staging "none" holds no version, which keep_previous and verify "deep" need')
        if not 0 < timeout_s <= http.MAX_TIMEOUT_S:
            raise UnsupportedOption(f"timeout_s must be above 0 and at most {http.MAX_TIMEOUT_S:g}")
        self._timeout_s, self._pause, self._progress = timeout_s, pause, progress
        self._options = Options(timeout_s, staging, verify, keep_previous, bucket_bytes)
        self._urls, self._transport = urls, transport
        self._address = "" if address is None else own_address(address)
        self._machine: Machine[str] = Machine(PUSH, "idle", "this sender")
        self._carrier: Carrier | None = None
        self._source: Source | Seen | None = None
        #: Label of what was pushed last.
        self._served = ""
        self._crew = crew()
        #: What asks for engines to take part waits for a push to end, and the other way round.
        self._turns = Turns()
        self._reception: Reception | None = None
        try:
            self._together("build a Sender", type(None), lambda _, deadline: self._open(token, deadline))
        except BaseException:
            self.close()
            raise

    def _open(self, token: str | None, deadline: Deadline) -> None:
        key = auth.sender_token() if token is None else token
        #: Of the only rank, or of rank 0.
        self._fleet = Fleet(self._urls, key, self._pause, self._transport, deadline)
        self._preparation = Preparation(self._fleet, self._options, self._crew)
        if self._fleet.peers.keys() != {"ipc_zmq"}:
            # Groups are made and connections warmed up now, not in the first push.
            introduce(self._provide_carrier(None), self._fleet, deadline)

    def _together(
        self, what: str, kind: Any, act: Callable[[Source | None, Deadline], _T],
        offer: Callable[[], Source] | None = None,
    ) -> _T:  # fmt: skip
        """``act``, which returns a ``kind``: here, or at rank 0 of a trainer of several processes: see `Crew.run`."""
        deadline = Deadline(self._timeout_s)
        with self._turns.take(what, deadline):
            self._recover()
            if what in _MOVES:
                self._machine.check(_MOVES[what])
            if self._crew is None:
                with self._told(deadline):
                    return act(offer() if offer is not None else None, deadline)
            return self._crew.run(what, kind, deadline, act, offer, self._look)

    @contextmanager
    def _told(self, deadline: Deadline) -> Iterator[None]:
        """Inside, an error that knows nothing of engines says what they serve: nobody has asked anything of them."""
        try:
            yield
        except WeightSyncError as error:
            if not error.engines and error.weights == "unchanged":
                error.settle(self._look(deadline))
            raise

    def _look(self, deadline: Deadline) -> dict[str, Weights]:
        fleet: Fleet | None = getattr(self, "_fleet", None)
        return dict.fromkeys(self._urls, "unchanged") if fleet is None else fleet.look(deadline)

    def push(self, model: object, *, version: str | None = None) -> PushResult:
        """Make every engine serve the weights of ``model``, labelled ``version`` (default: the next number).

        ``model`` is a `torch.nn.Module`, a mapping of names to tensors, a checkpoint folder, or an object in the shape
        of vLLM's ``WeightSource``. ``version`` is a string of 1 to 1024 printable characters. On return every rank of
        every engine serves exactly these weights. On error see `WeightSyncError.engines` for what each engine serves.
        """
        start = time.perf_counter()

        def act(source: Source | None, deadline: Deadline) -> PushResult:
            assert source is not None, "a push has a source"
            try:
                return self._push(source, version, deadline, start)
            except EngineRestarted as error:
                if error.weights == "unknown":
                    raise
                self._fleet.reopen(deadline)
                return self._push(source, version, deadline, start)

        def offer() -> Source:
            if version is not None:  # before any engine is asked for anything
                check_label(version)
            return self._source_of(model)

        return self._together("push", PushResult, act, offer)

    def _source_of(self, model: object) -> Source:
        source = open_source(model, reuse=self._source)
        # Others than a module's might keep a whole gathered model alive until the next push.
        self._source = source if isinstance(source, ModuleSource) else None
        if isinstance(source, MappingSource):
            self._source = source.seen
        return source

    def _push(self, source: Source, version: str | None, deadline: Deadline, start: float) -> PushResult:
        carrier, of = self._provide_carrier(source), self._crew
        push = self._preparation.of(source, carrier)
        label = self._next_version() if version is None else version

        def send(progress: Progress | None) -> Sent:
            if push.shared and of is not None:
                return carrier.send_filled(lambda *where: of.fill(source, deadline, *where), progress)
            arenas.synchronize(source.device)
            return carrier.send(source.tensors() if push.lent is None else push.lent, progress, push.mark)

        delivery = self._delivery(carrier, deadline)
        sent, commits = delivery.push(push.request, label, send, push.layout.nbytes, push.lent)
        self._served = label
        seconds = {**delivery.seconds, "gather": sent.gather_s, "digest": sent.digest_s, "verify": sent.verify_s}
        seconds["total"] = time.perf_counter() - start
        return PushResult(
            label, push.layout.payload_bytes, seconds, self._results(commits), push.request.verify, push.choice.staging,
            push.choice.reason,
        )  # fmt: skip

    def _delivery(self, carrier: Carrier | None, deadline: Deadline) -> Delivery:
        return Delivery(self._fleet, carrier, self._machine, deadline, pause=self._pause, progress=self._progress)

    def _results(self, commits: dict[str, http.CommitReply]) -> dict[str, EngineResult]:
        results = {}
        for url, reply in commits.items():
            engine = self._fleet.engines[url]
            noticed, engine.noticed = tuple(engine.noticed), []
            reason = "; ".join(filter(None, (engine.reason, engine.interfaces and f"over {engine.interfaces}")))
            results[url] = EngineResult(reply.pause_s, reply.seconds, engine.transport, reason, noticed)
        return results

    def add_engine(self, url: str) -> EngineResult | None:
        """Have another engine take part. Raises as building a sender, and as `push`.

        It is brought to the version that the others serve, at once and from the memory that still holds it; the others
        are left alone. Where that memory does not hold a whole version it returns None, and the next push is the first.
        """

        def act(_: Source | None, deadline: Deadline) -> EngineResult | None:
            known = self._fleet.add(url, deadline)
            self._preparation.choose_again()  # a rank with less memory may be among them
            try:
                return self._catch_up(known, deadline)
            except BaseException:
                self._release([known], deadline)
                self._fleet.remove(known)
                raise

        return self._together("add_engine", EngineResult | None, act)

    def remove_engine(self, url: str) -> None:
        """Have an engine take no part any more; it keeps what it serves, and its lease is given back."""

        def act(_: Source | None, deadline: Deadline) -> None:
            known = self._fleet.removable(url)
            self._release([known], deadline)
            self._fleet.remove(known)

        self._together("remove_engine", type(None), act)

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Answer, from now on, those who ask by ``weightsync join`` for an engine to take part; where to ask.

        A new engine, or one that was restarted, is then brought to the served version as by `add_engine` and
        `catch_up`, between two pushes and without an act of the trainer. Raises `UnsupportedOption`.
        """
        if self._crew is not None or self._reception is not None:
            raise UnsupportedOption("a sender listens once, and not in a trainer of several processes")
        self._reception = Reception(host, port, self._fleet.has_key, self._admit)
        return self._reception.url

    def _admit(self, url: str) -> str:
        with self._turns.take("join", Deadline(self._timeout_s)):
            known = plain_url(url)
            if known in self._fleet.engines:
                self._bring_up(known)
            else:
                self.add_engine(known)
            version = self._fleet.engines[known].version
            return version if version == self._served else ""

    def catch_up(self) -> dict[str, EngineResult]:
        """Bring the engines that do not serve what was pushed last, having been restarted for one, to that version.

        The bytes come from the memory that still holds them; nothing of the model is needed. Where that does not hold a
        whole version nothing happens, and the next push reaches them. An engine that is gone, or fails, keeps none of
        the others: all that can be are brought up first. Raises as `push` for those that could not be.
        """
        return self._bring_up()

    def _bring_up(self, only: str = "") -> dict[str, EngineResult]:
        def act(_: Source | None, deadline: Deadline) -> dict[str, EngineResult]:
            results: dict[str, EngineResult] = {}
            behind, failed = self._fleet.behind(self._served, deadline)
            for url in behind:
                try:
                    if only in ("", url) and (result := self._catch_up(url, deadline)) is not None:
                        results[url] = result
                except WeightSyncError as error:
                    failed[url] = error
            if told := {url: error for url, error in failed.items() if only in ("", url)}:
                raise joined(told, {**self._fleet.untouched(), **dict.fromkeys(results, "committed")})
            return results

        return self._together("catch_up", dict[str, EngineResult], act)

    def _catch_up(self, url: str, deadline: Deadline) -> EngineResult | None:
        carrier = self._carrier
        plan = carrier.again() if carrier is not None else None
        if carrier is None or plan is None:
            return None
        with self._fleet.only(url):
            _, commits = self._delivery(carrier, deadline).push(plan, self._served, carrier.resend, 0)
            return self._results(commits)[url]

    def rollback(self) -> PushResult:
        """Serve the version before again, which the engines kept (``keep_previous=True``). Raises as `push`.

        Once more brings the newer one back.
        """
        return self._together("rollback", PushResult, lambda _, deadline: self._rollback(deadline))

    def _rollback(self, deadline: Deadline) -> PushResult:
        start = time.perf_counter()
        kept = {rank.previous for status in self._status(deadline).values() for rank in status.ranks}
        if len(kept) != 1 or "" in kept:
            raise TransferFailed(
                "there is no version to go back to that every engine keeps; pass keep_previous=True and push twice",
                engines=self._fleet.untouched(),
            )
        delivery = self._delivery(self._carrier, deadline)
        (label,) = kept
        commits = delivery.rollback(label)
        self._served = label
        seconds = {**delivery.seconds, "total": time.perf_counter() - start}
        return PushResult(label, 0, seconds, self._results(commits), "off", "full", "the engines kept it")

    def status(self, *, digest: bool = False) -> dict[str, http.StatusReply]:
        """What each engine serves, by URL; ``digest`` has every rank hash the weights it computes with."""
        replies = dict[str, http.StatusReply]
        return self._together("status", replies, lambda _, deadline: self._status(deadline, digest=digest))

    def _status(self, deadline: Deadline, *, digest: bool = False) -> dict[str, http.StatusReply]:
        found = self._fleet.status(deadline, digest=digest)
        replies = {url: reply for url, reply in found.items() if not isinstance(reply, WeightSyncError)}
        if failed := {url: reply for url, reply in found.items() if isinstance(reply, WeightSyncError)}:
            raise joined(failed, self._fleet.untouched())
        return replies

    def close(self) -> None:
        """Give the lease back; release memory, sockets and connections; idempotent."""
        if self._reception is not None:
            self._reception.close()
            self._reception = None
        # Another thread's call ends by its own deadline.
        with self._turns.take("close", Deadline(self._timeout_s + _OTHERS_S)):
            self._close()

    def _recover(self) -> None:
        """After a call that was interrupted (Ctrl-C) even while it cleaned up: nothing that it used is used again."""
        if self._machine.allows("interrupted"):
            if self._carrier is not None:
                self._carrier.close()
            self._machine.move("interrupted")

    def _close(self) -> None:
        self._recover()
        if not self._machine.allows("close"):
            return
        self._machine.move("close")
        if hasattr(self, "_fleet"):
            self._release(self._fleet.engines, Deadline(self._timeout_s))
            if self._carrier is not None:
                self._carrier.close()
            self._fleet.close()
        if self._crew is not None:
            self._crew.close()

    def _release(self, urls: Iterable[str], deadline: Deadline) -> None:
        if self._carrier is not None:
            release(self._carrier, self._fleet, urls, deadline)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _provide_carrier(self, source: Source | None) -> Carrier:
        """What moves the bytes; it stays while the sender does, or until a push fails."""
        if self._carrier is None or self._carrier.closed:
            remote = bool(self._fleet.peers.keys() - {"ipc_zmq"})
            device = None if source is None else source.device
            arena = buckets.arena_device(self._fleet.ranks, device, remote=remote)
            # Several processes can fill one in the host's memory alone.
            self._carrier = Carrier(arena if self._crew is None else torch.device("cpu"), self._crew, self._address)
            self._preparation.choose_again()
        return self._carrier

    def _next_version(self) -> str:
        versions = [engine.version for engine in self._fleet.engines.values()]
        return str(max((int(v) for v in versions if v.isdecimal()), default=0) + 1)
