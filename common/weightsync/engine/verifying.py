"""How a rank verifies what it has received, by the digests that the trainer announced."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from weightsync.errors import DigestMismatch, TransferFailed
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors import digest, gpu_copy, native_copy
from weightsync.tensors.boxes import Box
from weightsync.tensors.divided import Divided, block
from weightsync.tensors.domains import digested
from weightsync.tensors.layout import Entry
from weightsync.tensors.native_copy import Block
from weightsync.tensors.one_pass import OnePass
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket

Hashes = native_copy.Hashes | gpu_copy.Hashes | OnePass


class Hashed(NamedTuple):
    """What is hashed of a stage by itself: where it lies, and from which byte ``at`` of the stream on; None if its
    bytes do not follow each other there."""

    at: int | None
    block: Block


class Taking(Protocol):
    """Takes what has arrived in a stage to where it is to be loaded."""

    def passing(self, stage: Stream, bucket: int, hashed: Sequence[Sequence[Hashed] | None]) -> OnePass | None:
        """What hashes, in order, all that is to be hashed once a bucket has arrived, and copies on the way what it can.

        None if there is no such pass; otherwise it is made before the bucket is taken. ``hashed`` is what is hashed
        with each bucket, None where not all of that is contiguous.
        """

    def take(self, stage: Stream, bucket: int) -> None:
        """Copy the rest of what has arrived with a bucket, which is verified."""


class Prepared:
    """What is hashed of a stage with every bucket, prepared once.

    It has the addresses of the stage and no reference: the memory may be a sender's, who will free it.
    """

    def __init__(self, stage: Stream, subset: Subset, request: UpdateRequest):
        self._subset, self._settings = subset, (request.bucket_bytes, request.digest, stage.device)
        self._on_cpu = stage.device.type == "cpu" and request.digest == "xxh3_64"
        self._hashed: list[list[Hashed] | None] = []
        for bucket in range(subset.layout.buckets(request.bucket_bytes)):
            ended = [piece.entry for piece in subset.layout.pieces(bucket, request.bucket_bytes) if piece.last]
            places = [_hashed(stage, entry, box) for entry in ended for box in subset.hashed(entry.number)]
            found = [place for place in places if place is not None]
            self._hashed.append(found if len(found) == len(places) else None)
        self._hashes: dict[int, Hashes | None] = {}

    def fits(self, stage: Stream, subset: Subset, request: UpdateRequest) -> bool:
        """Whether this is what is hashed for a push, given that the stage has the same address."""
        own = self._subset
        same = subset is own or (subset.layout is own.layout and subset.name == own.name)
        return same and self._settings == (request.bucket_bytes, request.digest, stage.device)

    def hashes(self, stage: Stream, bucket: int, taking: Taking | None) -> Hashes | None:
        """The hashes of a bucket, which may also copy what ``taking`` takes.

        None for an algorithm or a device that has none, and for something in several pieces or not aligned.
        """
        found = taking.passing(stage, bucket, self._hashed) if self._on_cpu and taking is not None else None
        if found is not None:
            return found
        if bucket not in self._hashes:
            hashed = self._hashed[bucket]
            self._hashes[bucket] = None if hashed is None else self._made([at for _, at in hashed])
        return self._hashes[bucket]

    def _made(self, blocks: Sequence[Block]) -> Hashes | None:
        _, algorithm, device = self._settings
        if self._on_cpu:
            return native_copy.Hashes(blocks)
        if gpu_copy.available(device) and algorithm == "mix64" and gpu_copy.aligned(blocks):
            return gpu_copy.Hashes(blocks, device)
        return None


def _hashed(stage: Stream, entry: Entry, box: Box | None) -> Hashed | None:
    """Where a box of a tensor lies, None for all of it; None if it is not contiguous."""
    found = block(stage, entry, box)
    if found is None:
        return None
    if isinstance(stage, Divided):
        return Hashed(None, found)
    return Hashed(entry.offset + (0 if box is None else found.address - entry.raw(stage).data_ptr()), found)


class Check:
    """Verifies tensors by the digests that the trainer announced, unless verification is off."""

    def __init__(self, rank: int, request: UpdateRequest, subset: Subset):
        self._rank, self._subset = rank, subset
        self.algorithm = "" if request.verify == "off" else request.digest
        if self.algorithm and self.algorithm not in digest.ALGORITHMS:
            raise TransferFailed(
                f"rank {rank} does not know the digest {self.algorithm!r}; install the same version of weightsync on "
                "both sides"
            )
        self.seconds = 0.0
        self._digested: list[list[tuple[int, int]]] = []

    def bucket(
        self,
        bucket: Bucket,
        hashes: Hashes | None,
        ended: Iterable[Entry],
        of: Callable[[Entry, Box | None], torch.Tensor],
    ) -> None:
        """Verify the tensors that end in a bucket, by its ``hashes`` if it has some, otherwise as `compare`."""
        start = time.perf_counter()
        found = None if hashes is None else tuple(hashes.make())
        # A pass also copies, which is no part of verifying.
        self.seconds += hashes.digest_s if isinstance(hashes, OnePass) else time.perf_counter() - start
        if found != bucket.digests:
            self.compare(bucket, ended, of)
            if found is not None:  # what was read first may have been copied
                raise DigestMismatch(f"rank {self._rank}: bucket {bucket.number} changed while it was verified")

    def whole(self, bucket: Bucket, stage: Stream, bucket_bytes: int) -> None:
        """Verify what this rank needs of a bucket, which it is to pass on. Raises `DigestMismatch`."""
        start = time.perf_counter()
        assert isinstance(stage, torch.Tensor), "what is passed on lies in a stage of this rank"
        self._digested = self._digested or digested(self._subset, bucket_bytes)
        runs = self._digested[bucket.number]
        if digest.digest_runs(self.algorithm, stage, runs) != bucket.digest:
            raise DigestMismatch(
                f"rank {self._rank}: bucket {bucket.number} is not what the trainer held (its digest differs)"
            )
        self.seconds += time.perf_counter() - start

    def compare(self, bucket: Bucket, ended: Iterable[Entry], of: Callable[[Entry, Box | None], torch.Tensor]) -> None:
        """Verify the tensors that end in a bucket; ``of`` has a box of each. Raises `DigestMismatch`, naming one."""
        if not self.algorithm:
            return
        start = time.perf_counter()
        parts = [(entry, box) for entry in ended for box in self._subset.hashed(entry.number)]
        found = digest.digests(self.algorithm, (of(entry, box) for entry, box in parts))
        announced = itertools.chain(bucket.digests, itertools.repeat(None))  # too few may have come
        for (entry, _), expected, value in zip(parts, announced, found, strict=False):
            if expected != value:
                raise DigestMismatch(
                    f"rank {self._rank}: {entry.spec.name} in bucket {bucket.number} is not what the trainer held "
                    f"({'its digest differs' if expected is not None else 'no digest came with it'})"
                )
        if len(bucket.digests) > len(parts):
            raise DigestMismatch(f"rank {self._rank}: bucket {bucket.number} came with digests of unknown tensors")
        self.seconds += time.perf_counter() - start
