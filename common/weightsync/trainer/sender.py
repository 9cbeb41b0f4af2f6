"""What a trainer calls: `Sender`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, get_args

from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption, Weights, WeightSyncError
from weightsync.protocol import auth, http
from weightsync.protocol.names import check_label, plain_url
from weightsync.protocol.states import PUSH, Machine
from weightsync.sources import Source, open_source
from weightsync.sources.mapping import MappingSource, Remembered
from weightsync.sources.module import ModuleSource
from weightsync.tensors.layout import ALIGN_BYTES
from weightsync.trainer.buckets import Staging
from weightsync.trainer.driver import Driver
from weightsync.trainer.join_server import JoinServer
from weightsync.trainer.push_plan import Options
from weightsync.trainer.ranks import Coordinator, ranks
from weightsync.trainer.ranks.conversation import Act
from weightsync.trainer.results import EngineResult, PushResult
from weightsync.trainer.turns import Turns
from weightsync.transports import registry
from weightsync.transports.control.sockets import own_address

_T = TypeVar("_T")

#: A call that fails by its deadline has ended by then.
_OTHERS_S: Final = 2.0
#: What takes the sender to be where this move of `states.PUSH` may follow.
_MOVES: Final = {
    "push": "push",
    "add_engine": "push",
    "remove_engine": "push",
    "catch_up": "push",
    "rollback": "rollback",
}


class Sender:
    """Pushes a model's weights into engines: ``Sender(urls).push(model)``.

    ``engines`` are base URLs of vLLM or SGLang servers with the plugin loaded. ``transport`` is what the bytes travel
    by: the name of a transport, or ``"auto"``, which picks for each engine and says why in the result. ``token``
    defaults to ``$WEIGHTSYNC_TOKEN`` or this user's key file. ``timeout_s`` bounds a whole push. ``pause`` says what
    happens to requests in flight at commit. ``staging``: ``"full"`` holds a whole version before any engine stops,
    ``"none"`` streams the bytes in while the engines are stopped (a failure then leaves them dirty), ``"auto"`` picks.
    ``verify``: ``"digest"`` compares every tensor in every rank's stage with what the trainer held, ``"deep"`` also
    what the engine then computes with, ``"off"`` nothing. ``keep_previous`` has the engines keep the version before,
    for `rollback` and for going back when a commit fails; that takes the memory of the weights twice. ``bucket_bytes``
    is the size of each of two buckets that hold bytes on their way; by default there are as many as the model fills
    where memory allows, so that on one host nothing is copied twice. ``progress`` shows a bar. ``address``, a number or
    a name, is that of this host at which engines elsewhere find the trainer; by default the one from which the trainer
    reaches each.

    Building one contacts every engine and raises what would make a push fail: `EngineUnreachable`, `PluginNotLoaded`,
    `AuthenticationFailed`, `ProtocolMismatch`, `UnsupportedOption`. The first push takes the engines' lease, or
    building one does where a transport has something to set up, and `close` gives it back. Not for use by several
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
        transport: str = "auto",
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
            ("transport", transport, ("auto", *registry.names())),
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
        self._options = Options(
            timeout_s,
            transport,
            pause,
            staging,
            verify,
            keep_previous,
            bucket_bytes,
            progress,
            "" if address is None else own_address(address),
        )
        self._urls = urls
        self._machine: Machine[str] = Machine(PUSH, "idle", "this sender")
        #: The module or mapping that was pushed last, which is opened at less cost.
        self._known: Source | Remembered | None = None
        self._ranks = ranks()
        #: What asks for engines to take part waits for a push to end, and the other way round.
        self._turns = Turns()
        self._join_server: JoinServer | None = None
        #: None in the ranks of a trainer other than rank 0.
        self._driver: Driver | None = None
        try:
            self._together("build a Sender", type(None), lambda _, deadline: self._open(token, deadline))
        except BaseException:
            self.close()
            raise

    def _open(self, token: str | None, deadline: Deadline) -> None:
        key = auth.sender_token() if token is None else token
        of = self._ranks if isinstance(self._ranks, Coordinator) else None
        self._driver = Driver(self._urls, key, self._options, of, self._machine, deadline)
        self._driver.connect(deadline)

    def _together(
        self,
        what: str,
        kind: Any,
        act: Act[_T],
        offer: Callable[[], Source] | None = None,
    ) -> _T:
        """``act``, which returns a ``kind``: here, or at rank 0 of a trainer of several processes: see `Ranks.run`."""
        deadline = Deadline(self._options.timeout_s)
        with self._turns.take(what, deadline):
            self._recover()
            if what in _MOVES:
                self._machine.check(_MOVES[what])
            if self._ranks is None:
                with self._told(deadline):
                    return act(offer() if offer is not None else None, deadline)
            return self._ranks.run(what, kind, deadline, act, offer, self._look)

    @property
    def _at_rank_0(self) -> Driver:
        """What rank 0 does with the engines; there is one once the sender is built."""
        assert self._driver is not None, "rank 0 alone acts, of a sender that is built"
        return self._driver

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
        return (
            dict.fromkeys(self._urls, "unchanged") if self._driver is None else self._driver.current_weights(deadline)
        )

    def push(self, model: object, *, version: str | None = None) -> PushResult:
        """Make every engine serve the weights of ``model``, labelled ``version`` (default: the next number).

        ``model`` is a `torch.nn.Module`, a mapping of names to tensors, a checkpoint folder, or an object in the shape
        of vLLM's ``WeightSource``. ``version`` is a string of 1 to 1024 printable characters. On return every rank of
        every engine serves exactly these weights. On error see `WeightSyncError.engines` for what each engine serves.
        """
        start = time.perf_counter()

        def offer() -> Source:
            if version is not None:  # before any engine is asked for anything
                check_label(version)
            return self._source_of(model)

        def act(source: Source | None, deadline: Deadline) -> PushResult:
            assert source is not None, "a push has a source"
            return self._at_rank_0.push(source, version, deadline, start)

        return self._together("push", PushResult, act, offer)

    def _source_of(self, model: object) -> Source:
        source = open_source(model, reuse=self._known)
        # Others than a module's might keep a whole gathered model alive until the next push.
        self._known = source if isinstance(source, ModuleSource) else None
        if isinstance(source, MappingSource):
            self._known = source.seen
        return source

    def add_engine(self, url: str) -> EngineResult | None:
        """Have another engine take part. Raises as building a sender, and as `push`.

        It is brought to the version that the others serve, at once and from the memory that still holds it; the others
        are left alone. Where that memory does not hold a whole version it returns None, and the next push is the first.
        """
        return self._together(
            "add_engine", EngineResult | None, lambda _, deadline: self._at_rank_0.add_engine(url, deadline)
        )

    def remove_engine(self, url: str) -> None:
        """Have an engine take no part any more; it keeps what it serves, and its lease is given back."""
        self._together("remove_engine", type(None), lambda _, deadline: self._at_rank_0.remove_engine(url, deadline))

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Answer, from now on, those who ask by ``weightsync join`` for an engine to take part; where to ask.

        A new engine, or one that was restarted, is then brought to the served version as by `add_engine` and
        `catch_up`, between two pushes and without an act of the trainer. Raises `UnsupportedOption`.
        """
        if self._ranks is not None or self._join_server is not None:
            raise UnsupportedOption("a sender listens once, and not in a trainer of several processes")
        self._join_server = JoinServer(host, port, self._at_rank_0.engines.has_key, self._admit)
        return self._join_server.url

    def _admit(self, url: str) -> str:
        with self._turns.take("join", Deadline(self._options.timeout_s)):
            known, engines = plain_url(url), self._at_rank_0.engines
            if known in engines.by_url:
                self._catch_up(known)
            else:
                self.add_engine(known)
            version = engines.by_url[known].version
            return version if version == self._at_rank_0.served else ""

    def catch_up(self) -> dict[str, EngineResult]:
        """Bring the engines that do not serve what was pushed last, having been restarted for one, to that version.

        The bytes come from the memory that still holds them; nothing of the model is needed. Where that does not hold a
        whole version nothing happens, and the next push reaches them. An engine that is gone, or fails, keeps none of
        the others: all that can be are brought up first. Raises as `push` for those that could not be.
        """
        return self._catch_up()

    def _catch_up(self, only: str = "") -> dict[str, EngineResult]:
        results = dict[str, EngineResult]
        return self._together("catch_up", results, lambda _, deadline: self._at_rank_0.catch_up(deadline, only))

    def rollback(self) -> PushResult:
        """Serve the version before again, which the engines kept (``keep_previous=True``). Raises as `push`.

        Once more brings the newer one back.
        """
        return self._together("rollback", PushResult, lambda _, deadline: self._at_rank_0.rollback(deadline))

    def status(self, *, digest: bool = False) -> dict[str, http.StatusReply]:
        """What each engine serves, by URL; ``digest`` has every rank hash the weights it computes with."""
        replies = dict[str, http.StatusReply]
        return self._together("status", replies, lambda _, deadline: self._at_rank_0.status(deadline, digest=digest))

    def close(self) -> None:
        """Give the lease back; release memory, sockets and connections; idempotent."""
        if self._join_server is not None:
            self._join_server.close()
            self._join_server = None
        # Another thread's call ends by its own deadline.
        with self._turns.take("close", Deadline(self._options.timeout_s + _OTHERS_S)):
            self._close()

    def _recover(self) -> None:
        """After a call that was interrupted (Ctrl-C) even while it cleaned up: nothing that it used is used again."""
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
