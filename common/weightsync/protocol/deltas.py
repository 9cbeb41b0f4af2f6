"""What crosses in place of a whole version: the field ``delta`` of `http.UpdateRequest`, and the stream's index."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from weightsync.protocol import codec
from weightsync.protocol.codec import Text

#: The protocol's minor version from which ranks know `http.UpdateRequest.delta`.
DELTA_MINOR: Final = 9
_Nbytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class DeltaSpec(msgspec.Struct, frozen=True):
    """A stream of what has changed since the bytes named ``base``, see `http.UpdateRequest.content`.

    It is ``index_nbytes`` of an `Index`, encoded as msgpack, and ``nbytes`` of changes, as two tensors of a stream of
    its own, in buckets of ``bucket_bytes``, which the sender's arena has ``slots`` of. The request's own bucket size is
    that of the version: each of its buckets is verified as if it had crossed.
    """

    base: Text
    index_nbytes: _Nbytes
    nbytes: _Nbytes
    bucket_bytes: Annotated[int, msgspec.Meta(ge=512, le=1 << 50, multiple_of=512)]
    slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """Tensor ``number`` of the manifest is not what it was: the next ``nbytes`` of the changes are all of it, if
    ``whole``, otherwise a delta, see `tensors.delta`."""

    number: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: _Nbytes
    whole: bool


class Index(msgspec.Struct, frozen=True):
    """The tensors that changed, in the order of their changes.

    ``digests`` has those of the tensors that end in each bucket of the version, by the name of a subset, as
    `control.BucketReady.digests` would.
    """

    changed: tuple[Changed, ...]
    digests: dict[Text, tuple[tuple[int, ...], ...]]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Index]] = codec.msgpack_decoder(Index)


def pack_index(index: Index) -> bytes:
    """Encode an index."""
    return _encoder.encode(index)


def unpack_index(packed: bytes) -> Index:
    """Decode an index. Raises `msgspec.MsgspecError` for any invalid bytes."""
    return codec.readable(lambda: _decoder.decode(packed))
