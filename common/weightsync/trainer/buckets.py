"""Chooses the bucket size of a push, and whether a whole version is staged, by the memory that is free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from weightsync.errors import UnsupportedOption
from weightsync.memory.cuda_ipc import device_uuid, gpu_here
from weightsync.protocol.http import RankInfo, UpdateRequest
from weightsync.tensors.layout import ALIGN_BYTES, align

Staging = Literal["full", "none", "auto"]

#: The arena holds the whole model, and is the stage, if that takes at most this share of the free memory.
_HOLD_SHARE: Final = 0.8
#: Two arenas, if engines do not need the second one, take at most this share.
_SPARE_SHARE: Final = 0.5
#: Otherwise a bucket takes at most one part in this many of the free memory, for the ranks need memory for a stage.
_BUCKET_SHARE: Final = 32
_MIN_BUCKET_BYTES: Final = 16 << 20
#: The number of buckets of an arena that holds everything: ranks read and verify one while the next is packed. Engines
#: on other hosts pass buckets on to each other, and the last of them waits for one bucket from each.
_PARTS: Final = 16
_FAR_PARTS: Final = 128
_MIN_PART_BYTES, _MAX_PART_BYTES = 64 << 10, 64 << 20
#: On a GPU it takes longer to start and await the work on a bucket than to copy and hash this much.
_GPU_PARTS: Final = 4
_MAX_GPU_PART_BYTES: Final = 256 << 20
#: The same for parameters that ranks read in place on a GPU, where nothing is copied.
_READ_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Choice:
    """An arena of ``slots`` buckets of ``bucket_bytes``, a multiple of `ALIGN_BYTES`; and where bytes are staged.

    ``spare``: there is a second arena, for the version before, so that what has changed since can be sent.
    """

    bucket_bytes: int
    slots: int
    staging: Staging
    reason: str
    spare: bool = False


def stage_bytes(ranks: Sequence[RankInfo]) -> int:
    """Bytes for a stage that every rank has at least. Ranks on CPUs share one memory, ranks on accelerators do not."""
    by_device = {device: [r for r in ranks if r.device == device] for device in {r.device for r in ranks}}
    return min(
        min(rank.free_bytes for rank in on_device) // (len(on_device) if device == "cpu" else 1)
        for device, on_device in by_device.items()
    )


def arena_device(
    ranks: Sequence[RankInfo], source: torch.device | None, *, remote: bool, others: Sequence[str] = ()
) -> torch.device:
    """The best device for arenas: the trainer's GPU if every rank can read it there, otherwise the host's memory.

    ``source`` is the device of the weights, if known; ``remote`` is whether any engine is reached over a network.
    ``others`` are the GPUs of the trainer's other ranks, empty for a rank without one.
    """
    gpu = gpu_here()
    if gpu is not None and all(rank.device == "cuda" for rank in ranks) and all(others):
        gpu = source if source is not None and source.type == "cuda" and not others else gpu
        shared = {rank.device_uuid for rank in ranks} | set(others) == {device_uuid(gpu)}
        if remote or (shared and source == gpu):
            return gpu
    return torch.device("cpu")


def read_in_place(stream_bytes: int, *, on_gpu: bool) -> Choice:
    """The choice for parameters that the ranks read in place."""
    part = _part(stream_bytes, 1, _READ_BYTES) if on_gpu else _part(stream_bytes, _PARTS)
    return Choice(part, max(1, -(-stream_bytes // part)), "full", "the ranks read the parameters where they are")


def have_spare(choice: Choice, free_bytes: int) -> bool:
    """Whether memory is ample for a second arena."""
    return 2 * choice.slots * choice.bucket_bytes <= free_bytes * _SPARE_SHARE


def arenas(of: Choice | UpdateRequest, stream_bytes: int, *, keep: bool) -> tuple[int, int]:
    """The size of an arena, and how many a sender has: two, if the engines ``keep`` a version in one."""
    nbytes = of.slots * of.bucket_bytes
    return nbytes, 2 if keep and stream_bytes <= nbytes else 1


def parts_of(stream_bytes: int) -> int:
    """The size of buckets in which a stream crosses to other hosts that the arena holds all of."""
    return _part(stream_bytes, _FAR_PARTS)


def _part(stream_bytes: int, parts: int, most: int = _MAX_PART_BYTES) -> int:
    return min(most, max(_MIN_PART_BYTES, align(-(-stream_bytes // parts))))


def choose(
    stream_bytes: int,
    free_bytes: int,
    rank_bytes: int,
    asked: int | None,
    staged: Staging,
    keep: bool,
    shared: int | None = None,
    divided: bool = False,
    far: bool = False,
    on_gpu: bool = False,
) -> Choice:
    """Choose buckets and staging for a stream of ``stream_bytes``.

    ``free_bytes`` is the memory for the arena, the minimum over the trainer and the ranks that use the same memory;
    ``rank_bytes`` is what each rank has for a stage. With ``asked`` the arena is two buckets of that size. Otherwise it
    is many buckets that hold the whole stream if that fits (twice with ``keep``), and two small buckets if not. An
    arena that several trainer processes share always holds ``shared`` bytes: the whole stream, or if that is
    ``divided`` between hosts, what their host holds; raises `UnsupportedOption` if it does not fit. ``far``: an engine
    is on another host. ``on_gpu``: the arena is on a GPU, and every rank on this host.
    """
    half = max(ALIGN_BYTES, align(-(-stream_bytes // 2)))
    part = min(half, _part(stream_bytes, _FAR_PARTS if far else _PARTS))
    if on_gpu:
        parts = max(_GPU_PARTS, -(-stream_bytes // _MAX_GPU_PART_BYTES))  # all of one size, which fill the arena
        part = min(half, _part(stream_bytes, parts, _MAX_GPU_PART_BYTES))
    times = 2 if keep else 1
    slots = 2
    if shared is not None:
        bucket_bytes = part if asked is None else align(asked)
        slots = max(2, -(-stream_bytes // bucket_bytes))
        takes = shared if divided else times * slots * bucket_bytes
        if takes > free_bytes:
            raise UnsupportedOption(
                f"the ranks of a trainer assemble the model in shared memory, which takes {takes} bytes, and "
                f"{free_bytes} are free; free some, or push from one process"
            )
    elif asked is not None:
        bucket_bytes = align(asked)
    elif 2 * half * times <= free_bytes * _HOLD_SHARE and staged != "none":
        bucket_bytes, slots = part, max(2, -(-stream_bytes // part))
    else:
        bucket_bytes = min(half, max(_MIN_BUCKET_BYTES, align(free_bytes // _BUCKET_SHARE)))
    if staged != "auto":
        return Choice(bucket_bytes, slots, staged, "asked for")
    if divided:
        return Choice(bucket_bytes, slots, "full", f"the trainer's hosts hold all {stream_bytes} bytes")
    if slots * bucket_bytes >= stream_bytes:
        return Choice(bucket_bytes, slots, "full", f"the trainer's arena holds all {stream_bytes} bytes")
    if stream_bytes * times <= rank_bytes * _HOLD_SHARE:
        return Choice(bucket_bytes, slots, "full", f"every rank can hold {stream_bytes} bytes ({rank_bytes} free)")
    reason = f"a stage takes {stream_bytes * times} bytes and a rank has {rank_bytes} free"
    return Choice(bucket_bytes, slots, "none", reason)
