"""Packs tensors into the buckets of an arena, and hashes them on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from weightsync.errors import SourceError
from weightsync.memory import arenas
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box, narrowed
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversion, Conversions, Making, by_source
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
    packing shows too; of what is converted, those of the result. A scattered arena is the tensors' own memory, and
    nothing is copied into it. Afterwards ``gather_s`` and ``digest_s`` are the seconds spent copying and hashing, and
    ``not_finite`` is the number of infinite and NaN elements among those that were converted.
    """

    def __init__(
        self,
        layout: Layout,
        arena: Stream,
        bucket_bytes: int,
        slots: int,
        algorithm: str,
        demand: Wanted,
        conversions: Conversions = NO_CONVERSIONS,
    ):
        self._layout, self._arena, self._bucket_bytes, self._slots = layout, arena, bucket_bytes, slots
        self._conversions = conversions
        self._copies = not isinstance(arena, Scattered)
        self._algorithm, self._demand = algorithm, demand
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0

    def fill(self, tensors: Iterable[torch.Tensor], acquire: Callable[[int], None]) -> Iterator[Packed]:
        """Yield every bucket once it is full; ``acquire(number)`` waits until the slot of a bucket may be written.

        Raises `SourceError` that names a tensor whose shape or dtype is not what was planned, or of which a finite
        element would become infinite.
        """
        return self.fill_pairs(zip(by_source(self._layout, self._conversions), tensors, strict=True), acquire)

    @torch.no_grad()
    def fill_pairs(
        self, pairs: Iterable[tuple[tuple[Entry, ...], torch.Tensor]], acquire: Callable[[int], None]
    ) -> Iterator[Packed]:
        """As `fill`, with the places in the stream of what each tensor becomes. No tensor is held when the next is
        asked for."""
        bucket, size, finished, begins = -1, self._bucket_bytes, _Hashing(), list[int]()
        for entries, tensor in pairs:
            conversion = self._conversions.get(entries[0].number)
            _check(entries[0], conversion, tensor)
            making = conversion.begin(tensor) if conversion is not None else None
            for which, entry in enumerate(entries):
                raw = self._raw(entry, tensor) if making is None else None
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
                    if making is None:
                        done += self._copy(entry, tensor, raw, done, hasher)
                    else:
                        done += self._make(entry, tensor.device, making, which, done, hasher)
                if hasher is not None:
                    if self._copies and hasher.deferred:
                        self._settle(hasher)  # the tensor may be gone when the next one is there
                    finished[entry.number, None] = hasher
                if boxes - {None}:
                    finished |= self._boxes(entry, _result(entry, tensor, making, which), boxes)
                del raw
            del tensor, making
        if bucket < 0:
            acquire(0)
        yield self._full(max(bucket, 0), finished, begins)

    def _raw(self, entry: Entry, tensor: torch.Tensor) -> torch.Tensor | None:
        """The tensor's bytes, contiguous; None for a strided tensor that is copied whole into one bucket."""
        whole = tensor.is_contiguous() and not tensor.is_neg()
        if not whole and entry.offset // self._bucket_bytes == (entry.offset + entry.nbytes) // self._bucket_bytes:
            return None
        return (tensor if whole else tensor.resolve_neg().contiguous()).view(-1).view(torch.uint8)

    def _make(
        self, entry: Entry, device: torch.device, making: Making, which: int, done: int, hasher: Hasher | None
    ) -> int:
        """As `_copy`, of what a conversion makes of a tensor on ``device``; that is hashed."""
        start, hashing_s = time.perf_counter(), 0.0
        target, at = self._window(entry, done).view(entry.dtype), done // entry.dtype.itemsize
        step = digest.CHUNK_BYTES // entry.dtype.itemsize if device.type == "cpu" else max(1, target.numel())
        for into in torch.split(target, step):
            self.not_finite += making.write(which, at, into)
            at += into.numel()
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
        """Hash boxes of a tensor as it crosses."""
        hash_start = time.perf_counter()
        resolved = tensor.resolve_neg()
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


def _check(entry: Entry, conversion: Conversion | None, tensor: torch.Tensor) -> None:
    """Raise `SourceError` unless the tensor of which ``entry`` is the first that crosses is what was planned."""
    planned, dtype = (entry.spec, entry.dtype) if conversion is None else (conversion.source, conversion.dtype)
    if tensor.shape != torch.Size(planned.shape) or tensor.dtype != dtype:
        raise SourceError(
            f"{planned.name} changed while it was sent: {dtype_name(dtype)} {planned.shape} became "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )


def _result(entry: Entry, tensor: torch.Tensor, making: Making | None, which: int) -> torch.Tensor:
    """All of a tensor as it crosses: the trainer's own, or what a conversion makes of it."""
    if making is None:
        return tensor
    made = torch.empty(entry.spec.shape, dtype=entry.dtype, device=tensor.device)
    making.write(which, 0, made.view(-1))
    return made


@torch.no_grad()
def hash_stream(layout: Layout, stream: Stream, algorithm: str, demand: Wanted) -> Found:
    """Hash what ``demand`` asks for in a stream that is already packed; digests by tensor number and box."""
    wanted = [(entry, box) for entry in layout.entries if entry.nbytes for box in demand.boxes(entry.number)]
    views = (entry.view(stream) if box is None else narrowed(entry.view(stream), *box) for entry, box in wanted)
    return {
        (entry.number, box): found for (entry, box), found in zip(wanted, digest.digests(algorithm, views), strict=True)
    }
