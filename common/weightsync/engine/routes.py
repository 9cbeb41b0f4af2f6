"""The admin routes under ``/weightsync/``, the same for every engine.

The routes add authentication and size limits to `answers`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from starlette.datastructures import URLPath
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Mount, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

from weightsync import observe
from weightsync.engine import answers
from weightsync.engine.answers import Elsewhere
from weightsync.engine.front_end import FrontEnd
from weightsync.errors import AuthenticationFailed
from weightsync.protocol import auth, codec, http

#: Health routes of the engines; SageMaker calls ``/ping``.
_HEALTH: Final = ("/health", "/health_generate", "/ready", "/ping")


def admin_routes(front_end: Callable[[], FrontEnd | Elsewhere], token: str) -> Mount:
    """The routes of an engine; ``front_end()`` is called for each request. ``token`` is never logged."""
    return Mount(
        http.PREFIX,
        routes=[
            Route(f"/{name}", _endpoint(name, route, front_end, token), methods=["POST", *["GET"] * (name == "status")])
            for name, route in answers.routes().items()
        ],
    )


class HealthGuard(BaseRoute):
    """Answers the engine's health routes with 503 while the engine must not serve.

    Put it before the engine's own routes, which answer at all other times.
    """

    def __init__(self, front_end: Callable[[], FrontEnd | Elsewhere | None]):
        self._front_end = front_end

    async def _reason(self) -> str:
        found = self._front_end()
        if found is None:
            return ""
        return found.stopped if isinstance(found, FrontEnd) else await found.stopped()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match a health route while the engine must not serve, or if another server knows whether it must."""
        asked = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) in _HEALTH
        found = self._front_end() if asked else None
        serves = found is None or (isinstance(found, FrontEnd) and not found.stopped)
        return (Match.NONE if serves else Match.FULL), {}

    def url_path_for(self, name: str, /, **path_params: Any) -> URLPath:
        """This route has no name."""
        raise NoMatchFound(name, path_params)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 with the reason; without one, as the engine does."""
        if reason := await self._reason():
            await JSONResponse({"error": reason}, 503)(scope, receive, send)
            return
        for route in scope["app"].router.routes:
            match, more = route.matches(scope)
            if route is not self and match is not Match.NONE:
                scope.update(more)
                await route.handle(scope, receive, send)
                return
        await scope["app"].router.default(scope, receive, send)


def _endpoint(
    name: str, route: answers.Route, front_end: Callable[[], FrontEnd | Elsewhere], token: str
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        async def read(kind: type[msgspec.Struct]) -> msgspec.Struct:
            _authenticate(request, token)
            return await _read(request, kind)

        with observe.joined(request.headers):
            status, reply = await answers.answer(name, route, front_end, read)
        return Response(reply, status, media_type="application/json")

    return endpoint


def _authenticate(request: Request, token: str) -> None:
    if not auth.same(auth.shown_key(request.headers.get("authorization", "")), token):
        raise AuthenticationFailed("unauthorized")


async def _read(request: Request, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Decode the message: the body of a POST, or the query of a GET (``?digest=1``)."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > http.MAX_BODY_BYTES:
            raise answers.Refused(413, "TransferFailed", f"the message is larger than {http.MAX_BODY_BYTES} bytes")
    if request.method == "POST":
        return answers.decoded(bytes(body), kind)
    try:
        return codec.from_query(request.query_params, kind)
    except msgspec.MsgspecError as error:
        raise answers.unreadable(kind, error) from error
