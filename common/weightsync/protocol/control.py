"""Messages between a sender and an engine's ranks, over ZMQ in msgpack; `http` has all others, and the rules."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from weightsync.errors import TransferFailed
from weightsync.protocol import codec
from weightsync.protocol.codec import Shape
from weightsync.protocol.http import Message

_T = TypeVar("_T")
_encode_msgpack = msgspec.msgpack.Encoder()
#: Of memory that the other side knows, or that it need not reach.
NO_HANDLE: Final = msgspec.Raw(b"\xc0")


def raw_handle(handle: msgspec.Struct | None) -> msgspec.Raw:
    """What says how to reach memory, as a field of a message."""
    return msgspec.Raw(_encode_msgpack.encode(handle)) if handle is not None else NO_HANDLE


def handle_of(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[_T], whose: str) -> _T:
    """What `raw_handle` made, as a transport's own ``decoder`` reads it. Raises `TransferFailed`."""
    try:
        return codec.readable(lambda: decoder.decode(raw))
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"what {whose} says of its memory cannot be read: {error}") from error


class Register(Message, frozen=True, tag="hello"):
    """rank -> sender: I was asked to prepare, and I am listening; ``mapped`` names the arenas I have mapped.

    ``keeps`` is the name of what I keep of the tensors, empty if that is all; ``parts`` says it, see `subset.Subset`:
    number of the tensor, start and shape.
    """

    push: str
    secret: str
    rank: int
    mapped: tuple[str, ...] = ()
    keeps: str = ""
    parts: tuple[tuple[int, tuple[Shape, Shape]], ...] | None = None


class DescribeSubset(Message, frozen=True, tag="explain"):
    """sender -> rank: I do not know what you keep; say hello again, with ``parts``."""

    push: str


class Offer(Message, frozen=True, tag="offer"):
    """sender -> rank: bucket k lies in slot k modulo `http.UpdateRequest.slots` of this arena.

    ``handle``, see `raw_handle`, says how to reach it: none where this rank knows, or where the bytes come by
    themselves.
    ``alive`` names all arenas that the sender still has, so that others can be unmapped.
    """

    push: str
    arena: str
    handle: msgspec.Raw = NO_HANDLE
    alive: tuple[str, ...] = ()


class BucketReady(Message, frozen=True, tag="filled"):
    """sender -> rank: bucket ``index`` can be read; ``digests`` are of what is kept of the tensors that end in it.

    ``lane`` is the rank of the trainer that sends it, where it does not lie where the rank reads.
    """

    push: str
    index: int
    digests: tuple[int, ...] = ()
    lane: Annotated[int, msgspec.Meta(ge=0)] = 0


class Heartbeat(Message, frozen=True, tag="still"):
    """sender -> rank: the push goes on; there is nothing to answer. A rank that is gone cannot be sent it."""

    push: str


class BucketDone(Message, frozen=True, tag="taken"):
    """rank -> sender: bucket ``index`` is no longer needed where the sender keeps it."""

    push: str
    index: int


class WriteWindow(Message, frozen=True, tag="room"):
    """rank -> sender: write bucket k, below ``upto``, to slot k modulo ``slots`` of my memory.

    ``handle``, see `raw_handle`, says how to reach it: none where only ``upto`` has grown.
    """

    push: str
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    upto: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    handle: msgspec.Raw = NO_HANDLE


class Prepared(Message, frozen=True, tag="prepared"):
    """rank -> sender: the whole stream is here; verifying it took ``verify_s`` seconds."""

    push: str
    verify_s: float = 0.0


class Failed(Message, frozen=True, tag="failed"):
    """Either side: this push is over. ``error`` is a class name of `weightsync.errors`."""

    push: str
    error: str
    message: str


FromRank = Register | BucketDone | WriteWindow | Prepared | Failed
FromSender = Offer | DescribeSubset | BucketReady | Heartbeat | Failed

_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_from_sender: msgspec.msgpack.Decoder[FromSender] = msgspec.msgpack.Decoder(FromSender)


def pack(message: FromRank | FromSender) -> bytes:
    """ZMQ frame of a message."""
    return _encode_msgpack.encode(message)


def unpack_from_rank(frame: bytes) -> FromRank:
    """Message of an engine rank. Raises as `from_json`."""
    return codec.readable(lambda: _from_rank.decode(frame))


def unpack_from_sender(frame: bytes) -> FromSender:
    """Message of a sender. Raises as `from_json`."""
    return codec.readable(lambda: _from_sender.decode(frame))
