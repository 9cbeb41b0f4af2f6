"""The messages of the nixl transport: the handshake before the first push, and memory handles in every push."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import Handshake, Timeout


class RegisterNixl(Handshake, frozen=True):
    """Have every rank make its NIXL agent and connect it to the sender's ``agent``, described by ``metadata``.

    ``host`` is the sender's `arenas.host_id`; ``rdma``: the sender has an RDMA device.
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
    """What NIXL needs to reach memory of another agent: the agent's ``metadata``, and the address."""

    agent: str
    metadata: bytes
    address: int
    nbytes: int
    device_id: int
    memory: Literal["DRAM", "VRAM"]


HANDLE: Final[msgspec.msgpack.Decoder[NixlHandle | None]] = msgspec.msgpack.Decoder(NixlHandle | None)
