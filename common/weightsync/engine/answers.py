"""Answers to a sender's messages, the same over HTTP and within one process.

`answer` adds decoding and error replies to a `front_end.FrontEnd`. An exception never reaches the engine: it becomes an
`ErrorReply`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from weightsync.engine.front_end import FrontEnd
from weightsync.protocol import http
from weightsync.protocol.diagnosis import DiagnoseRequest
from weightsync.protocol.expected import ExpectedRequest
from weightsync.transports import registry

logger = logging.getLogger(__name__)

#: The HTTP status of each error; 500 for all others.
_STATUS: Final = {
    "AuthenticationFailed": 401,
    "PluginNotLoaded": 501,
    "EngineUnreachable": 503,
    "ProtocolMismatch": 426,
    "UnsupportedOption": 422,
    "ManifestMismatch": 422,
    "ManifestUnknown": 409,
    "BaseUnknown": 409,
    "TransferFailed": 409,
    "DigestMismatch": 409,
    "EngineRestarted": 409,
    "LeaseHeld": 409,
    "WrongState": 409,
    "PushTimeout": 504,
}


_Answer = Callable[[FrontEnd, Any], Awaitable[msgspec.Struct]]


class Route(NamedTuple):
    """A route: the type of its message, as a function, because a transport has to be imported for it; its handler."""

    kind: Callable[[], type[msgspec.Struct]]
    answer: _Answer


class Elsewhere(Protocol):
    """The engine's front end is in another server of the same engine."""

    async def pass_on(self, route: str, asked: msgspec.Struct) -> tuple[int, bytes]:
        """What the other server answers to a message to ``route``."""

    async def stopped(self) -> str:
        """Why the engine must not generate; empty if it may."""


def _fixed(kind: type[msgspec.Struct], answer: _Answer) -> Route:
    return Route(lambda: kind, answer)


def _update(method: str) -> Route:
    return _fixed(http.UpdateRequest, lambda front_end, asked: front_end.prepare(asked, method))


def _setup(method: str) -> Route:
    return Route(partial(registry.handshake_of, method), lambda front_end, asked: front_end.join(asked, method))


def routes() -> dict[str, Route]:
    """Every route by name: the fixed ones, and those of the transports."""
    return {
        **{method: _update(method) for method in registry.update_methods()},
        **{method: _setup(method) for method in registry.setup_methods()},
        "status": _fixed(http.StatusRequest, FrontEnd.status),
        "open": _fixed(http.OpenRequest, FrontEnd.open),
        "expected": _fixed(ExpectedRequest, FrontEnd.expected),
        "diagnose": _fixed(DiagnoseRequest, FrontEnd.diagnose),
        "lease": _fixed(http.LeaseRequest, FrontEnd.lease),
        "commit": _fixed(http.CommitRequest, FrontEnd.commit),
        "abort": _fixed(http.AbortRequest, FrontEnd.abort),
    }


class Refused(Exception):
    """A message that no front end sees. ``status`` is that of HTTP, ``error`` the name of an error."""

    def __init__(self, status: int, error: str, message: str):
        super().__init__(message)
        self.status, self.error = status, error


def decoded(body: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    """The message in ``body``. Raises `Refused`."""
    try:
        return http.from_json(body, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unreadable(kind, error) from error


def unreadable(kind: type[msgspec.Struct], error: Exception) -> Refused:
    """The refusal of a message that is no ``kind``."""
    return Refused(400, "TransferFailed", f"not a {kind.__name__}: {error}")


async def answer(
    name: str,
    route: Route,
    front_end: Callable[[], FrontEnd | Elsewhere],
    read: Callable[[type[msgspec.Struct]], Awaitable[msgspec.Struct]],
) -> tuple[int, bytes]:
    """Answer a message to ``route``, whose name is ``name``: the HTTP status and the JSON of the reply.

    ``read`` returns the message, as the type that it is given; both functions may raise what is to be answered.
    """
    try:
        asked = await read(route.kind())
        found = front_end()
        if not isinstance(found, FrontEnd):
            return await found.pass_on(name, asked)
        return 200, http.to_json(await route.answer(found, asked))
    except Refused as error:
        return error.status, http.to_json(http.ErrorReply(error=error.error, message=str(error)))
    except Exception as error:
        reply = http.error_reply(error)
        status = _STATUS.get(reply.error, 500)
        if status == 500:
            logger.exception("%s failed", name)
        return status, http.to_json(reply)
