"""Every rank's reply on every rank, by a deadline and without pickle."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def all_replies(mine: bytes, group: Any, timeout_s: float) -> list[bytes]:
    """All ranks' bytes in rank order. ``group`` is a gloo group; raises `RuntimeError` past ``timeout_s``."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [mine]
    wait = timedelta(seconds=max(timeout_s, 1.0))
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group, async_op=True).wait(wait)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group, async_op=True).wait(wait)
    return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]
