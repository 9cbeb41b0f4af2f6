"""Gathers the replies of all ranks on every rank, without pickle and with a deadline."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

#: A gather that times out leaves the group, which is SGLang's own, out of step for good. So this is far longer than
#: ranks differ in loading, and is only reached if a rank will never come.
_DEADLINE: Final = timedelta(seconds=600)


def all_replies(mine: bytes, group: Any) -> list[bytes]:
    """The bytes of all ranks in rank order; ``group`` uses gloo. Raises `RuntimeError` if a rank does not come."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [mine]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group, async_op=True).wait(_DEADLINE)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group, async_op=True).wait(_DEADLINE)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
