"""The public API of the trainer side: `Sender`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption, Weights, WeightSyncError
from weightsync.protocol import auth, http
from weightsync.protocol.in_process import Target, name_of, target
from weightsync.protocol.names import check_label, plain_url
from weightsync.protocol.states import PUSH, Machine
from weightsync.sources import Source, Sources
from weightsync.trainer import metrics
from weightsync.trainer.asked import Asked
from weightsync.trainer.background import in_background
from weightsync.trainer.buckets import Staging
from weightsync.trainer.deltas import Delta
from weightsync.trainer.driver import Driver
from weightsync.trainer.join_server import JoinServer
from weightsync.trainer.push_plan import Options
from weightsync.trainer.ranks import Coordinator, Follower, ranks
from weightsync.trainer.ranks.assembly import CheckReplicas
from weightsync.trainer.ranks.conversation import Act
from weightsync.trainer.reading import Reading
from weightsync.trainer.results import EngineResult, PushFuture, PushResult
from weightsync.trainer.turns import Turns
from weightsync.transports.control.sockets import own_address

_T = TypeVar("_T")

#: Seconds past its deadline by which another thread's call has ended.
_LATE_S: Final = 2.0
#: The event of `states.PUSH` that must be legal when a call begins.
_MOVES: Final = {
    **dict.fromkeys(("push", "push_async", "add_engine", "remove_engine", "catch_up"), "push"),
    "rollback": "rollback",
}


class Sender:
    """Pushes a model's weights into engines: ``Sender(urls).push(model)``.

    Arguments:

    - ``engines``: base URLs of vLLM or SGLang servers that have loaded the plugin, or engines of this process:
      `vllm.LLM`, `vllm.AsyncLLM`, `sglang.Engine`. Results name those like ``vllm.LLM#1``.
    - ``transport``: the name of a transport, or ``"auto"``, which picks one for each engine; the result says why.
    - ``token``: the key, by default ``$WEIGHTSYNC_TOKEN`` or the content of this user's key file.
    - ``timeout_s``: seconds that each call may take, a whole push for example.
    - ``pause``: what happens to requests in flight at the commit.
    - ``staging``: ``"full"`` holds a whole version before any engine pauses; ``"none"`` streams the bytes in while the
      engines are paused, so that a failure leaves them dirty; ``"auto"`` picks by the memory that is free.
    - ``verify``: ``"digest"`` compares every tensor in every rank's stage with what the trainer held, ``"deep"`` also
      what the engine computes with after loading, ``"off"`` nothing.
    - ``keep_previous``: True has engines keep the previous version, for `rollback` and for a commit that fails; this
      doubles the memory for the weights. With ``"auto"``, those that load into a standby hold it anyway, until the next
      push is loaded there.
    - ``bucket_bytes``: the bytes go through two buckets of this size; by default one arena holds all, if memory allows.
    - ``progress``: show a progress bar.
    - ``address``: where engines on other hosts reach the trainer; by default its address on the route to each of them.
    - ``group``: the `torch.distributed` process group whose processes are the trainer, by default the default group.
    - ``check_replicas``: when to compare weights that several ranks of a trainer hold: at the first push and every
      hundredth (``"first"``), or at each (``"always"``).
    - ``delta``: ``"auto"`` sends engines on other hosts what has changed, where that pays; ``"never"`` everything.

    Building a sender contacts every engine and raises what would make a push fail: `EngineUnreachable`,
    `PluginNotLoaded`, `AuthenticationFailed`, `ProtocolMismatch` or `UnsupportedOption`. It makes what the first push
    would take longer for, such as the engines' standbys, while the engines generate. The first push takes the
    engines' leases (building does if a transport has something to set up) and `close` gives them back. Not meant for
    several threads: their calls run one after the other.

    In a trainer of several processes (a `torch.distributed` group of more than one) every rank of the group builds a
    sender with the same arguments and makes the same calls; all ranks return the same result, or raise the same error.
    Only rank 0 talks to the engines. Each rank sends what it holds: nothing is gathered, and no collective is started.
    A plain tensor that several ranks hold, as with DistributedDataParallel, is sent by the lowest of them; a rank may
    hold nothing. `close` does not wait for the other ranks. The shared memory of each host holds what its ranks send,
    and ranks on several hosts take a transport in which each host sends. ``address`` is that of rank 0's host.
    """

    def __init__(
        self,
        engines: Sequence[object],
        *,
        transport: str = "auto",
        token: str | None = None,
        timeout_s: float = 300.0,
        pause: http.PauseMode = "retract",
        staging: Staging = "full",
        verify: http.Verify = "digest",
        keep_previous: bool | Literal["auto"] = "auto",
        bucket_bytes: int | None = None,
        progress: bool = False,
        address: str | None = None,
        group: Any = None,
        check_replicas: CheckReplicas = "first",
        delta: Delta = "auto",
    ):
        if isinstance(engines, str) or not engines:
            raise UnsupportedOption("engines: give a list of one or more engines")
        if keep_previous not in (True, False, "auto"):
            raise UnsupportedOption(f"keep_previous {keep_previous!r} is unknown; use one of True, False, auto")
        targets = [target(engine) for engine in engines]
        urls = [name_of(engine) for engine in targets]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise UnsupportedOption(f"engines: give different ones; {', '.join(twice)} is there more than once")
        self._options = Options(
            timeout_s,
            transport,
            pause,
            staging,
            verify,
            keep_previous is True,
            bucket_bytes,
            progress,
            "" if address is None else address,
            check_replicas,
            delta,
        )
        self._options.check()
        self._targets, self._urls = targets, urls
        self._machine: Machine[str] = Machine(PUSH, "idle", "this sender", metrics.moved)
        metrics.moved("", "idle")
        self._sources = Sources()
        self._ranks = ranks(group, self._options.of_all_ranks([one for one in targets if isinstance(one, str)]))
        if address is not None and not isinstance(self._ranks, Follower):  # it is that of rank 0's host
            self._options = self._options._replace(address=own_address(address))
        for found in targets:
            self._check_target(found)
        #: Calls of the trainer and requests to the join server wait for each other.
        self._turns = Turns()
        self._join_server: JoinServer | None = None
        #: None in the trainer's other ranks.
        self._driver: Driver | None = None
        try:
            self._run("build a Sender", type(None), lambda _, deadline: self._open(token, deadline))
        except BaseException:
            self.close()
            raise

    def _check_target(self, engine: Target) -> None:
        if self._ranks is not None and not isinstance(engine, str) and engine.of_this_process:
            raise UnsupportedOption(
                "an engine of this process belongs to one process, and this trainer has several: serve it by HTTP, and "
                "give every rank its URL"
            )

    def _open(self, token: str | None, deadline: Deadline) -> None:
        key = auth.sender_token() if token is None else token
        coordinator = self._ranks if isinstance(self._ranks, Coordinator) else None
        self._driver = Driver(self._targets, key, self._options, coordinator, self._machine, deadline)
        self._driver.connect(deadline)

    def _run(
        self,
        what: str,
        kind: Any,
        act: Act[_T],
        open_model: Callable[[], Source] | None = None,
        reading: Reading | None = None,
    ) -> _T:
        """Run ``act``, which returns a ``kind``: here, or in rank 0 if the trainer has several, see `Ranks.run`.

        ``open_model`` opens what is sent, which is read as ``reading`` says.
        """
        reading = Reading() if reading is None else reading
        deadline = Deadline(self._options.timeout_s)
        with errors.during(what), self._turns.take(what, deadline):
            self._recover()
            if self._driver is not None:
                self._driver.engines.check_caller()
            if what in _MOVES:
                self._machine.check(_MOVES[what])
            if self._ranks is None:
                with self._engines_reported(deadline):
                    return act(reading.run(open_model) if open_model is not None else None, deadline)
            return self._ranks.run(what, kind, deadline, act, open_model, self._current_weights, reading)

    @property
    def _rank_0_driver(self) -> Driver:
        """The driver, which rank 0 has once the sender is built."""
        assert self._driver is not None, "only rank 0 of a sender that is built drives the engines"
        return self._driver

    @property
    def is_distributed(self) -> bool:
        """Whether every rank of a trainer of several processes makes this sender's calls."""
        return self._ranks is not None

    def check_serves(self, url: str) -> None:
        """Raise `UnsupportedOption` unless an engine of this sender answers at ``url``, maybe its second URL.

        In a trainer of several processes only rank 0 calls it.
        """
        self._rank_0_driver.engines.check_has(url, Deadline(self._options.timeout_s))

    @contextmanager
    def _engines_reported(self, deadline: Deadline) -> Iterator[None]:
        """Inside the context, an error that does not name engines gets what each of them serves."""
        try:
            yield
        except WeightSyncError as error:
            if not error.engines and error.weights == "unchanged":
                error.settle(self._current_weights(deadline))
            raise

    def _current_weights(self, deadline: Deadline) -> dict[str, Weights]:
        return (
            dict.fromkeys(self._urls, "unchanged") if self._driver is None else self._driver.current_weights(deadline)
        )

    def push(
        self,
        model: object,
        *,
        version: str | None = None,
        expected: str | None = None,
        allow_missing: Sequence[str] = (),
        lora: str | None = None,
        draft: object | None = None,
    ) -> PushResult:
        """Make every engine serve the weights of ``model``, labelled ``version`` (default: the next number).

        With ``expected``, a label, it raises `WrongState` and changes nothing where an engine serves another version.
        Tensors whose names match a pattern in ``allow_missing``, such as ``"mtp.*"``, and that ``model`` lacks, stay as
        the engines have them; `ManifestMismatch` is raised for a pattern that matches no tensor of the engines, for
        tensors that are loaded into one parameter with others that are pushed, and where two engines hold different
        values.

        With ``lora``, the name of a model, what is pushed is the active adapter of a PEFT model, or that of a folder
        that PEFT has written. The engines serve it as the model ``lora``, with versions of its own; their weights stay
        as they are. `ManifestMismatch` is raised for an adapter that an engine cannot serve.

        With ``draft``, the weights of the engines' draft model, both are served as one version. Without it a draft
        stays as it is, and ``PushResult.kept`` has its names. Raises `ManifestMismatch` for one unlike the engines'.

        ``model`` is a `torch.nn.Module`, a mapping of names to tensors, a checkpoint folder, an object in the shape of
        vLLM's ``WeightSource``, or an iterator of pairs of a name and a tensor, in any order, which is read once.
        ``version`` is a string of 1 to 1024 printable characters. On return every rank of every engine serves exactly
        these weights. Raises `WeightSyncError`, whose ``engines`` says what each engine serves.
        """
        return self._push("push", model, draft, Asked.of(version, expected, allow_missing, lora), Reading())

    def push_async(
        self,
        model: object,
        *,
        version: str | None = None,
        expected: str | None = None,
        allow_missing: Sequence[str] = (),
        lora: str | None = None,
        draft: object | None = None,
    ) -> PushFuture:
        """As `push`, in the background: returns once the tensors of ``model`` were read, and may change.

        That is after one copy in this host's memory if the arena holds the whole model, whatever the engines are doing;
        otherwise, and with ``keep_previous``, after the transfer. The result's ``read`` says which. Parameters that the
        engines read in place are not copied: then `PushFuture.in_place` is true, and they must not change before the
        future is done.

        The future has the result of the push, or what `push` would raise. The next call of this sender waits for it,
        `close` too, within its deadline. It cannot be cancelled, and a process that ends takes the push with it, as if
        it had been killed. Every rank of a trainer of several processes makes this call.
        """
        if self._driver is not None:
            self._driver.engines.check_caller()
        asked = Asked.of(version, expected, allow_missing, lora)
        return in_background(lambda reading: self._push("push_async", model, draft, asked, reading))

    def _push(self, what: str, model: object, draft: object, asked: Asked, reading: Reading) -> PushResult:
        start = time.perf_counter()

        def open_model() -> Source:
            for label in (asked.version, asked.expected):  # before any engine is asked for anything
                if label is not None:
                    check_label(label)
            return self._sources.open(model, asked.lora, draft)

        def act(source: Source | None, deadline: Deadline) -> PushResult:
            assert source is not None, "a push has a source"
            return self._rank_0_driver.push(source, asked, deadline, start, reading)

        return self._counted("push", lambda: self._run(what, PushResult, act, open_model, reading))

    def add_engine(self, url: object) -> EngineResult | None:
        """Add an engine, given as to `Sender`. Raises what building a sender raises, and what `push` raises.

        The engine is brought to the version that the others serve, and to the adapters, from the arenas that still hold
        them; the other engines are not involved. If no arena holds a whole version, returns None: the next push is the
        engine's first. The result of a push says which adapters an engine lacks.
        """
        added = target(url)
        self._check_target(added)
        return self._run(
            "add_engine", EngineResult | None, lambda _, deadline: self._rank_0_driver.add_engine(added, deadline)
        )

    def remove_engine(self, url: object) -> None:
        """Remove an engine: it keeps what it serves, and its lease is given back. The last one cannot be removed."""
        removed = target(url)
        self._run("remove_engine", type(None), lambda _, deadline: self._rank_0_driver.remove_engine(removed, deadline))

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Accept engines that ``weightsync join`` announces; return the URL to join at.

        A new engine is then added as by `add_engine`, and one that was restarted is caught up as by `catch_up`, between
        two pushes and without any call of the trainer. ``port`` 0 means any free port. Raises `UnsupportedOption` if
        the sender listens already, cannot listen there, or belongs to a trainer of several processes.
        """
        if self._ranks is not None or self._join_server is not None:
            raise UnsupportedOption("a sender listens once, and not in a trainer of several processes")
        self._join_server = JoinServer(host, port, self._rank_0_driver.engines.has_key, self._add_or_catch_up)
        return self._join_server.url

    def _add_or_catch_up(self, url: str) -> str:
        with self._turns.take("join", Deadline(self._options.timeout_s)):
            known, engines = plain_url(url), self._rank_0_driver.engines
            if known in engines.by_url:
                self._catch_up(known)
            else:
                self.add_engine(known)
            return engines.by_url[known].version if self._rank_0_driver.is_caught_up(known) else ""

    def catch_up(self) -> dict[str, EngineResult]:
        """Bring engines that do not serve the last pushed version, for example after a restart, to that version.

        The same for adapters that were pushed. The bytes come from the arenas that still hold them; the model is not
        needed. If no arena holds a whole version, nothing happens, and the next push reaches these engines. Returns the
        results by URL. Raises what `push` raises for engines that could not be caught up, after all others were.
        """
        return self._catch_up()

    def _catch_up(self, only: str = "") -> dict[str, EngineResult]:
        results = dict[str, EngineResult]
        return self._run("catch_up", results, lambda _, deadline: self._rank_0_driver.catch_up(deadline, only))

    def rollback(self, *, lora: str | None = None) -> PushResult:
        """Serve the previous version again, which the engines kept, see ``keep_previous``. Raises as `push`.

        A second rollback brings the newer version back. With ``lora``, it is an adapter of this name that goes back to
        the version that was pushed before, which the engines always keep.
        """

        def run() -> PushResult:
            return self._run("rollback", PushResult, lambda _, deadline: self._rank_0_driver.rollback(deadline, lora))

        return self._counted("rollback", run)

    def _counted(self, kind: str, call: Callable[[], PushResult]) -> PushResult:
        """Count ``call`` in the metrics, in one process of the trainer."""
        if self._driver is None:
            return call()
        with metrics.counted(kind) as done:
            result = call()
            done(result.seconds, result.engines.values(), result.nbytes)
            return result

    def status(self, *, digest: bool = False) -> dict[str, http.StatusReply]:
        """Return what each engine serves, by URL; with ``digest``, every rank hashes the weights it computes with."""
        replies = dict[str, http.StatusReply]
        return self._run("status", replies, lambda _, deadline: self._rank_0_driver.status(deadline, digest=digest))

    def close(self) -> None:
        """Give the leases back; release memory, sockets and connections. Idempotent."""
        if self._join_server is not None:
            self._join_server.close()
            self._join_server = None
        # A call of another thread ends by its own deadline.
        with self._turns.take("close", Deadline(self._options.timeout_s + _LATE_S)):
            self._close()

    def _recover(self) -> None:
        """After a call whose cleanup was interrupted too (Ctrl-C): drop the transfer, which may still be in use."""
        if self._machine.allows("interrupted"):
            if self._driver is not None:
                self._driver.drop_transfer()
            self._machine.move("interrupted")

    def _close(self) -> None:
        self._recover()
        if not self._machine.allows("close"):
            return
        self._machine.move("close")
        if self._driver is not None:
            self._driver.close(Deadline(self._options.timeout_s))
        if self._ranks is not None:
            self._ranks.close()

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
