"""What each rank of a sharded trainer does with the arena that all of them map: write its pieces to their place in the
assembled tensors, and hash.

Nothing is gathered: every byte of the model is copied once, from the rank that holds it to where the engines read it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightsync import digest, staging
from weightsync.errors import SourceError
from weightsync.layout import DTYPES, Layout
from weightsync.plan import Box, Plan, spread
from weightsync.sources import Source
from weightsync.wire import TensorSpec


class Order(NamedTuple):
    """One piece to be written: ``part`` of the tensor that begins at byte ``at`` of the stream, out of the ``held``
    entry's box number ``box``. ``alone``: nobody else writes into tensor ``tensor``, so whoever writes it hashes it."""

    tensor: int
    at: int
    held: int
    box: int
    part: Box
    alone: bool


class Span(NamedTuple):
    """A tensor that several ranks have written: ``nbytes`` at byte ``at`` of the stream."""

    tensor: int
    at: int
    nbytes: int


class Orders(NamedTuple):
    """One rank's work: what it writes, then, once all have, what of it is to be hashed."""

    write: tuple[Order, ...]
    hash: tuple[Span, ...]


class Work(NamedTuple):
    """What a rank has done: digests by tensor, bytes written, seconds spent copying and hashing."""

    digests: tuple[tuple[int, int], ...]
    nbytes: int
    gather_s: float
    digest_s: float


def orders_of(plan: Plan, layout: Layout) -> list[Orders]:
    """Every rank's work; tensors of several ranks are hashed by whom that leaves with the least to hash."""
    providers, entries = plan.providers(), layout.entries
    shared = [index for index, ranks in enumerate(providers) if len(ranks) > 1]
    everyone = range(len(plan.pieces))
    hashing = spread([(entries[index].nbytes, everyone) for index in shared], everyone)
    return [
        Orders(
            tuple(
                Order(p.tensor, entries[p.tensor].offset, p.held, p.box, p.part, len(providers[p.tensor]) == 1)
                for p in pieces
            ),
            tuple(
                Span(index, entries[index].offset, entries[index].nbytes)
                for index, one in zip(shared, hashing, strict=True)
                if one == rank
            ),
        )
        for rank, pieces in enumerate(plan.pieces)
    ]


@torch.no_grad()
def write(source: Source, orders: Sequence[Order], stream: torch.Tensor, algorithm: str) -> Work:
    """Copy what ``orders`` say into ``stream``, 1-D uint8, and hash what nobody else writes into.

    No digests where ``algorithm`` is empty. Raises `SourceError` by name for a tensor that is not as it was described.
    """
    start, hashing_s, nbytes = time.perf_counter(), 0.0, 0
    wanted: dict[int, list[Order]] = {}
    for order in orders:
        wanted.setdefault(order.held, []).append(order)
    pieces = Counter(order.tensor for order in orders)
    digests: dict[int, int] = {}
    staging.synchronize(source.device)
    # All are asked for, also where nothing of them is needed: making them may take every rank.
    for index, (held, parts) in enumerate(zip(source.held, source.parts(), strict=True)):
        for order in wanted.get(index, ()):
            part = _cut(held.spec, held.boxes[order.box], parts[order.box], order.part)
            size = _nbytes(held.spec)
            region = stream[order.at : order.at + size]
            target = _narrow(region.view(part.dtype).view(held.spec.shape), order.part.start, order.part.shape)
            plain = target.is_contiguous() and part.is_contiguous() and not part.is_neg()
            at_once = algorithm and order.alone and pieces[order.tensor] == 1
            nbytes += part.nbytes
            if not plain or part.device.type != "cpu":
                target.copy_(part)
            elif not at_once:
                staging.copy(target, part)
            else:
                # What is hashed is the trainer's own tensor, so that a fault in copying shows too.
                digests[order.tensor], seconds = _copy_and_hash(target, part, algorithm)
                hashing_s += seconds
    mark = time.perf_counter()
    for order in orders:
        if algorithm and order.alone and order.tensor not in digests:
            size = _nbytes(source.held[order.held].spec)
            digests[order.tensor] = digest.digest_bytes(algorithm, stream[order.at : order.at + size])
    hashing_s += time.perf_counter() - mark
    return Work(tuple(digests.items()), nbytes, time.perf_counter() - start - hashing_s, hashing_s)


def hash_spans(spans: Sequence[Span], stream: torch.Tensor, algorithm: str) -> Work:
    """Hash tensors that several ranks have written."""
    start = time.perf_counter()
    digests = tuple((one.tensor, digest.digest_bytes(algorithm, stream[one.at : one.at + one.nbytes])) for one in spans)
    return Work(digests, 0, 0.0, time.perf_counter() - start)


def _nbytes(spec: TensorSpec) -> int:
    return torch.Size(spec.shape).numel() * DTYPES[spec.dtype].itemsize


def _cut(spec: TensorSpec, box: Box, local: torch.Tensor, part: Box) -> torch.Tensor:
    if tuple(local.shape) != tuple(box.shape) or local.dtype != DTYPES[spec.dtype]:
        raise SourceError(
            f"{spec.name} changed while it was sent: {spec.dtype} {list(box.shape)} became {local.dtype} "
            f"{list(local.shape)}"
        )
    return _narrow(local, [a - b for a, b in zip(part.start, box.start, strict=True)], part.shape)


def _narrow(tensor: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    for dim, (at, size) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor


def _copy_and_hash(target: torch.Tensor, part: torch.Tensor, algorithm: str) -> tuple[int, float]:
    """In pieces, so that what is hashed is still in the cache; the digest, and the seconds that hashing took."""
    hasher, seconds = digest.ALGORITHMS[algorithm](), 0.0
    into, out_of = (one.view(-1).view(torch.uint8) for one in (target, part))
    for left, right in zip(torch.split(into, digest.CHUNK_BYTES), torch.split(out_of, digest.CHUNK_BYTES), strict=True):
        staging.copy(left, right)
        mark = time.perf_counter()
        hasher.update(right)
        seconds += time.perf_counter() - mark
    return hasher.value(), seconds
