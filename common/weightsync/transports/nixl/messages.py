"""What NIXL's ends tell each other: over HTTP before the first push, and in every push where memory is."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import Handshake, Timeout


class RegisterNixl(Handshake, frozen=True):
    """Have every rank make its NIXL agent, and connect it to the sender's agent, whose ``metadata`` this is.

    ``host`` is that of the sender, as `arenas.host_id` names it; ``rdma``: it has network devices that need no CPU.
    """

    agent: Text
    metadata: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    timeout_s: Timeout
    address: Text = ""
    owner: Text = ""
    holder: Text = ""
    instance: Text = ""
    host: Text = ""
    rdma: bool = False


class NixlHandle(msgspec.Struct, frozen=True, tag="nixl"):
    """What NIXL needs to reach another's memory: ``metadata`` of its agent, and where it is."""

    agent: str
    metadata: bytes
    address: int
    nbytes: int
    device_id: int
    memory: Literal["DRAM", "VRAM"]


HANDLE: Final[msgspec.msgpack.Decoder[NixlHandle | None]] = msgspec.msgpack.Decoder(NixlHandle | None)
