"""Fields of messages; messages to bytes and back. Reading raises one kind of error, whatever the bytes are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec

MAX_TEXT_CHARS: Final = 1024
#: Names, labels and addresses that are kept, logged, or told to others.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
#: torch has no tensor of more dimensions.
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)]

M = TypeVar("M")

_encode_json = msgspec.json.Encoder()


def to_json(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """HTTP body of a message."""
    return _encode_json.encode(message)


def from_json(body: bytes | str, kind: type[M]) -> M:
    """Message of type ``kind``. Raises `msgspec.MsgspecError`, whatever the body is."""
    return readable(lambda: msgspec.json.decode(body, type=kind))


def readable(decode: Callable[[], M]) -> M:
    """What ``decode`` gives. Raises `msgspec.MsgspecError`."""
    try:
        return decode()
    except (UnicodeError, RecursionError) as error:  # text that is none, and nesting without end
        raise msgspec.DecodeError(f"not a message: {error}") from error
