"""A trainer of several processes: what its ranks say to each other, and who writes what.

Rank 0 makes an arena in shared memory, the others map it, and every rank copies its cells (see `assignment`) to their
place in the assembled tensors. A tensor that one rank writes alone is hashed by that rank on the way; the others are
hashed once all have written, each by one of the ranks. Then rank 0 announces the buckets, over any transport. The
engines begin to verify when all ranks have written.

What one rank raises, rank 0 tells all. A rank whose process has ended is noticed within a second, one that is frozen by
the deadline. A rank that was given up may still write when it thaws: into an arena that is not used again before it has
come to the next call.
"""

import torch.distributed as dist

from weightsync.trainer.ranks.coordinator import Coordinator
from weightsync.trainer.ranks.follower import Follower

__all__ = ["Coordinator", "Follower", "ranks"]


def ranks() -> Coordinator | Follower | None:
    """This process's part among the ranks of its trainer; None if it is the only one."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    rank = dist.get_rank()
    return Follower(rank) if rank else Coordinator(dist.get_world_size())
