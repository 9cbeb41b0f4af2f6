"""What engines are told of a process group, over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import Handshake, Timeout


class InitNcclGroup(Handshake, frozen=True):
    """Have every rank join the group ``group_name`` of ``world_size`` ranks, at the store of its rank 0, the trainer.

    The engine's ranks become ``rank_offset`` and those that follow. ``members`` lists who is to join, by URL, with its
    number of ranks, in the order of the group; the trainer's ranks come before. ``address`` names the sender. Where
    several ranks of a trainer are ``senders``, each has a group of its own, of which it is rank 0; these are called
    ``group_name``, ``group_name-1`` and so on.
    """

    group_name: Text
    master_address: Text
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    world_size: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]
    backend: Literal["nccl", "gloo"]
    timeout_s: Timeout
    address: Text = ""
    owner: Text = ""
    holder: Text = ""
    instance: Text = ""
    members: tuple[tuple[Text, Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]], ...] = ()
    senders: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
