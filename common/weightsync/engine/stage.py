"""Stages: memory of a rank for one version, filled bucket by bucket from a transport and verified on arrival."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from weightsync.errors import DigestMismatch, TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors import digest, gpu_copy, native_copy
from weightsync.tensors.any_order import Arrival
from weightsync.tensors.boxes import Box
from weightsync.tensors.divided import block, part
from weightsync.tensors.domains import digested
from weightsync.tensors.layout import Entry, Layout
from weightsync.tensors.scattered import Scattered, Stream, key
from weightsync.tensors.subset import Subset
from weightsync.transports import registry
from weightsync.transports.base import Bucket, Incoming


@dataclass
class Staged:
    """A version in memory, in full or only the ``subset`` that this rank needs.

    ``arena`` is the name of the memory of the sender ``owner``; empty if the memory is this rank's own.
    """

    push: str
    subset: Subset
    data: Stream
    arena: str = ""
    version: str = ""
    owner: str = ""

    @property
    def layout(self) -> Layout:
        """The layout of the stream."""
        return self.subset.layout

    def check(self) -> None:
        """Raise `TransferFailed` if this lies in memory that its owner may have written to since it was verified."""
        if isinstance(self.data, Scattered):
            self.data.check()

    def tensors(self, *, cloned: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that is held in full, by name, as a view of the stage; or each cloned when it is requested."""
        return (
            (entry.spec.name, entry.view(self.data).clone() if cloned else entry.view(self.data))
            for entry in self.layout.entries
            if self.subset.box(entry.number) is None
        )


#: How many stages keep their prepared hashes: two of this rank's own, or two arenas of a sender.
_PREPARED: Final = 2


def _hashes(
    pieces: Sequence[native_copy.Block], device: torch.device, algorithm: str
) -> native_copy.Hashes | gpu_copy.Hashes | None:
    """Prepared hashes; None for an algorithm or a device that has none, or pieces that are not aligned."""
    if device.type == "cpu" and algorithm == "xxh3_64":
        return native_copy.Hashes(pieces)
    if gpu_copy.available(device) and algorithm == "mix64" and gpu_copy.aligned(pieces):
        return gpu_copy.Hashes(pieces, device)
    return None


class _Prepared:
    """The hashes of a stage for every bucket, prepared once; None for a tensor in several pieces.

    It has the addresses of the stage and no reference: the memory may be a sender's, who will free it.
    """

    def __init__(self, stage: Stream, subset: Subset, request: UpdateRequest):
        self._subset, self._settings = subset, (request.bucket_bytes, request.digest, stage.device)
        self.buckets: list[native_copy.Hashes | gpu_copy.Hashes | None] = []
        for bucket in range(subset.layout.buckets(request.bucket_bytes)):
            ended = [piece.entry for piece in subset.layout.pieces(bucket, request.bucket_bytes) if piece.last]
            places = [block(stage, entry, box) for entry in ended for box in subset.hashed(entry.number)]
            pieces = [found for found in places if found is not None]
            there = len(pieces) == len(places)
            self.buckets.append(_hashes(pieces, stage.device, request.digest) if there else None)

    def fits(self, stage: Stream, subset: Subset, request: UpdateRequest) -> bool:
        """Whether these are the hashes for this push, given that the stage has the same address."""
        own = self._subset
        same = subset is own or (subset.layout is own.layout and subset.name == own.name)
        return same and self._settings == (request.bucket_bytes, request.digest, stage.device)


@dataclass
class Stages:
    """One rank's memory for stages, allocated once and used by one push after another."""

    rank: int
    device: torch.device
    _own: list[torch.Tensor] = field(default_factory=list)
    #: By stage, see `scattered.key`.
    _prepared: dict[int, _Prepared] = field(default_factory=dict)

    def fill(
        self,
        incoming: Incoming,
        request: UpdateRequest,
        subset: Subset,
        kept: Staged | None,
        take: Callable[[Stream, int], object] | None = None,
    ) -> tuple[Staged, float]:
        """Receive and verify every bucket; return the stage, and the seconds that verifying took.

        ``kept`` is a stage that must not be overwritten; ``take`` is called with the stage and the
        number of each bucket that is verified. Raises `TransferFailed`, `DigestMismatch` or `PushTimeout`.
        """
        layout = subset.layout
        own = self._provide(layout.nbytes, kept) if incoming.whole is None or request.any_order else None
        stage = incoming.whole if own is None else own
        assert stage is not None, "own memory or the sender's"
        check, of_stage = _Check(self.rank, request, subset), functools.partial(part, stage)
        try:
            if request.any_order and own is not None:
                self._fill_in_any_order(incoming, layout, own, check)
                return Staged(request.push, subset, own, owner=request.owner), check.seconds
            prepared = self._prepare(stage, subset, request) if check.algorithm else None
            for bucket in incoming.buckets(own):
                if bucket.digest is not None and check.algorithm:
                    check.whole(bucket, stage, request.bucket_bytes)
                if prepared is not None and not check.is_same(bucket, prepared.buckets[bucket.number]):
                    pieces = layout.pieces(bucket.number, request.bucket_bytes)
                    check.compare(bucket, (piece.entry for piece in pieces if piece.last), of_stage)
                if take is not None:
                    take(stage, bucket.number)
        except BaseException:
            # An interrupted transport may still write there, so the next push gets other memory.
            self._give_up(stage)
            raise
        if incoming.lingers:
            self._give_up(stage)
        arena = incoming.arena if own is None else ""
        return Staged(request.push, subset, stage, arena, owner=request.owner), check.seconds

    def _give_up(self, stage: Stream) -> None:
        self._own = [memory for memory in self._own if memory.data_ptr() != key(stage)]

    def _fill_in_any_order(self, incoming: Incoming, layout: Layout, stage: torch.Tensor, check: _Check) -> None:
        arrival = Arrival(layout)
        for bucket in incoming.buckets(None):
            ended = []
            for piece in arrival.pieces(bucket.begins, bucket.data.numel()):
                target = piece.entry.raw(stage)[piece.start : piece.start + piece.nbytes]
                arenas.copy(target, bucket.data[piece.at : piece.at + piece.nbytes])
                if piece.last:
                    ended.append(piece.entry)
            arenas.synchronize(self.device)
            check.compare(bucket, ended, functools.partial(part, stage))
        arrival.end()

    def _prepare(self, stage: Stream, subset: Subset, request: UpdateRequest) -> _Prepared:
        """The hashes of this stage, kept from an earlier push if they fit."""
        found = self._prepared.get(key(stage))
        if found is None or not found.fits(stage, subset, request):
            if len(self._prepared) >= _PREPARED:
                self._prepared.clear()
            found = self._prepared[key(stage)] = _Prepared(stage, subset, request)
        return found

    def stream(self, incoming: Incoming, request: UpdateRequest, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor by name, in memory of its own, once it has arrived and is verified. Raises as `fill`."""
        check = _Check(self.rank, request, Subset(layout, {}))
        memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        for bucket in incoming.buckets(None):
            done: dict[int, tuple[Entry, torch.Tensor]] = {}
            for piece in layout.pieces(bucket.number, request.bucket_bytes):
                if piece.start == 0:
                    memory = torch.empty(piece.entry.nbytes, dtype=torch.uint8, device=self.device)
                place = memory[piece.start : piece.start + piece.nbytes]
                arenas.copy(place, bucket.data[piece.at : piece.at + piece.nbytes])
                if piece.last:
                    done[piece.entry.number] = piece.entry, memory
            arenas.synchronize(self.device)
            ended = [entry for entry, _ in done.values()]
            check.compare(bucket, ended, lambda entry, _: done[entry.number][1])  # noqa: B023 - called here
            for entry in ended:  # the loader may keep a reference, but this does not
                yield entry.spec.name, done.pop(entry.number)[1].view(entry.dtype).view(entry.spec.shape)

    def _split(self, nbytes: int, kept: Staged | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's stages that must not be overwritten, and of the others those that are large enough."""
        busy = [memory for memory in self._own if kept is not None and memory.data_ptr() == key(kept.data)]
        others = (memory for memory in self._own if all(memory is not other for other in busy))
        return busy, [memory for memory in others if memory.numel() >= nbytes]

    def have_room(self, nbytes: int, kept: Staged | None) -> bool:
        """Whether `fill` will find a stage, or memory for one."""
        busy, large = self._split(nbytes, kept)
        given_up = sum(memory.numel() for memory in self._own) - sum(memory.numel() for memory in busy)
        return bool(large) or nbytes <= arenas.free_bytes(self.device) + given_up

    def _provide(self, nbytes: int, kept: Staged | None) -> torch.Tensor:
        busy, large = self._split(nbytes, kept)
        if large:
            return large[0][:nbytes]
        self._own = busy  # free memory that is too small before allocating more
        available = arenas.free_bytes(self.device)
        if nbytes > available:
            raise TransferFailed(
                f"rank {self.rank}: the stage takes {nbytes} bytes, but {available} are free on {self.device}; "
                'pass staging="none", a bucket_bytes of at least half the model, or free memory'
            )
        self._own.append(arenas.plain(nbytes, self.device))
        return self._own[-1]

    def release(self) -> None:
        """Free this rank's own memory."""
        self._own.clear()
        self._prepared.clear()
        native_copy.release()


def check_several_hosts(layout: Layout, request: UpdateRequest, transport: str) -> None:
    """Raise `UnsupportedOption` for a push whose bytes lie in several domains, if it cannot be received so."""
    spec = registry.spec(transport)
    if layout.table and (request.stream or request.any_order or not (spec.several_hosts or spec.local)):
        raise UnsupportedOption(
            f"{len(layout.table)} of the trainer's hosts or processes hold this push, which takes a transport in which "
            "each of them sends, tensors in order, and a stage"
        )


class _Check:
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

    def is_same(self, bucket: Bucket, hashes: native_copy.Hashes | gpu_copy.Hashes | None) -> bool:
        """Whether a bucket has the announced digests; False also if there are no prepared ``hashes``."""
        start = time.perf_counter()
        same = hashes is not None and tuple(hashes.make()) == bucket.digests
        self.seconds += time.perf_counter() - start
        return same

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
