"""What a sender says of its arena in every push: what Ray's own references to tensors have, and nothing pickled."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from weightsync.protocol import codec
from weightsync.protocol.codec import Text
from weightsync.transports.nixl.messages import Metadata


class RdtHandle(msgspec.Struct, frozen=True, tag="rdt"):
    """Memory of a sender's ``agent``, which others reach by its ``metadata``.

    ``version`` grows whenever that agent has forgotten memory: what others know of it is void then.
    """

    agent: Text
    metadata: Metadata
    version: int
    address: int
    nbytes: int
    device_id: int
    device: Literal["cpu", "cuda"]


HANDLE: Final[msgspec.msgpack.Decoder[RdtHandle | None]] = codec.msgpack_decoder(RdtHandle | None)
