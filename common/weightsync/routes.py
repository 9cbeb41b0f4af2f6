"""The admin routes under ``/weightsync/``, the same for every engine.

Each engine package provides a `FrontEnd`; the routes add the key, limits, decoding and errors. Nothing in a route can
stop the engine: whatever goes wrong becomes an `ErrorReply`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from weightsync import security, staging, wire
from weightsync.errors import AuthenticationFailed, ProtocolMismatch, UnsupportedOption
from weightsync.receiver import collect, error_reply

logger = logging.getLogger(__name__)

_STATUS: Final = {
    "AuthenticationFailed": 401,
    "PluginNotLoaded": 501,
    "ProtocolMismatch": 426,
    "UnsupportedOption": 422,
    "ManifestMismatch": 422,
    "TransferFailed": 409,
    "PushTimeout": 504,
}

#: From harmless to worst: an engine is in the worst state of its ranks.
_STATES: Final[tuple[wire.State, ...]] = ("serving", "receiving", "prepared", "applying", "dirty")

_Q = TypeVar("_Q", bound=msgspec.Struct)


class FrontEnd(Protocol):
    """What the process that serves HTTP must offer; errors are `WeightSyncError` or become `ApplyFailed`."""

    engine: str
    engine_version: str
    model: str
    pause_refused: dict[str, str]
    """Why the engine lacks a pause mode, by mode."""

    @property
    def dirty(self) -> bool:
        """Whether a commit failed half-way; the engine then stays paused until one succeeds."""

    async def version(self) -> str:
        """Label of the weights that are served."""

    async def call(self, method: str, payload: bytes) -> Sequence[bytes | str]:
        """Run `receiver.handle` on every rank; the `wire.RankReply` of each."""

    async def commit(self, request: wire.CommitRequest) -> wire.CommitReply:
        """Stop, apply, drop caches, set the version, go on. Must end in a state that `status` tells truly."""


class _Refused(Exception):
    def __init__(self, status: int, error: str, message: str):
        super().__init__(message)
        self.status, self.error = status, error


def admin_routes(front: Callable[[], FrontEnd], token: str) -> Mount:
    """The routes for an engine whose front end ``front()`` returns once it serves; ``token`` is never logged."""
    admin = _Admin(front, token)
    posts: dict[str, Callable[[Request], Awaitable[msgspec.Struct]]] = {
        "status": admin.status,
        "open": admin.open,
        "update_weights_via_ipc_zmq": admin.update_weights_via_ipc_zmq,
        "commit": admin.commit,
        "abort": admin.abort,
    }
    return Mount(
        wire.PREFIX, routes=[Route(f"/{name}", admin.guarded(run), methods=["POST"]) for name, run in posts.items()]
    )


def _response(reply: msgspec.Struct, status: int) -> Response:
    return Response(wire.to_json(reply), status, media_type="application/json")


class _Admin:
    def __init__(self, front: Callable[[], FrontEnd], token: str):
        self._front = front
        self._token = token
        self._one_at_a_time = asyncio.Lock()

    def guarded(self, run: Callable[[Request], Awaitable[msgspec.Struct]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._authenticate(request)
                return _response(await run(request), 200)
            except _Refused as error:
                status, reply = error.status, wire.ErrorReply(error=error.error, message=str(error))
            except Exception as error:
                reply = error_reply(error)
                status = _STATUS.get(reply.error, 500)
                if status == 500:
                    logger.exception("%s failed", request.url.path)
            return _response(reply, status)

        return endpoint

    def _authenticate(self, request: Request) -> None:
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not security.same(shown, self._token):
            raise AuthenticationFailed("unauthorized")

    async def _read(self, request: Request, kind: type[_Q]) -> _Q:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > wire.MAX_BODY_BYTES:
                raise _Refused(413, "TransferFailed", f"the message is larger than {wire.MAX_BODY_BYTES} bytes")
        try:
            return wire.from_json(bytes(body), kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _Refused(400, "TransferFailed", f"not a {kind.__name__}: {error}") from error

    async def open(self, request: Request) -> wire.OpenReply:
        theirs = (await self._read(request, wire.OpenRequest)).protocol
        front = self._front()
        if theirs[0] != wire.PROTOCOL[0]:
            raise ProtocolMismatch(
                f"the sender speaks protocol {theirs[0]}.{theirs[1]}, this engine "
                f"{wire.PROTOCOL[0]}.{wire.PROTOCOL[1]} (weightsync {wire.PACKAGE_VERSION}); install the same "
                "weightsync on both sides"
            )
        ranks = collect(await front.call("weightsync_open", b"{}"), wire.RankInfo)
        return wire.OpenReply(
            protocol=wire.PROTOCOL,
            engine=front.engine,
            engine_version=front.engine_version,
            package_version=wire.PACKAGE_VERSION,
            host=staging.host_id(),
            model=front.model,
            version=await front.version(),
            ranks=tuple(ranks),
            pause_refused=front.pause_refused,
        )

    async def status(self, request: Request) -> wire.StatusReply:
        asked = await self._read(request, wire.StatusRequest)
        front = self._front()
        ranks = collect(await front.call("weightsync_status", wire.to_json(asked)), wire.RankStatus)
        worst = max(("dirty" if front.dirty else "serving", *(rank.state for rank in ranks)), key=_STATES.index)
        return wire.StatusReply(engine=front.engine, version=await front.version(), state=worst, ranks=tuple(ranks))

    async def update_weights_via_ipc_zmq(self, request: Request) -> wire.Done:
        asked = await self._read(request, wire.IpcPrepare)
        async with self._one_at_a_time:
            collect(await self._front().call("update_weights_via_ipc_zmq", wire.to_json(asked)), wire.Done)
        return wire.Done()

    async def commit(self, request: Request) -> wire.CommitReply:
        asked = await self._read(request, wire.CommitRequest)
        front = self._front()
        if reason := front.pause_refused.get(asked.pause):
            raise UnsupportedOption(f"{front.engine} cannot pause with {asked.pause!r}: {reason}")

        async def run() -> wire.CommitReply:
            async with self._one_at_a_time:
                return await front.commit(asked)

        # Once begun it runs to its end, also when the trainer hangs up or dies.
        return await asyncio.shield(asyncio.ensure_future(run()))

    async def abort(self, request: Request) -> wire.Done:
        asked = await self._read(request, wire.AbortRequest)
        async with self._one_at_a_time:
            collect(await self._front().call("weightsync_abort", wire.to_json(asked)), wire.Done)
        return wire.Done()
