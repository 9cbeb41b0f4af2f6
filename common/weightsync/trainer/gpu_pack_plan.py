"""Repeats a packing in a GPU's memory: the copies of a bucket are one launch, and so are its digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from weightsync.memory import arenas
from weightsync.tensors.boxes import Box
from weightsync.tensors.gpu_copy import Copies, Hashes
from weightsync.tensors.layout import Layout
from weightsync.tensors.native_copy import Block, Run
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Digests, Wanted
from weightsync.trainer.packing import Packed


class _Bucket(NamedTuple):
    """What is copied into a bucket, and what is hashed where the trainer holds it: the tensors that end there."""

    copies: Copies
    hashes: Hashes
    picks: dict[str, Callable[[Sequence[int]], tuple[int, ...]]]


class GpuPackPlan:
    """As `pack_plan.PackPlan`, for tensors at ``addresses`` on the GPU of ``arena``, without casts."""

    not_finite = 0

    def __init__(
        self,
        layout: Layout,
        addresses: Sequence[int],
        arena: Stream,
        bucket_bytes: int,
        slots: int,
        boxes: Sequence[Sequence[tuple[Box | None, Block]]],
        demand: Wanted,
    ):
        self._device, self._bucket_bytes, self._nbytes = arena.device, bucket_bytes, layout.nbytes
        self.gather_s = self.digest_s = 0.0
        self._buckets = []
        for bucket in range(layout.buckets(bucket_bytes)):
            pieces = [piece for piece in layout.pieces(bucket, bucket_bytes) if piece.nbytes]
            runs = list[Run]()
            if isinstance(arena, torch.Tensor):
                base = arena.data_ptr() + bucket % slots * bucket_bytes
                runs = [Run(addresses[p.entry.number] + p.start, base + p.at, p.nbytes) for p in pieces]
            ended = [(p.entry.number, box, at) for p in pieces if p.last for box, at in boxes[p.entry.number]]
            hashes = Hashes([at for *_, at in ended], self._device)
            picks = demand.picks([(number, box) for number, box, _ in ended])
            self._buckets.append(_Bucket(Copies(runs, self._device), hashes, picks))

    def fill(self, acquire: Callable[[int], None]) -> Iterator[Packed]:
        """See `packing.Packer.fill`."""
        self.gather_s = self.digest_s = 0.0
        arenas.synchronize(self._device)
        for number, bucket in enumerate(self._buckets):
            acquire(number)
            start = time.perf_counter()
            bucket.copies.make()
            arenas.synchronize(self._device)  # ranks may read now; hashing waits for its own end
            copied = time.perf_counter()
            found = bucket.hashes.make()
            digests: Digests = {name: pick(found) for name, pick in bucket.picks.items()}
            self.gather_s += copied - start
            self.digest_s += time.perf_counter() - copied
            yield Packed(number, digests, min((number + 1) * self._bucket_bytes, self._nbytes))
