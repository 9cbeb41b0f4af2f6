"""How a push travels, given the memory that is free: the size of its buckets, and whether a whole version is staged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from weightsync.errors import UnsupportedOption
from weightsync.memory.cuda_ipc import device_uuid
from weightsync.protocol.http import RankInfo
from weightsync.tensors.layout import ALIGN_BYTES, align

Staging = Literal["full", "none", "auto"]

#: Where less than this share of the free memory holds the whole model, the arena does: it then is the stage.
_HOLD_SHARE: Final = 0.8
#: Elsewhere a bucket takes at most one part in so many, for the ranks need room for a stage.
_BUCKET_SHARE: Final = 32
_MIN_BUCKET_BYTES: Final = 16 << 20
#: An arena that holds everything is filled in parts: ranks read and verify one while the next is packed.
_PARTS: Final = 16
_MIN_PART_BYTES, _MAX_PART_BYTES = 64 << 10, 64 << 20


@dataclass(frozen=True)
class Choice:
    """How the bytes travel: ``slots`` buckets of ``bucket_bytes``, a multiple of `ALIGN_BYTES`, make the arena."""

    bucket_bytes: int
    slots: int
    staging: Staging
    reason: str


def stage_bytes(ranks: Sequence[RankInfo]) -> int:
    """What every rank has for a stage. Ranks on a CPU share its memory, ranks on accelerators have one each."""
    by_device = {device: [r for r in ranks if r.device == device] for device in {r.device for r in ranks}}
    return min(
        min(rank.free_bytes for rank in those) // (len(those) if device == "cpu" else 1)
        for device, those in by_device.items()
    )


def arena_device(ranks: Sequence[RankInfo], source: torch.device | None, *, remote: bool) -> torch.device:
    """Where arenas are best: on the trainer's GPU where all that read them can, otherwise in the host's memory.

    ``source`` is where the weights are, if that is known; ``remote``: some engine is reached over a network.
    """
    if all(rank.device == "cuda" for rank in ranks) and torch.cuda.is_available():
        gpu = torch.device("cuda", torch.cuda.current_device())
        gpu = source if source is not None and source.type == "cuda" else gpu
        shared = {rank.device_uuid for rank in ranks} == {device_uuid(gpu)}
        if remote or (shared and source == gpu):
            return gpu
    return torch.device("cpu")


def in_place(stream_bytes: int) -> Choice:
    """For a model that the ranks read where it is."""
    part = _part(stream_bytes)
    return Choice(part, max(1, -(-stream_bytes // part)), "full", "the ranks read the parameters where they are")


def _part(stream_bytes: int) -> int:
    return min(_MAX_PART_BYTES, max(_MIN_PART_BYTES, align(-(-stream_bytes // _PARTS))))


def choose(
    stream_bytes: int,
    free_bytes: int,
    rank_bytes: int,
    asked: int | None,
    staged: Staging,
    keep: bool,
    shared: bool = False,
) -> Choice:
    """Buckets and stage for a stream.

    ``free_bytes`` is the minimum over the trainer and the ranks beside its arena, ``rank_bytes`` what each rank has for
    a stage of its own. A bucket is ``asked`` bytes if given, else half the stream where there is room for all of it
    (twice with ``keep``), in many buckets, else two small ones. An arena that several trainer processes have ``shared``
    holds everything; raises `UnsupportedOption` where there is no room for that.
    """
    half = max(ALIGN_BYTES, align(-(-stream_bytes // 2)))
    part = min(half, _part(stream_bytes))
    times = 2 if keep else 1
    slots = 2
    if shared:
        bucket_bytes = part if asked is None else align(asked)
        slots = max(2, -(-stream_bytes // bucket_bytes))
        if slots * bucket_bytes * times > free_bytes:
            raise UnsupportedOption(
                "the ranks of a trainer assemble the model in shared memory, which takes "
                f"{slots * bucket_bytes * times} bytes, and {free_bytes} are free; free some, or push from one process"
            )
    elif asked is not None:
        bucket_bytes = align(asked)
    elif 2 * half * times <= free_bytes * _HOLD_SHARE and staged != "none":
        bucket_bytes, slots = part, max(2, -(-stream_bytes // part))
    else:
        bucket_bytes = min(half, max(_MIN_BUCKET_BYTES, align(free_bytes // _BUCKET_SHARE)))
    if staged != "auto":
        return Choice(bucket_bytes, slots, staged, "asked for")
    if slots * bucket_bytes >= stream_bytes:
        return Choice(bucket_bytes, slots, "full", f"the trainer's arena has room for all {stream_bytes} bytes")
    if stream_bytes * times <= rank_bytes * _HOLD_SHARE:
        return Choice(bucket_bytes, slots, "full", f"every rank has room for {stream_bytes} bytes ({rank_bytes} free)")
    reason = f"a stage takes {stream_bytes * times} bytes and a rank has {rank_bytes} free"
    return Choice(bucket_bytes, slots, "none", reason)
