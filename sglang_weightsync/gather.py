"""Every rank's reply on every rank, by a deadline and without pickle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

#: Ranks differ by how long they load, not by how long a push may take. A gather that gives up leaves the group, which
#: is SGLang's own, out of step for good: so this is only for a rank that will never come.
_DEADLINE: Final = timedelta(seconds=600)


def all_replies(mine: bytes, group: Any) -> list[bytes]:
    """All ranks' bytes in rank order. ``group`` is a gloo group; raises `RuntimeError` if a rank does not come."""
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
