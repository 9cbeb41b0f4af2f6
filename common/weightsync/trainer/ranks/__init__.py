"""A trainer of several processes: the messages between its ranks, and which rank writes which bytes.

Rank 0 makes an arena in shared memory, the other ranks map it, and every rank copies its cells (see `assignment`) to
their place in the assembled tensors. A tensor that only one rank writes is hashed by that rank while it is copied. The
other tensors are hashed after all ranks have written, each by one rank. Then rank 0 announces the buckets over every
transport, so the engines verify only after all ranks have written.

If one rank raises, rank 0 makes every rank raise. A rank whose process has ended is noticed within a second, a frozen
one at the deadline. A frozen rank may still write when it continues, but that arena is not used again before this rank
takes part in the next call.
"""

import torch.distributed as dist

from weightsync.trainer.ranks.coordinator import Coordinator
from weightsync.trainer.ranks.follower import Follower

__all__ = ["Coordinator", "Follower", "ranks"]


def ranks() -> Coordinator | Follower | None:
    """This process's role in a trainer of several processes; None if it is the only process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    rank = dist.get_rank()
    return Follower(rank) if rank else Coordinator(dist.get_world_size())
