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
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import zmq

from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption, named
from weightsync.protocol import auth, http
from weightsync.protocol.in_process import NotRunning
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
    """Chooses this back end in vLLM's factory. ``options`` are those of `Sender`, but for ``token`` and ``address``.

    ``address`` is an IP address of this host that the engine reaches; by default the one on the route to the client's
    ``base_url``, or the loopback address if it has none.
    """

    backend: ClassVar[str] = "weightsync"
    address: str = ""
    options: dict[str, Any] = field(default_factory=dict)


class TrainerEngine(base.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's half of a weight transfer; ``pushed`` is the result of the last push.

    A client may call several engines at once: none is asked to commit before all have everything. It is called from
    several threads, also between *start* and *finish*. In a trainer of several processes `torch.distributed` must be
    initialised, and rank 0 there be the one that vLLM calls 0.
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
        calls = _Calls(client, init_info.address)
        options = dict(init_info.options)
        if init_info.address:
            options.setdefault("address", init_info.address)
        timeout_s = options.get("timeout_s", 300.0)
        engines = calls.engines(timeout_s) if init_info.is_sender else [Elsewhere()]
        return cls(client=client, source=source, is_sender=init_info.is_sender, sender=Sender(engines, **options))

    def send_weights(self) -> None:
        """Push what ``source`` has now. Raises `WeightSyncError`."""
        self.pushed = self._sender.push(self.source)

    def shutdown(self) -> None:
        """Close the sender."""
        self._sender.close()


class Elsewhere:
    """Stands for engines that another process of the trainer calls."""

    name = "the engines of the trainer's rank 0"
    of_this_process = False

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.EngineInProcess`."""
        raise NotRunning("only rank 0 of the trainer calls the engines")

    def check_caller(self) -> None:
        """Do nothing: every thread may ask."""


class Relaying:
    """One engine behind a client, for a `Sender`."""

    of_this_process = False

    def __init__(self, calls: _Calls, name: str, instance: str):
        self.name, self._calls, self._instance = name, calls, instance

    def ask(self, route: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """See `weightsync.protocol.in_process.EngineInProcess`."""
        ((status, reply),) = self._calls.ask(route, body, Deadline(timeout_s), self._instance)
        return status, reply

    def check_caller(self) -> None:
        """Do nothing: every thread may ask."""


class _Calls:
    """The calls of vLLM's protocol, as a way to ask the engines that a client calls."""

    def __init__(self, client: Any, address: str):
        self._client = client
        self._url = plain_url(client.base_url) if isinstance(getattr(client, "base_url", None), str) else ""
        self._here = address or sockets.local_address(sockets.host_of(self._url))
        self._token = auth.usable(auth.sender_token())
        #: vLLM has one update at a time: between two calls of a commit no other may begin.
        self._committing = threading.Lock()

    def engines(self, timeout_s: float) -> list[Relaying]:
        """Find the engines that the client calls. Raises `WeightSyncError`."""
        asked = http.OpenRequest(protocol=http.PROTOCOL, package_version=http.package_version())
        found = []
        for status, reply in self.ask("open", http.to_json(asked), Deadline(timeout_s), ""):
            if status != 200:
                refusal = http.from_json(reply, http.ErrorReply)
                raise named(refusal.error)(refusal.message)
            found.append(http.from_json(reply, http.OpenReply).instance)
        alone = self._url if len(found) == 1 else ""
        return [Relaying(self, alone or f"{type(self._client).__name__}#{next(_numbers)}", one) for one in found]

    def ask(self, route: str, body: bytes, deadline: Deadline, engine: str) -> list[tuple[int, bytes]]:
        """What an engine answers, or all if ``engine`` is empty. Raises `NotRunning` and `TimeoutError`."""
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
                )
            )
            return self._replies(socket, route, message, deadline, bool(engine))
        finally:
            sockets.close(context, [socket], sockets.FINAL_MESSAGE_S)

    def _replies(
        self, socket: sockets.Socket, route: str, message: dict[str, str], deadline: Deadline, one: bool
    ) -> list[tuple[int, bytes]]:
        thread = DaemonThread("weightsync-vllm")
        called = thread.submit(lambda: self._call(route, message, deadline))
        thread.close()
        replies: list[tuple[int, bytes]] = []
        while deadline.left():
            # An engine's call ends after its reply was taken, so then no reply is on its way.
            ended = called.done()
            while socket.poll(0 if ended else int(1000 * _LOOK_UP_S)):
                status, reply = socket.recv_multipart()
                socket.send(b"")
                replies.append((int(status), reply))
            if (one and replies) or (ended and replies and called.exception() is None):
                return replies
            if ended:
                raise NotRunning(_said(called.exception()))
        raise TimeoutError("")

    def _call(self, route: str, message: dict[str, str], deadline: Deadline) -> None:
        if route == "open":
            self._client.init_weight_transfer_engine(message)
        elif route != "commit":
            if route.startswith(http.UPDATE):
                self._client.start_weight_update()
            self._client.update_weights(message)
        elif self._committing.acquire(timeout=deadline.left()):
            try:
                self._client.update_weights(message)
                self._client.finish_weight_update()
            finally:
                self._committing.release()


def _said(error: BaseException | None) -> str:
    if error is None:
        return "the client's call ended, but no engine replied"
    status = str(getattr(getattr(error, "response", None), "status_code", ""))
    return f"{error}; {_HINTS[status]}" if status in _HINTS else str(error)


with contextlib.suppress(ValueError):  # it is registered: this module was imported before
    WeightTransferTrainerFactory.register_engine(TrainerInitInfo.backend, TrainerEngine)
