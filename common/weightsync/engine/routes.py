"""The admin routes under ``/weightsync/``, the same for every engine.

The routes add authentication, size limits, decoding and error replies to a `front_end.FrontEnd`. An exception in a
route never reaches the engine: it becomes an `ErrorReply`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import URLPath
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

from weightsync.engine.front_end import FrontEnd
from weightsync.errors import AuthenticationFailed
from weightsync.protocol import auth, http
from weightsync.transports import registry

logger = logging.getLogger(__name__)

_STATUS: Final = {
    "AuthenticationFailed": 401,
    "PluginNotLoaded": 501,
    "EngineUnreachable": 503,
    "ProtocolMismatch": 426,
    "UnsupportedOption": 422,
    "ManifestMismatch": 422,
    "ManifestUnknown": 409,
    "TransferFailed": 409,
    "DigestMismatch": 409,
    "EngineRestarted": 409,
    "LeaseHeld": 409,
    "WrongState": 409,
    "PushTimeout": 504,
}


_Answer = Callable[[FrontEnd, Any], Awaitable[msgspec.Struct]]


class _Route(NamedTuple):
    """A route: the type of its message, as a function, because a transport has to be imported for it; its handler."""

    kind: Callable[[], type[msgspec.Struct]]
    answer: _Answer


def _fixed(kind: type[msgspec.Struct], answer: _Answer) -> _Route:
    return _Route(lambda: kind, answer)


def _update(method: str) -> _Route:
    return _fixed(http.UpdateRequest, lambda front_end, asked: front_end.prepare(asked, method))


def _setup(method: str) -> _Route:
    return _Route(partial(registry.handshake_of, method), lambda front_end, asked: front_end.join(asked, method))


def routes() -> dict[str, _Route]:
    """Every route by name: the fixed ones, and those of the transports."""
    return {
        **{method: _update(method) for method in registry.update_methods()},
        **{method: _setup(method) for method in registry.setup_methods()},
        "status": _fixed(http.StatusRequest, FrontEnd.status),
        "open": _fixed(http.OpenRequest, FrontEnd.open),
        "lease": _fixed(http.LeaseRequest, FrontEnd.lease),
        "commit": _fixed(http.CommitRequest, FrontEnd.commit),
        "abort": _fixed(http.AbortRequest, FrontEnd.abort),
    }


#: Health routes of the engines; SageMaker calls ``/ping``.
_HEALTH: Final = ("/health", "/health_generate", "/ping")

_Q = TypeVar("_Q", bound=msgspec.Struct)


class _Refused(Exception):
    def __init__(self, status: int, error: str, message: str):
        super().__init__(message)
        self.status, self.error = status, error


def admin_routes(front_end: Callable[[], FrontEnd], token: str) -> Mount:
    """The routes of an engine; ``front_end()`` is called for each request. ``token`` is never logged."""
    return Mount(
        http.PREFIX,
        routes=[
            Route(f"/{name}", _endpoint(route, front_end, token), methods=["POST", *["GET"] * (name == "status")])
            for name, route in routes().items()
        ],
    )


class HealthGuard(BaseRoute):
    """Answers the engine's health routes with 503 while the engine must not serve.

    Put it before the engine's own routes, which answer at all other times.
    """

    def __init__(self, front_end: Callable[[], FrontEnd | None]):
        self._front_end = front_end

    def _reason(self) -> str:
        front_end = self._front_end()
        return front_end.stopped if front_end is not None else ""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a health route while the engine must not serve."""
        asked = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in _HEALTH
        return (Match.FULL if asked and self._reason() else Match.NONE), {}

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """This route has no name."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 with the reason."""
        await JSONResponse({"error": self._reason()}, 503)(scope, receive, send)


def _endpoint(route: _Route, front_end: Callable[[], FrontEnd], token: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            _authenticate(request, token)
            asked = await _read(request, route.kind())
            return _response(await route.answer(front_end(), asked), 200)
        except _Refused as error:
            status, reply = error.status, http.ErrorReply(error=error.error, message=str(error))
        except Exception as error:
            reply = http.error_reply(error)
            status = _STATUS.get(reply.error, 500)
            if status == 500:
                logger.exception("%s failed", request.url.path)
        return _response(reply, status)

    return endpoint


def _response(reply: msgspec.Struct, status: int) -> Response:
    return Response(http.to_json(reply), status, media_type="application/json")


def _authenticate(request: Request, token: str) -> None:
    if not auth.same(auth.shown_key(request.headers.get("authorization", "")), token):
        raise AuthenticationFailed("unauthorized")


async def _read(request: Request, kind: type[_Q]) -> _Q:
    """Decode the message: the body of a POST, or the query of a GET (``?digest=1``)."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > http.MAX_BODY_BYTES:
            raise _Refused(413, "TransferFailed", f"the message is larger than {http.MAX_BODY_BYTES} bytes")
    try:
        if request.method != "POST":
            return msgspec.convert(dict(request.query_params), kind, strict=False)
        return http.from_json(bytes(body), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Refused(400, "TransferFailed", f"not a {kind.__name__}: {error}") from error
