"""A trainer of several processes: the messages between its ranks, and which rank writes which bytes.

Rank 0 makes an arena in shared memory, the other ranks map it, and every rank copies its pieces (see `assignment`) to
their place in the assembled tensors. A tensor that only one rank writes is hashed by that rank while it is copied. The
other tensors are hashed after all ranks have written, each by one rank. Then rank 0 announces the buckets over every
transport, so the engines verify only after all ranks have written.

On several hosts each is a memory domain, see `tensors.domains`: its lowest rank makes the arena for what its ranks hold
of the stream, and sends that. What is hashed by itself there is a domain's part of a tensor.

If one rank raises, rank 0 makes every rank raise. A rank whose process has ended is noticed within a second, on other
hosts too, a frozen one at the deadline. A frozen rank may still write when it continues, but that arena is not used
again before this rank takes part in the next call.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from weightsync.errors import UnsupportedOption
from weightsync.trainer.ranks.coordinator import Coordinator
from weightsync.trainer.ranks.follower import Follower

__all__ = ["Coordinator", "Follower", "ranks"]


def ranks(group: dist.ProcessGroup | None, options: Mapping[str, str]) -> Coordinator | Follower | None:
    """This process's role in the trainer whose processes form ``group`` (None: the default group, if there is one).

    None if it is the only process. ``options``, by name, must be the same in all of them. Raises `UnsupportedOption` if
    this process is not in the group.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UnsupportedOption("group: this process is not in it; build the Sender in its processes alone")
    if size == 1:
        return None
    name = group.group_name if group is not None else ""
    return Follower(name, options, rank) if rank else Coordinator(name, options, size)
