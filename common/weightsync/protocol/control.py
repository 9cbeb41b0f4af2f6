"""Messages between a sender and an engine's ranks: msgpack over ZMQ. `http` has all others, and the rules."""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from weightsync.errors import TransferFailed
from weightsync.protocol import codec
from weightsync.protocol.codec import Shape
from weightsync.protocol.http import Message

_T = TypeVar("_T")
_encode_msgpack = msgspec.msgpack.Encoder()
#: The protocol's minor version from which ranks know `BucketReady.begins`.
ANY_ORDER_MINOR: Final = 3
#: The minor version from which they know `http.UpdateRequest.domains`.
SEVERAL_HOSTS_MINOR: Final = 5
#: The minor version from which they can read in place what several trainer processes hold.
SHARED_SHARDS_MINOR: Final = 6
#: The minor version from which they pass on buckets of which several hosts hold parts.
PASS_ON_PARTS_MINOR: Final = 6
#: In place of a handle: the other side has it already, or does not need one.
NO_HANDLE: Final = msgspec.Raw(b"\xc0")


def raw_handle(handle: msgspec.Struct | None) -> msgspec.Raw:
    """Encode a memory handle as a field of a message; `NO_HANDLE` for None."""
    return msgspec.Raw(_encode_msgpack.encode(handle)) if handle is not None else NO_HANDLE


def handle_of(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[_T], owner: str) -> _T:
    """Decode what `raw_handle` encoded, with a transport's ``decoder``.

    Raises `TransferFailed`, naming the ``owner`` of the memory, if that is not possible.
    """
    try:
        return codec.readable(lambda: decoder.decode(raw))
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"the memory handle of {owner} cannot be decoded: {error}") from error


class Register(Message, frozen=True, tag="hello"):
    """rank -> sender: I was asked to prepare this push, and I listen now. ``secret`` proves it.

    ``mapped`` names the arenas that this rank has mapped. ``keeps`` is the name of its subset, empty if it needs all
    tensors in full; ``parts`` is that subset's table, see `subset.Subset`: number of the tensor, start and shape.
    """

    push: str
    secret: str
    rank: int
    mapped: tuple[str, ...] = ()
    keeps: str = ""
    parts: tuple[tuple[int, tuple[Shape, Shape]], ...] | None = None


class DescribeSubset(Message, frozen=True, tag="explain"):
    """sender -> rank: I do not know your subset; register again, with ``parts``."""

    push: str


class Offer(Message, frozen=True, tag="offer"):
    """sender -> rank: bucket k lies in slot k modulo `http.UpdateRequest.slots` of this arena.

    ``handle`` is the arena's handle, see `raw_handle`: none if this rank has it, or if the sender moves the bytes.
    ``alive`` names all arenas that the sender still has; the rank unmaps the others. ``others`` are the handles of the
    other memory domains' arenas, if there are several, see `http.UpdateRequest.domains`.
    """

    push: str
    arena: str
    handle: msgspec.Raw = NO_HANDLE
    alive: tuple[str, ...] = ()
    others: tuple[msgspec.Raw, ...] = ()


class BucketReady(Message, frozen=True, tag="filled"):
    """sender -> rank: bucket ``index`` can be read.

    ``digests`` are those of the tensors that end in this bucket, or of what the rank needs of them, in order.
    ``sender`` is the trainer rank that sends the bucket, if the rank does not read it from the arena. ``begins`` has
    the numbers of the tensors that begin in it, in order, if they come in any order, see `http.UpdateRequest`.
    ``digest`` is that of all that the rank needs of the bucket, if ranks pass it on.
    """

    push: str
    index: int
    digests: tuple[int, ...] = ()
    sender: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="lane", default=0)
    begins: tuple[int, ...] = ()
    digest: int | None = None


class Supplied(Message, frozen=True, tag="supplied"):
    """sender -> rank: from now on, buckets are written by this ``agent`` too, that of another rank, ``name`` in errors.

    Tell me of every bucket that you have verified. Without an agent, the sender itself writes again.
    """

    push: str
    agent: str = ""
    name: str = ""


class PassOn(Message, frozen=True, tag="pass_on"):
    """sender -> rank: write every bucket from ``first`` on that you have verified to the memory of ``handle`` too.

    It is that of the rank with this number of this engine; without a handle, stop. Tell me of every bucket that you
    have verified.
    """

    push: str
    engine: str
    rank: int
    handle: msgspec.Raw = NO_HANDLE
    first: int = 0


class Heartbeat(Message, frozen=True, tag="still"):
    """sender -> rank: the push is alive. There is no answer; sending it fails if the rank is gone."""

    push: str


class BucketDone(Message, frozen=True, tag="taken"):
    """rank -> sender: I no longer need bucket ``index``; its slot may be written again."""

    push: str
    index: int


class WriteWindow(Message, frozen=True, tag="room"):
    """rank -> sender: you may write each bucket k below ``upto`` to slot k modulo ``slots`` of my memory.

    ``handle`` is the handle of that memory, see `raw_handle`: none if only ``upto`` has grown. ``domains`` are the
    memory domains that are to write; the rank reads from the others.
    """

    push: str
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    upto: Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
    handle: msgspec.Raw = NO_HANDLE
    domains: tuple[int, ...] = (0,)


class Prepared(Message, frozen=True, tag="prepared"):
    """rank -> sender: the whole stream has arrived and is verified, which took ``verify_s`` seconds."""

    push: str
    verify_s: float = 0.0


class Failed(Message, frozen=True, tag="failed"):
    """Either side: this push has failed. ``error`` is the name of a class in `weightsync.errors`."""

    push: str
    error: str
    message: str


FromRank = Register | BucketDone | WriteWindow | Prepared | Failed
FromSender = Offer | DescribeSubset | BucketReady | Supplied | PassOn | Heartbeat | Failed

_from_rank: msgspec.msgpack.Decoder[FromRank] = codec.msgpack_decoder(FromRank)
_from_sender: msgspec.msgpack.Decoder[FromSender] = codec.msgpack_decoder(FromSender)


def pack(message: FromRank | FromSender) -> bytes:
    """Encode a message as a ZMQ frame."""
    return _encode_msgpack.encode(message)


def unpack_from_rank(frame: bytes) -> FromRank:
    """Decode a message of an engine rank. Raises `msgspec.MsgspecError` for any invalid frame."""
    return codec.readable(lambda: _from_rank.decode(frame))


def unpack_from_sender(frame: bytes) -> FromSender:
    """Decode a message of a sender. Raises `msgspec.MsgspecError` for any invalid frame."""
    return codec.readable(lambda: _from_sender.decode(frame))
