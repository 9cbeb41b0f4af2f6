"""The admin routes under ``/weightsync/``, the same for every engine.

The routes add the key, limits, decoding and errors to a `replica.Replica`. Nothing in a route can stop the engine:
whatever goes wrong becomes an `ErrorReply`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Mount, Route
from starlette.types import Receive, Scope, Send

from weightsync import security, wire
from weightsync.errors import AuthenticationFailed
from weightsync.receiver import error_reply
from weightsync.replica import Replica

logger = logging.getLogger(__name__)

_STATUS: Final = {
    "AuthenticationFailed": 401,
    "PluginNotLoaded": 501,
    "ProtocolMismatch": 426,
    "UnsupportedOption": 422,
    "ManifestMismatch": 422,
    "TransferFailed": 409,
    "DigestMismatch": 409,
    "EngineRestarted": 409,
    "LeaseHeld": 409,
    "WrongState": 409,
    "PushTimeout": 504,
}
#: Every message that a trainer may send: route -> what it carries, and who answers.
_ROUTES: Final[
    dict[str, tuple[type[msgspec.Struct], Callable[[Replica], Callable[[Any], Awaitable[msgspec.Struct]]]]]
] = {
    "status": (wire.StatusRequest, lambda replica: replica.status),
    "open": (wire.OpenRequest, lambda replica: replica.open),
    "update_weights_via_ipc_zmq": (wire.IpcPrepare, lambda replica: replica.prepare),
    "lease": (wire.LeaseRequest, lambda replica: replica.lease),
    "commit": (wire.CommitRequest, lambda replica: replica.commit),
    "abort": (wire.AbortRequest, lambda replica: replica.abort),
}

_Q = TypeVar("_Q", bound=msgspec.Struct)


class _Refused(Exception):
    def __init__(self, status: int, error: str, message: str):
        super().__init__(message)
        self.status, self.error = status, error


def admin_routes(replica: Callable[[], Replica], token: str) -> Mount:
    """The routes for an engine, ``replica()`` once it serves; ``token`` is never logged."""
    return Mount(
        wire.PREFIX,
        routes=[Route(f"/{name}", _endpoint(name, replica, token), methods=["POST"]) for name in _ROUTES],
    )


def guard_health(routes: list[Any], replica: Callable[[], Replica | None], path: str = "/health") -> None:
    """Make the engine's own health route say 503 while it holds weights that it must not serve."""

    async def health(scope: Scope, receive: Receive, send: Send) -> None:
        found = replica()
        if found is not None and (reason := found.stopped):
            await JSONResponse({"error": reason}, 503)(scope, receive, send)
            return
        for route in routes:
            if route is not guard and route.matches(scope)[0] is Match.FULL:
                await route.handle(scope, receive, send)
                return
        await Response(status_code=404)(scope, receive, send)

    guard = Route(path, _Health(health))
    routes.insert(0, guard)


class _Health:
    """An ASGI application, which a function would not be to Starlette's `Route`."""

    def __init__(self, run: Callable[[Scope, Receive, Send], Awaitable[None]]):
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


def _endpoint(name: str, replica: Callable[[], Replica], token: str) -> Callable[[Request], Awaitable[Response]]:
    kind, answerer = _ROUTES[name]

    async def endpoint(request: Request) -> Response:
        try:
            _authenticate(request, token)
            asked = await _read(request, kind)
            return _response(await answerer(replica())(asked), 200)
        except _Refused as error:
            status, reply = error.status, wire.ErrorReply(error=error.error, message=str(error))
        except Exception as error:
            reply = error_reply(error)
            status = _STATUS.get(reply.error, 500)
            if status == 500:
                logger.exception("%s failed", request.url.path)
        return _response(reply, status)

    return endpoint


def _response(reply: msgspec.Struct, status: int) -> Response:
    return Response(wire.to_json(reply), status, media_type="application/json")


def _authenticate(request: Request, token: str) -> None:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not security.same(shown, token):
        raise AuthenticationFailed("unauthorized")


async def _read(request: Request, kind: type[_Q]) -> _Q:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > wire.MAX_BODY_BYTES:
            raise _Refused(413, "TransferFailed", f"the message is larger than {wire.MAX_BODY_BYTES} bytes")
    try:
        return wire.from_json(bytes(body), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Refused(400, "TransferFailed", f"not a {kind.__name__}: {error}") from error
