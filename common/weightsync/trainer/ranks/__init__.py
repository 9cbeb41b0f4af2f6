"""A trainer of several processes: what its ranks say to each other, and who writes what."""

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
