"""The messages of the nixl transport: the handshake before the first push, and memory handles in every push.

A trainer on several hosts has an agent on each. Rank 0 asks the other hosts' for what it says of its own.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from weightsync.protocol import codec
from weightsync.protocol.codec import Text
from weightsync.protocol.http import Handshake, Message, Timeout
from weightsync.transports.base import Peer

Metadata = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]


class SendingAgent(Message, frozen=True):
    """An agent of a sender: its ``metadata``, and its host, see `RegisterNixl`."""

    agent: Text
    metadata: Metadata
    host: Text
    rdma: bool = False


class RegisterNixl(Handshake, frozen=True):
    """Have every rank make its NIXL agent and connect it to the sender's ``agent``, described by ``metadata``.

    ``host`` is the sender's `arenas.host_id`; ``rdma``: the sender has an RDMA device. ``others`` are the agents of the
    trainer's other hosts, in order of their memory domains. ``several``: ranks on other hosts get the same pushes, and
    what is written to one can be passed on to the next.
    """

    agent: Text
    metadata: Metadata
    timeout_s: Timeout
    address: Text = ""
    owner: Text = ""
    holder: Text = ""
    instance: Text = ""
    host: Text = ""
    rdma: bool = False
    others: Annotated[tuple[SendingAgent, ...], msgspec.Meta(max_length=1024)] = ()
    several: bool = False


class NixlHandle(msgspec.Struct, frozen=True, tag="nixl"):
    """What NIXL needs to reach memory of another agent: the agent's ``metadata``, and the address."""

    agent: str
    metadata: bytes
    address: int
    nbytes: int
    device_id: int
    memory: Literal["DRAM", "VRAM"]


HANDLE: Final[msgspec.msgpack.Decoder[NixlHandle | None]] = codec.msgpack_decoder(NixlHandle | None)


class Expose(Message, frozen=True, tag="expose"):
    """rank 0 -> rank: say with which agent you will send, and register your arena, which may be ``on_gpu``."""

    on_gpu: bool = False


class Exposed(Message, frozen=True):
    """rank -> 0: the agent, and the handle of the arena, if there is one."""

    sender: SendingAgent
    handle: NixlHandle | None = None


class EngineAgent(Message, frozen=True):
    """The agent of the engine rank ``peer``."""

    agent: str
    metadata: bytes
    peer: Peer


class Meet(Message, frozen=True, tag="meet"):
    """rank 0 -> rank: connect to these agents, within ``timeout_s``."""

    agents: tuple[EngineAgent, ...]
    timeout_s: float


class Digest(Message, frozen=True, tag="digest"):
    """rank 0 -> rank: hash each run of what ranks need of the ``buckets``, by the names of the runs; ``runs`` as in
    `Serve`."""

    algorithm: str
    bucket_bytes: int
    buckets: int
    names: tuple[str, ...]
    runs: dict[str, bytes]


class Digested(Message, frozen=True):
    """rank -> 0: the digest of each run of each bucket, by the name of the runs."""

    runs: dict[str, list[list[int]]]


class Serve(Message, frozen=True, tag="serve"):
    """rank 0 -> rank: every bucket of ``push`` is filled; move what you hold of them within ``timeout_s``.

    ``writes`` are the ranks to write to: agent, handle, and the name of the runs that the rank needs. ``reads`` are the
    agents that read, and how many READs each will make. ``runs`` has the runs that this rank was not told before, by
    name, see `sending.packed_runs`. With ``first``, these ranks are written to besides those that this rank was told
    before, from that bucket on.
    """

    push: str
    bucket_bytes: int
    buckets: int
    writes: tuple[tuple[str, NixlHandle, str], ...]
    reads: dict[str, int]
    runs: dict[str, bytes]
    timeout_s: float
    first: int | None = None


ToHelper = Expose | Meet | Digest | Serve
