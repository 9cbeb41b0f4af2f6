"""Types of message fields, encoding and decoding. Decoding raises `msgspec.MsgspecError` for any invalid bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec

MAX_TEXT_CHARS: Final = 1024
#: Names, labels and addresses that are stored, logged or sent on.
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
#: A tensor's shape; torch allows at most 64 dimensions.
Shape = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=64)]

M = TypeVar("M")
D = TypeVar("D")

_encode_json = msgspec.json.Encoder()
#: Held while msgspec learns a type. While one thread does that, another that decodes the same type, or one that has it
#: in a field, would crash the process.
_LEARNING: Final = threading.Lock()
_JSON: dict[Any, msgspec.json.Decoder[Any]] = {}
_MSGPACK: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def to_json(message: msgspec.Struct | Sequence[msgspec.Struct]) -> bytes:
    """Encode a message, or a sequence of them, as an HTTP body."""
    return _encode_json.encode(message)


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder of messages of type ``kind``, which is kept. All decoders are made here, see `_LEARNING`."""
    return _learned(_JSON, msgspec.json.Decoder, kind)


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """As `json_decoder`, for MessagePack."""
    return _learned(_MSGPACK, msgspec.msgpack.Decoder, kind)


def _learned(known: dict[Any, D], make: Callable[[Any], D], kind: Any) -> D:
    if kind not in known:
        with _LEARNING:
            known[kind] = make(kind)
    return known[kind]


def from_json(body: bytes | str, kind: type[M]) -> M:
    """Decode an HTTP body as a message of type ``kind``. Raises `msgspec.MsgspecError` for any invalid body."""
    decoder: msgspec.json.Decoder[M] = json_decoder(kind)
    return readable(lambda: decoder.decode(body))


def from_query(fields: Mapping[str, str], kind: type[M]) -> M:
    """Read a message of type ``kind`` from the parameters of a URL. Raises as `from_json`."""
    return from_plain(dict(fields), kind, strict=False)


def from_plain(values: Mapping[str, Any], kind: type[M], *, strict: bool = True) -> M:
    """Read a struct of type ``kind`` from JSON that was decoded; text may stand for numbers if not ``strict``. Raises
    as `from_json`."""
    json_decoder(kind)  # which has msgspec learn the type
    return readable(lambda: msgspec.convert(values, kind, strict=strict))


def readable(decode: Callable[[], M]) -> M:
    """Return the result of ``decode``, with every decoding failure raised as `msgspec.MsgspecError`."""
    try:
        return decode()
    except (UnicodeError, RecursionError) as error:  # invalid UTF-8, or nesting that is too deep
        raise msgspec.DecodeError(f"not a message: {error}") from error
