"""The handshake of the nccl transport, sent over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from weightsync.protocol.codec import Text
from weightsync.protocol.http import Handshake, Timeout


class InitNcclGroup(Handshake, frozen=True):
    """Make every rank of an engine join the process group ``group_name`` of ``world_size`` ranks.

    The group's rank 0, the trainer, runs the store at ``master_address`` and ``master_port``. The engine's ranks are
    numbered from ``rank_offset``. ``members`` lists the engines by URL, with their numbers of ranks, in group order;
    the trainer comes first. ``address`` identifies the sender. With several ``senders``, each of these trainer ranks is
    rank 0 of a group of its own; the groups are named ``group_name``, ``group_name-1`` and so on.
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
