"""Packs tensors into the buckets of an arena, and hashes them on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from weightsync.errors import SourceError
from weightsync.memory import arenas
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box, narrowed
from weightsync.tensors.casting import NO_CASTS, cast
from weightsync.tensors.digest import Hasher
from weightsync.tensors.layout import Entry, Layout, dtype_name
from weightsync.tensors.scattered import Scattered, Stream
from weightsync.tensors.subset import Digests, Found, Wanted


class Packed(NamedTuple):
    """A full bucket: its number, the digests of the tensors that end in it, the bytes packed so far, and the numbers of
    the tensors that begin in it."""

    number: int
    digests: Digests
    nbytes: int
    begins: tuple[int, ...] = ()


_Hashing = dict[tuple[int, Box | None], Hasher]
"""Hashers by tensor number and box, None for the whole tensor."""


class Packer:
    """Packs one stream into ``arena``, 1-D uint8, whose ``slots`` buckets of ``bucket_bytes`` are filled in turn.

    The digests that ``demand`` asks for are those of the trainer's own tensors where possible, so that a fault in
    packing shows too. A scattered arena is the tensors' own memory, and nothing is copied into it. ``sources`` has the
    dtype of each tensor that is cast, by its number. Afterwards ``gather_s`` and ``digest_s`` are the seconds spent
    copying and hashing, and ``not_finite`` is the number of infinite and NaN elements among those that were cast.
    """

    def __init__(
        self,
        layout: Layout,
        arena: Stream,
        bucket_bytes: int,
        slots: int,
        algorithm: str,
        demand: Wanted,
        sources: Mapping[int, torch.dtype] = NO_CASTS,
    ):
        self._layout, self._arena, self._bucket_bytes, self._slots = layout, arena, bucket_bytes, slots
        self._sources = sources
        self._copies = not isinstance(arena, Scattered)
        self._algorithm, self._demand = algorithm, demand
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0

    def fill(self, tensors: Iterable[torch.Tensor], acquire: Callable[[int], None]) -> Iterator[Packed]:
        """Yield every bucket once it is full; ``acquire(number)`` waits until the slot of a bucket may be written.

        Raises `SourceError` that names a tensor whose shape or dtype is not what was planned, or of which a finite
        element would become infinite.
        """
        return self.fill_pairs(zip(self._layout.entries, tensors, strict=True), acquire)

    @torch.no_grad()
    def fill_pairs(
        self, pairs: Iterable[tuple[Entry, torch.Tensor]], acquire: Callable[[int], None]
    ) -> Iterator[Packed]:
        """As `fill`, with the place of each tensor in the stream. No tensor is held when the next is asked for."""
        bucket, size, finished, begins = -1, self._bucket_bytes, _Hashing(), list[int]()
        for entry, tensor in pairs:
            planned = self._sources.get(entry.number, entry.dtype)
            if tensor.shape != torch.Size(entry.spec.shape) or tensor.dtype != planned:
                raise SourceError(
                    f"{entry.spec.name} changed while it was sent: {dtype_name(planned)} {entry.spec.shape} became "
                    f"{tensor.dtype} {tuple(tensor.shape)}"
                )
            flat = tensor.reshape(-1) if entry.number in self._sources else None
            raw = self._raw(entry, tensor) if flat is None else None
            boxes = self._demand.boxes(entry.number) if self._algorithm and entry.nbytes else set()
            hasher = digest.ALGORITHMS[self._algorithm]() if None in boxes else None
            done = 0
            while done < entry.nbytes:
                wanted = (entry.offset + done) // size
                if wanted != bucket:
                    if bucket >= 0:
                        yield self._full(bucket, finished, begins)
                    bucket = wanted
                    acquire(bucket)
                if not done:
                    begins.append(entry.number)
                if flat is None:
                    done += self._copy(entry, tensor, raw, done, hasher)
                else:
                    done += self._cast(entry, flat, done, hasher)
            if hasher is not None:
                if self._copies and hasher.deferred:
                    self._settle(hasher)  # the tensor may be gone when the next one is there
                finished[entry.number, None] = hasher
            if boxes - {None}:
                finished |= self._boxes(entry, tensor, boxes)
            del tensor, flat, raw
        if bucket < 0:
            acquire(0)
        yield self._full(max(bucket, 0), finished, begins)

    def _raw(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's bytes, contiguous; None for a strided tensor that is copied whole into one bucket."""
        whole = tensor.is_contiguous() and not tensor.is_neg()
        if not whole and entry.offset // self._bucket_bytes == (entry.offset + entry.nbytes) // self._bucket_bytes:
            return None
        return (tensor if whole else tensor.resolve_neg().contiguous()).view(-1).view(torch.uint8)

    def _cast(self, entry: Entry, flat: torch.Tensor, done: int, hasher: Hasher | None) -> int:
        """As `_copy`, casting; what is hashed is the result."""
        start, hashing_s = time.perf_counter(), 0.0
        target, size = self._window(entry, done).view(entry.dtype), entry.dtype.itemsize
        out_of = flat[done // size : done // size + target.numel()]
        step = digest.CHUNK_BYTES // size if flat.device.type == "cpu" else max(1, target.numel())
        for into, piece in zip(torch.split(target, step), torch.split(out_of, step), strict=True):
            self.not_finite += cast(entry.spec.name, into, piece)
            if hasher is not None:
                hash_start = time.perf_counter()
                hasher.update(into.view(torch.uint8))
                digest.settle([hasher])  # the next bucket may take the place of this one
                hashing_s += time.perf_counter() - hash_start
        self.digest_s += hashing_s
        self.gather_s += time.perf_counter() - start - hashing_s
        return target.nbytes

    def _window(self, entry: Entry, done: int) -> torch.Tensor:
        """The part of the current bucket for the tensor's bytes from ``done`` on."""
        position = entry.offset + done
        nbytes = min(entry.nbytes - done, self._bucket_bytes - position % self._bucket_bytes)
        at = position % (self._slots * self._bucket_bytes)
        return self._arena[at : at + nbytes]

    def _copy(
        self, entry: Entry, tensor: torch.Tensor, raw: torch.Tensor | None, done: int, hasher: Hasher | None
    ) -> int:
        """Copy as much of the tensor as fits into the current bucket; return how many bytes that was."""
        start, hashing_s = time.perf_counter(), 0.0
        target = self._window(entry, done)
        nbytes = target.numel()
        if raw is None:
            target.view(entry.dtype).view(entry.spec.shape).copy_(tensor)
            pieces = [(target, target)]
        else:
            source = raw[done : done + nbytes]
            # In chunks, so that hashing finds them in the cache; on an accelerator chunks would only cost launches.
            cached = hasher is not None and self._copies and source.device.type == "cpu"
            step = digest.CHUNK_BYTES if cached else max(1, nbytes)
            pieces = list(zip(torch.split(target, step), torch.split(source, step), strict=True))
        for into, out_of in pieces:
            if into is not out_of and self._copies:
                arenas.copy(into, out_of)
            if hasher is not None:
                hash_start = time.perf_counter()
                hasher.update(out_of)
                hashing_s += time.perf_counter() - hash_start
        self.digest_s += hashing_s
        self.gather_s += time.perf_counter() - start - hashing_s
        return nbytes

    def _boxes(self, entry: Entry, tensor: torch.Tensor, boxes: Iterable[Box | None]) -> _Hashing:
        """Hash boxes of a tensor."""
        hash_start = time.perf_counter()
        resolved = tensor.resolve_neg().to(entry.dtype)
        found: _Hashing = {}
        for box in boxes:
            if box is not None:
                hasher = found[entry.number, box] = digest.hashed(self._algorithm, narrowed(resolved, *box))
                digest.settle([hasher])  # the tensor may be gone when the next one is there
        self.digest_s += time.perf_counter() - hash_start
        return found

    def _settle(self, hasher: Hasher) -> None:
        hash_start = time.perf_counter()
        digest.settle([hasher])
        self.digest_s += time.perf_counter() - hash_start

    def _full(self, bucket: int, finished: _Hashing, begins: list[int]) -> Packed:
        digests: Digests = {}
        if finished:
            hash_start = time.perf_counter()
            numbers = dict.fromkeys(number for number, _ in finished)
            digest.settle(finished.values())
            digests = self._demand.digests(numbers, {which: hasher.value() for which, hasher in finished.items()})
            finished.clear()
            self.digest_s += time.perf_counter() - hash_start
        arenas.synchronize(self._arena.device)
        begun = tuple(begins)
        begins.clear()
        return Packed(bucket, digests, min((bucket + 1) * self._bucket_bytes, self._layout.nbytes), begun)


@torch.no_grad()
def hash_stream(layout: Layout, stream: Stream, algorithm: str, demand: Wanted) -> Found:
    """Hash what ``demand`` asks for in a stream that is already packed; digests by tensor number and box."""
    wanted = [(entry, box) for entry in layout.entries if entry.nbytes for box in demand.boxes(entry.number)]
    views = (entry.view(stream) if box is None else narrowed(entry.view(stream), *box) for entry, box in wanted)
    return {
        (entry.number, box): found for (entry, box), found in zip(wanted, digest.digests(algorithm, views), strict=True)
    }
