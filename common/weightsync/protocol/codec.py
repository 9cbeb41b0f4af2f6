"""Types of message fields, encoding and decoding. Decoding raises `msgspec.MsgspecError` for any invalid bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeVar

import msgspec

MAX_TEXT_CHARS: Final = 1024
#: Names, labels and addresses that are stored, logged or sent on.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
#: A tensor's shape; torch allows at most 64 dimensions.
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)]

M = TypeVar("M")

_encode_json = msgspec.json.Encoder()


def to_json(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """Encode a message, or a sequence of them, as an HTTP body."""
    return _encode_json.encode(message)


def from_json(body: bytes | str, kind: type[M]) -> M:
    """Decode an HTTP body as a message of type ``kind``. Raises `msgspec.MsgspecError` for any invalid body."""
    return readable(lambda: msgspec.json.decode(body, type=kind))


def readable(decode: Callable[[], M]) -> M:
    """Return the result of ``decode``, with every decoding failure raised as `msgspec.MsgspecError`."""
    try:
        return decode()
    except (UnicodeError, RecursionError) as error:  # invalid UTF-8, or nesting that is too deep
        raise msgspec.DecodeError(f"not a message: {error}") from error
