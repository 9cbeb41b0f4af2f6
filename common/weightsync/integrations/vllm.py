"""vLLM's weight transfer with ``--weight-transfer-config '{"backend": "weightsync"}'``: the trainer's half.

A trainer that speaks vLLM's protocol gives its factory another init info, and stays as it is::

    engine = WeightTransferTrainerFactory.trainer_init(TrainerInitInfo(rank=0), client=client, source=source)
    engine.send_weights()

All that the engine is asked goes through vLLM's calls: *update* prepares a push, while the engine serves, and *finish*
commits it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import zmq

from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.errors import EngineRestarted, UnsupportedOption, WeightSyncError, named
from weightsync.protocol import auth, http
from weightsync.protocol.in_process import AskedByCalls, NotRunning
from weightsync.protocol.names import plain_url
from weightsync.protocol.relayed import Relayed, wrapped
from weightsync.trainer.results import PushResult
from weightsync.trainer.sender import Sender
from weightsync.transports.control import sockets

try:
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    needed = "weightsync.integrations.vllm needs vLLM in the trainer's environment: pip install vllm"
    raise ImportError(f"{needed} ({error})", name=error.name) from error

#: Calls to one engine at a time, so that calls that never return do not pile up.
_MAX_THREADS: Final = 8
#: Seconds between two checks that the call which the engine is to answer still runs.
_LOOK_UP_S: Final = 0.02
_HINTS: Final = {
    "404": "vLLM has its weight-transfer routes with VLLM_SERVER_DEV_MODE=1 alone",
    "500": (
        'was it started with --weight-transfer-config \'{"backend": "weightsync"}\', and have both sides the same key? '
        "Its log says what failed"
    ),
}
_numbers = itertools.count(1)


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types where this is checked
    """Chooses this back end in vLLM's factory. ``options`` are those of `Sender`.

    ``address``, also an option, is an address of this host that the engine reaches; by default the one on the route to
    the client's ``base_url``, or the loopback address if it has none.
    """

    backend: ClassVar[str] = "weightsync"
    address: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class TrainerEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's half of a weight transfer; ``pushed`` is the result of the last push.

    A client may call several engines at once: none is asked to commit before all have everything. It is called
    from several threads at once, also between *start* and *finish*. In a trainer of several processes
    `torch.distributed` must be initialised, and rank 0 there be the one that vLLM calls 0.
    """

    init_info_cls = TrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, sender: Sender):
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._sender = sender
        self.pushed: PushResult | None = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInitInfo, *, client: Any, source: Any = None) -> TrainerEngine:
        """Find the engines behind ``client`` and check that they can be pushed into. Raises `WeightSyncError`."""
        if source is None:
            raise UnsupportedOption("give trainer_init a source: a WeightSource, a module, or a mapping of tensors")
        options = dict(init_info.options)
        if init_info.address:
            options.setdefault("address", init_info.address)
        engines: Sequence[AskedByCalls]
        if init_info.is_sender:
            engines = _found(client, options)
        else:
            engines = [NotAsked("the engines of the trainer's rank 0", NotRunning("only rank 0 calls the engines"))]
        return cls(client=client, source=source, is_sender=init_info.is_sender, sender=Sender(engines, **options))

    def send_weights(self) -> None:
        """Push what ``source`` has now. Raises `WeightSyncError`."""
        self.pushed = self._sender.push(self.source)

    def shutdown(self) -> None:
        """Close the sender."""
        self._sender.close()


class NotAsked:
    """Stands for engines that this process cannot ask; ``why`` is raised instead."""

    of_this_process, host = False, ""

    def __init__(self, name: str, why: Exception):
        self.name, self._why = name, why

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.AskedByCalls`."""
        raise self._why

    def check_caller(self) -> None:
        """Do nothing: every thread may ask."""


class Relaying:
    """One engine behind a client, for a `Sender`. ``instance`` is its instance when it was last opened."""

    of_this_process, host = False, ""

    def __init__(self, calls: _Calls, name: str, instance: str):
        self.name, self.instance, self._calls = name, instance, calls
        self._threads = DaemonThread("weightsync-vllm", _MAX_THREADS)

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.AskedByCalls`. Raises `EngineRestarted` too."""
        deadline = Deadline(timeout_s)
        if route == "open":
            return self._calls.opened(self, self._calls.ask(route, body, deadline, "", self._threads))
        replies = self._calls.ask(route, body, deadline, self._calls.addressee(self), self._threads)
        if not replies and route == "commit":  # its status tells how it ended
            raise NotRunning("the client's calls ended without a reply")
        if not replies:
            raise EngineRestarted(f"{self.name} was restarted since it was opened")
        return replies[0]

    def check_caller(self) -> None:
        """Do nothing: every thread may ask."""


class _Calls:
    """The calls of vLLM's protocol, as a way to ask the engines that ``client`` calls."""

    def __init__(self, client: Any, address: str, token: str):
        self._client = client
        self._here, self._token = address, token
        self._engines: list[Relaying] = []
        #: The calls for commits that have not ended.
        self._committing = set[Future[None]]()
        self._opening = threading.Lock()

    def engines(self, name: str, deadline: Deadline) -> list[Relaying]:
        """Find the engines that the client calls; ``name`` is for one alone. Raises as `ask`, and `WeightSyncError`."""
        asked = http.OpenRequest(protocol=http.PROTOCOL, package_version=http.package_version())
        found = []
        thread = DaemonThread("weightsync-vllm")
        replies = self.ask("open", http.to_json(asked), deadline, "", thread)
        thread.close()
        for status, reply in replies:
            if status != 200:
                refusal = http.from_json(reply, http.ErrorReply)
                raise named(refusal.error)(refusal.message)
            found.append(http.from_json(reply, http.OpenReply).instance)
        if not found:
            raise NotRunning("the client's call ended, but no engine replied")
        names = [name] if len(found) == 1 else [f"{name}#{number}" for number in range(1, len(found) + 1)]
        self._engines = [Relaying(self, *one) for one in zip(names, found, strict=True)]
        return self._engines

    def addressee(self, engine: Relaying) -> str:
        """Which engine is to answer; a single one also if it is another instance by now."""
        return engine.instance if len(self._engines) > 1 else ""

    def opened(self, engine: Relaying, replies: list[tuple[int, bytes]]) -> tuple[int, bytes]:
        """The reply of ``engine`` among those of all; if it was restarted, of one that is none of the others."""
        with self._opening:
            instances = {
                http.from_json(reply, http.OpenReply).instance: reply for status, reply in replies if status == 200
            }
            others = {other.instance for other in self._engines if other is not engine}
            new = [instance for instance in instances if instance not in others]
            if engine.instance not in instances and new:
                engine.instance = new[0]
            if engine.instance in instances:
                return 200, instances[engine.instance]
        refused = [reply for reply in replies if reply[0] != 200]
        if not refused:
            raise NotRunning("the client's call ended, but this engine did not reply")
        return refused[0]

    def ask(
        self, route: str, body: bytes, deadline: Deadline, engine: str, threads: DaemonThread
    ) -> list[tuple[int, bytes]]:
        """What an engine answers, or all if ``engine`` is empty; ``threads`` make the calls.

        Raises `NotRunning` and `TimeoutError`.
        """
        context: zmq.Context[sockets.Socket] = zmq.Context()
        socket: sockets.Socket = context.socket(zmq.REP)
        try:
            sockets.set_limits(socket)
            socket.setsockopt(zmq.MAXMSGSIZE, http.MAX_BODY_BYTES)
            server_key = sockets.encrypt(socket)
            socket.setsockopt(zmq.IPV6, int(":" in self._here))
            place = f"tcp://{sockets.bracketed(self._here)}"
            place = f"{place}:{socket.bind_to_random_port(place)}"
            message = wrapped(
                Relayed(
                    route=route,
                    body=body.decode(),
                    token=self._token,
                    engine=engine,
                    reply_to=place,
                    server_key=server_key,
                    timeout_s=min(deadline.left(), http.MAX_TIMEOUT_S),
                )
            )
            called, others = Future[None](), set[Future[None]]()
            if route == "commit":  # an engine carries out what it has kept when any of these calls reaches it
                others = self._committing
                self._committing.add(called)
                called.add_done_callback(self._committing.discard)
            threads.submit(lambda: self._call(route, message, deadline), called)
            return _replies(socket, called, others, deadline, one=bool(engine) or len(self._engines) == 1)
        except zmq.ZMQError as error:
            raise NotRunning(f"this host cannot listen at {self._here} for replies: {error}") from error
        finally:
            sockets.close(context, [socket], sockets.FINAL_MESSAGE_S)

    def _call(self, route: str, message: dict[str, str], deadline: Deadline) -> None:
        if route == "open":
            self._client.init_weight_transfer_engine(message)
            return
        if route.startswith(http.UPDATE):
            self._client.start_weight_update()
        if deadline.left():  # nobody waits for what follows otherwise
            self._client.update_weights(message)
        if route == "commit" and deadline.left():
            self._client.finish_weight_update()


def _found(client: Any, options: Mapping[str, Any]) -> Sequence[AskedByCalls]:
    """The engines behind ``client``. What fails is raised when a sender opens them, on all ranks of the trainer."""
    url = plain_url(client.base_url) if isinstance(getattr(client, "base_url", None), str) else ""
    name = url or f"{type(client).__name__}{next(_numbers)}"
    try:
        token, address = options.get("token"), options.get("address")
        here = sockets.local_address(sockets.host_of(url)) if address is None else sockets.own_address(address)
        calls = _Calls(client, here, auth.usable(auth.sender_token() if token is None else token))
        return calls.engines(name, Deadline(options.get("timeout_s", 300.0)))
    except (WeightSyncError, NotRunning, TimeoutError) as error:
        return [NotAsked(name, error)]


def _replies(
    socket: sockets.Socket,
    called: Future[None],
    others: Collection[Future[None]],
    deadline: Deadline,
    *,
    one: bool,
) -> list[tuple[int, bytes]]:
    """The replies to a call: until it and ``others`` have ended, or there is ``one``."""
    replies: list[tuple[int, bytes]] = []
    while deadline.left():
        # An engine's call ends after its reply was taken, so then no reply is on its way.
        ended = called.done() and (called.exception() is not None or not others)
        while socket.poll(0 if ended else int(1000 * _LOOK_UP_S)):
            status, reply = socket.recv_multipart()
            socket.send(b"")
            replies.append((int(status), reply))
        if one and replies:
            return replies
        if ended and (error := called.exception()) is not None:
            raise NotRunning(_said(error))
        if ended:
            return replies
    called.cancel()
    raise TimeoutError("")


def _said(error: BaseException) -> str:
    status = str(getattr(getattr(error, "response", None), "status_code", ""))
    return f"{error}; {_HINTS[status]}" if status in _HINTS else str(error)


with contextlib.suppress(ValueError):  # it is registered: this module was imported before
    WeightTransferTrainerFactory.register_engine(TrainerInitInfo.backend, TrainerEngine)
