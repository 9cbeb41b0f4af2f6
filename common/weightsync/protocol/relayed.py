"""Messages to an engine that its own calls carry, because a trainer reaches it by these alone.

Such calls take a dictionary and return nothing, so the engine sends its reply to a ZMQ socket of the trainer: the HTTP
status as text, and the body.
"""

from __future__ import annotations

from typing import Final

import msgspec

from weightsync.protocol import http

#: The key of the dictionary under which `Relayed` is.
FIELD: Final = "weightsync"


class Relayed(http.Message, frozen=True, kw_only=True):
    """A message to the admin route ``route``, whose JSON is ``body``.

    ``token`` is the key. Only the engine whose instance is ``engine`` answers; if it is empty, each that gets the
    message. A reply goes to ``reply_to``, ``"tcp://IP:port"``, which has the public CURVE key ``server_key``. It is
    waited for ``timeout_s``.
    """

    route: str
    body: str
    token: str
    engine: str
    reply_to: str
    server_key: str
    timeout_s: http.Timeout = http.MAX_TIMEOUT_S


def wrapped(message: Relayed) -> dict[str, str]:
    """The dictionary that carries a message."""
    return {FIELD: http.to_json(message).decode()}


def unwrapped(carried: object) -> Relayed:
    """The message in a dictionary. Raises `msgspec.MsgspecError` if there is none."""
    text = carried.get(FIELD) if isinstance(carried, dict) else None
    if not isinstance(text, str):
        raise msgspec.ValidationError(f"there is no text under {FIELD!r}")
    return http.from_json(text.encode(), Relayed)
