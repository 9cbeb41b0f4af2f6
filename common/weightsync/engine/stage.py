"""Engine side: memory for staged versions, filled from the buckets of a transport and verified on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from weightsync.errors import DigestMismatch, TransferFailed
from weightsync.memory import arenas
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors import digest, native_copy
from weightsync.tensors.layout import Entry, Layout
from weightsync.tensors.native_copy import Hashes
from weightsync.tensors.scattered import Scattered, Stream, key
from weightsync.tensors.subset import Subset, place
from weightsync.transports.base import Bucket, Incoming


@dataclass
class Staged:
    """A version in memory: all of it, or the ``parts`` that this rank keeps.

    ``arena`` names the memory of the sender that is called ``owner``, empty where the memory is this rank's own.
    """

    push: str
    parts: Subset
    data: Stream
    arena: str = ""
    version: str = ""
    owner: str = ""

    @property
    def layout(self) -> Layout:
        """Where every tensor lies."""
        return self.parts.layout

    def check(self) -> None:
        """Raise `TransferFailed` if this lies in memory that its owner may have written to since it was verified."""
        if isinstance(self.data, Scattered):
            self.data.check()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor that is kept as a whole by name, as a view of the stage."""
        return (
            (entry.spec.name, entry.view(self.data))
            for entry in self.layout.entries
            if self.parts.box(entry.number) is None
        )


#: Stages that are hashed as they were before: two of this rank's own, or two arenas of a sender.
_CHECKED: Final = 2


class _Ready:
    """What is hashed of a stage in host memory for every bucket, made ready once; None where it is in several pieces.

    The stage is addressed, not held: it may be a sender's, who wants it back.
    """

    def __init__(self, stage: Stream, parts: Subset, request: UpdateRequest):
        self._parts, self._how = parts, (request.bucket_bytes, request.digest, stage.device)
        plain = stage.device.type == "cpu" and request.digest == "xxh3_64"
        self.buckets: list[Hashes | None] = []
        for bucket in range(parts.layout.buckets(request.bucket_bytes)):
            ended = [piece.entry for piece in parts.layout.pieces(bucket, request.bucket_bytes) if piece.last]
            kept = [(entry, parts.box(entry.number)) for entry in ended if entry.nbytes]
            kept = [(entry, box) for entry, box in kept if box is None or 0 not in box.shape]
            places = [place(entry, box, entry.raw(stage).data_ptr()) for entry, box in kept]
            pieces = [one for one in places if one is not None]
            self.buckets.append(Hashes(pieces) if plain and len(pieces) == len(places) else None)

    def fits(self, stage: Stream, parts: Subset, request: UpdateRequest) -> bool:
        """Whether this was made for such a push, at this address."""
        same = parts is self._parts or (parts.layout is self._parts.layout and parts.name == self._parts.name)
        return same and self._how == (request.bucket_bytes, request.digest, stage.device)


@dataclass
class Stages:
    """One rank's memory for stages; it is taken once and used by one push after another."""

    rank: int
    device: torch.device
    _own: list[torch.Tensor] = field(default_factory=list)
    #: By stage.
    _checked: dict[int, _Ready] = field(default_factory=dict)

    def fill(
        self, incoming: Incoming, request: UpdateRequest, parts: Subset, kept: Staged | None
    ) -> tuple[Staged, float]:
        """Take every bucket; the stage, and the seconds that verifying it took.

        ``kept`` is a stage that must stay as it is. Raises `TransferFailed`, `DigestMismatch` or `PushTimeout`.
        """
        layout = parts.layout
        own = self._provide(layout.nbytes, kept) if incoming.whole is None else None
        stage = incoming.whole if own is None else own
        assert stage is not None, "one of the two"
        check = _Check(self.rank, request, parts)
        try:
            ready = self._ready(stage, parts, request) if check.algorithm else None
            for bucket in incoming.buckets(own):
                if ready is not None and not check.are(bucket, ready.buckets[bucket.number]):
                    pieces = layout.pieces(bucket.number, request.bucket_bytes)
                    ended = (piece.entry for piece in pieces if piece.last)
                    check.compare(bucket, ((one, one.raw(stage)) for one in ended))
        except BaseException:
            # A transport that was interrupted may still write there: the next push gets other memory.
            self._own = [memory for memory in self._own if memory.data_ptr() != key(stage)]
            raise
        arena = incoming.arena if own is None else ""
        return Staged(request.push, parts, stage, arena, owner=request.owner), check.seconds

    def _ready(self, stage: Stream, parts: Subset, request: UpdateRequest) -> _Ready:
        """How to hash this stage; what was made ready for the push before, where that still holds."""
        found = self._checked.get(key(stage))
        if found is None or not found.fits(stage, parts, request):
            if len(self._checked) >= _CHECKED:
                self._checked.clear()
            found = self._checked[key(stage)] = _Ready(stage, parts, request)
        return found

    def stream(self, incoming: Incoming, request: UpdateRequest, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name as soon as it is here and verified, in memory of its own. Raises as `fill`."""
        check = _Check(self.rank, request, Subset(layout, {}))
        part = torch.empty(0, dtype=torch.uint8, device=self.device)
        for bucket in incoming.buckets(None):
            done: list[tuple[Entry, torch.Tensor]] = []
            for piece in layout.pieces(bucket.number, request.bucket_bytes):
                if piece.start == 0:
                    part = torch.empty(piece.entry.nbytes, dtype=torch.uint8, device=self.device)
                arenas.copy(
                    part[piece.start : piece.start + piece.nbytes], bucket.data[piece.at : piece.at + piece.nbytes]
                )
                if piece.last:
                    done.append((piece.entry, part))
            arenas.synchronize(self.device)
            check.compare(bucket, done)
            done.reverse()
            while done:  # the loader may keep a tensor, but we do not
                entry, memory = done.pop()
                yield entry.spec.name, memory.view(entry.dtype).view(entry.spec.shape)

    def _provide(self, nbytes: int, kept: Staged | None) -> torch.Tensor:
        busy = [memory for memory in self._own if kept is not None and memory.data_ptr() == key(kept.data)]
        for memory in self._own:
            if memory.numel() >= nbytes and all(memory is not other for other in busy):
                return memory[:nbytes]
        self._own = busy  # what is too small is given back first
        available = arenas.free_bytes(self.device)
        if nbytes > available:
            raise TransferFailed(
                f"rank {self.rank}: the stage takes {nbytes} bytes and {available} are free on {self.device}; "
                'pass staging="none", a bucket_bytes of at least half the model, or free memory'
            )
        self._own.append(arenas.plain(nbytes, self.device))
        return self._own[-1]

    def release(self) -> None:
        """Give back memory of this rank's own."""
        self._own.clear()
        self._checked.clear()
        native_copy.release()


class _Check:
    """Compares tensors with what the trainer held, unless the push is not to be verified."""

    def __init__(self, rank: int, request: UpdateRequest, parts: Subset):
        self._rank, self._parts = rank, parts
        self.algorithm = "" if request.verify == "off" else request.digest
        if self.algorithm and self.algorithm not in digest.ALGORITHMS:
            raise TransferFailed(f"rank {rank} knows no digest {self.algorithm!r}; install the same weightsync")
        self.seconds = 0.0

    def are(self, bucket: Bucket, hashes: Hashes | None) -> bool:
        """Whether all that is hashed of a bucket is what was announced; False, too, where that cannot be told so."""
        start = time.perf_counter()
        same = hashes is not None and tuple(hashes.make()) == bucket.digests
        self.seconds += time.perf_counter() - start
        return same

    def compare(self, bucket: Bucket, ended: Iterable[tuple[Entry, torch.Tensor]]) -> None:
        """Compare the tensors that end in a bucket. Raises `DigestMismatch` by name."""
        if not self.algorithm:
            return
        start = time.perf_counter()
        announced = iter(bucket.digests)
        for entry, raw in ended:
            kept = self._parts.of(entry, raw) if entry.nbytes else None
            if kept is None:
                continue
            expected = next(announced, None)
            if expected != digest.hashed(self.algorithm, kept).value():
                raise DigestMismatch(
                    f"rank {self._rank}: {entry.spec.name} in bucket {bucket.number} is not what the trainer held "
                    f"({'its digest differs' if expected is not None else 'no digest came with it'})"
                )
        if next(announced, None) is not None:
            raise DigestMismatch(f"rank {self._rank}: bucket {bucket.number} came with digests of unknown tensors")
        self.seconds += time.perf_counter() - start
