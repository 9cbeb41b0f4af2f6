"""SGLang with several tokenizer workers (``--tokenizer-worker-num``): the main process, and each worker.

Every worker serves HTTP and loads no plugins. What workers send to the schedulers passes a router in the main process,
which is their parent; so the front end is there, beside the router, and holds requests back there. `compat` checks the
names.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from sglang_weightsync import compat, compat_config, compat_groups
from sglang_weightsync.messages import IN_FLIGHT, WeightsyncReqInput, WeightsyncReqOutput
from weightsync.engine.private_names import missing, missing_below
from weightsync.engine.servers import Elsewhere, Label

#: Names that only engines with several tokenizer workers need, by module.
WORKERS: Final = {
    "sglang.srt.environ": ("envs.SGLANG_HTTP_SERVER_APP_PATH",),
    "sglang.srt.entrypoints.http_server": ("get_tokenizer_worker_class",),
    "sglang.srt.managers.io_struct": (
        "AbortReq",
        "TokenizedGenerateReqInput",
        "TokenizedEmbeddingReqInput",
        "BatchTokenizedGenerateReqInput",
        "BatchTokenizedEmbeddingReqInput",
    ),
    "sglang.srt.managers.multi_tokenizer_mixin": (
        "async_sock_send",
        "MultiTokenizerRouter.router_worker_obj",
        "MultiTokenizerRouter._distribute_result_to_workers",
        "TokenizerWorker.continue_generation",
    ),
    "sglang.srt.runtime_context": ("get_serving",),
}
#: Attributes of a router, which exist only after it has been made.
_ROUTER: Final = ("send_to_scheduler", "recv_from_detokenizer", "_loop")
#: Seconds between two looks at the requests in flight.
_LOOK_S: Final = 0.05


# --- in the main process ----------------------------------------------------------------------------------------------


def lacking(router: Any) -> str:
    """What SGLang lacks for pushes into an engine with several tokenizer workers; empty if nothing."""
    gone = [*missing(WORKERS), *missing_below(router, _ROUTER)]
    return f"SGLang {compat.SGLANG.version()} lacks {', '.join(gone)}; install SGLang 0.5.23" if gone else ""


def serve(path: str) -> str:
    """Make the workers import their app from ``path``; returns why they will not, empty if they will."""
    from sglang.srt.environ import envs

    setting = envs.SGLANG_HTTP_SERVER_APP_PATH
    if setting.is_set():
        return "SGLANG_HTTP_SERVER_APP_PATH names another app; unset it"
    setting.set(path)
    return ""


def loop_of(router: Any) -> asyncio.AbstractEventLoop:
    """The running event loop of the router, which has a thread of its own."""
    loop: asyncio.AbstractEventLoop = router._loop
    return loop


class Router:
    """See `front_end.Tokenizers`: the router of several workers, which read the label where ``label`` is kept."""

    several = True

    def __init__(self, server_args: Any, router: Any, label: Label):
        from sglang.srt.managers import io_struct, multi_tokenizer_mixin

        self._router, self._label = router, label
        self._groups = compat_config.groups(server_args)
        self._closed = self._draining = False
        self._abort = io_struct.AbortReq
        self._one = (io_struct.TokenizedGenerateReqInput, io_struct.TokenizedEmbeddingReqInput)
        self._many = (io_struct.BatchTokenizedGenerateReqInput, io_struct.BatchTokenizedEmbeddingReqInput)
        #: Requests that wait for `open`, or for the end of `drained`.
        self._waiting: deque[Any] = deque()
        #: The replies that are awaited, by call.
        self._replies: dict[str, asyncio.Queue[WeightsyncReqOutput]] = {}
        self._send, self._distribute = multi_tokenizer_mixin.async_sock_send, router._distribute_result_to_workers
        multi_tokenizer_mixin.async_sock_send = self._on_send
        router._distribute_result_to_workers = self._on_result

    async def _on_send(self, socket: Any, sent: Any) -> None:
        if (self._closed or self._draining) and isinstance(sent, (*self._one, *self._many)):
            self._waiting.extend([sent] if isinstance(sent, self._one) else sent)
            return
        if isinstance(sent, self._abort):
            await self._abort_waiting(sent)
        await self._send(socket, sent)

    async def _abort_waiting(self, asked: Any) -> None:
        """Answer requests that wait here and are to be aborted, as a scheduler does those that it has not begun."""

        def meant(one: Any) -> bool:
            return bool(asked.abort_all or one.rid.startswith(asked.rid))

        aborted = list(filter(meant, self._waiting))
        self._waiting = deque(one for one in self._waiting if not meant(one))
        for one in aborted:
            reason, worker = asked.finished_reason, one.http_worker_ipc
            await self._distribute(self._abort(rid=one.rid, http_worker_ipc=worker, finished_reason=reason))

    async def _on_result(self, result: Any) -> None:
        if not isinstance(result, WeightsyncReqOutput):
            await self._distribute(result)
        elif result.call in self._replies:
            self._replies[result.call].put_nowait(result)

    async def _forward(self, sent: Any) -> None:
        await self._send(self._router.send_to_scheduler, sent)

    async def _let_through(self) -> None:
        while self._waiting and not (self._closed or self._draining):
            await self._forward(self._waiting.popleft())

    def close_at_start(self, why: str) -> None:
        """See `front_end.Tokenizers`."""
        self._closed = True

    async def close(self, why: str) -> None:
        """See `front_end.Tokenizers`; workers ask the front end whether they may resume."""
        self._closed = True

    async def open(self) -> None:
        """See `front_end.Tokenizers`."""
        self._closed = False
        await self._let_through()

    def version(self) -> str:
        """See `front_end.Tokenizers`."""
        from sglang.srt.runtime_context import get_serving

        return self._label.read() or str(get_serving().weight_version)

    def set_version(self, version: str) -> None:
        """See `front_end.Tokenizers`."""
        self._label.write(version)

    def reply_to(self) -> str:
        """See `front_end.Tokenizers`."""
        return compat_groups.reply_address(self._router)

    async def ask(self, request: WeightsyncReqInput) -> list[WeightsyncReqOutput]:
        """See `front_end.Tokenizers`."""
        replies = self._replies[request.call] = asyncio.Queue()
        try:
            await self._forward(request)
            return [await replies.get() for _ in range(self._groups)]
        finally:
            del self._replies[request.call]

    @contextlib.asynccontextmanager
    async def drained(self, *, abort: bool) -> AsyncIterator[None]:
        """See `front_end.Tokenizers`."""
        self._draining = True
        try:
            while await self._in_flight(abort):
                await asyncio.sleep(_LOOK_S)
            yield
        finally:
            self._draining = False
            await self._let_through()

    async def _in_flight(self, abort: bool) -> bool:
        """Whether the schedulers have requests; all that were sent before this question count."""
        if abort:
            await self._forward(self._abort(abort_all=True))
        call = secrets.token_hex(8)
        replies = await self.ask(WeightsyncReqInput(call=call, method=IN_FLIGHT, payload=b"", reply_to=self.reply_to()))
        return any(reply.in_flight for reply in replies)


# --- in a worker ------------------------------------------------------------------------------------------------------


def follow(elsewhere: Elsewhere, path: Path) -> None:
    """Before the tokenizer manager of this worker is made: have it know what the engine's front end knows.

    ``path`` is where the front end listens.
    """
    from sglang.srt.entrypoints import http_server

    worker_class, label = http_server.get_tokenizer_worker_class, Label(path)

    def following(server_args: Any) -> type:
        shared = {"_weightsync_label": label, "_weightsync_elsewhere": elsewhere}
        return type("FollowingWorker", (_Following, worker_class(server_args)), shared)

    http_server.get_tokenizer_worker_class = following
    compat.not_ready_from_start()


class _Following:
    """A tokenizer manager whose label, and leave to resume, are those of the engine: it may be started again."""

    _weightsync_label: Label
    _weightsync_elsewhere: Elsewhere
    _weightsync_waits: bool

    @property
    def initial_weights_loaded(self) -> bool:
        """Whether SGLang may warm up, and report itself ready."""
        return not self._weightsync_waits or bool(self._weightsync_label.read())

    @initial_weights_loaded.setter
    def initial_weights_loaded(self, value: bool) -> None:
        self._weightsync_waits = not value

    def config_value(self, name: str) -> Any:
        """A setting of SGLang as it is now."""
        label = self._weightsync_label.read() if name == "weight_version" else ""
        return label or self._weightsync_own().config_value(name)

    def _weightsync_own(self) -> Any:
        return super()  # SGLang's tokenizer manager

    def _update_weight_version_if_provided(self, weight_version: str | None) -> None:
        """Called for SGLang's own ways to load weights."""
        self._weightsync_own()._update_weight_version_if_provided(weight_version)
        if weight_version:
            self._weightsync_label.write(weight_version)

    async def continue_generation(self, *args: Any, **kwargs: Any) -> Any:
        """Resume, unless the engine has weights that it must not serve."""
        if reason := await self._weightsync_elsewhere.stopped():
            from starlette.exceptions import HTTPException

            raise HTTPException(503, f"weightsync: {reason}")
        return await self._weightsync_own().continue_generation(*args, **kwargs)
