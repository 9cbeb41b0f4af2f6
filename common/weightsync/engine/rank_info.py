"""What a rank says of itself when a sender opens its engine."""

from __future__ import annotations

import os

import torch

from weightsync.memory import arenas
from weightsync.memory.cuda_ipc import device_uuid
from weightsync.memory.processes import started
from weightsync.protocol.http import RankInfo
from weightsync.transports import registry


def rank_info(rank: int, device: torch.device) -> RankInfo:
    """Describe this process, the rank ``rank`` of its engine: device, free memory, transports."""
    return RankInfo(
        rank=rank,
        pid=os.getpid(),
        device=device.type,
        device_uuid=device_uuid(device),
        free_bytes=arenas.free_bytes(device),
        transports=registry.available(),
        settings=registry.settings(),
        process_space=arenas.process_space(),
        host=arenas.host_id(),
        started=started(os.getpid()),
    )
