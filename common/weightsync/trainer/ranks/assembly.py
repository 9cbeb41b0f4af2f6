"""What each rank of a sharded trainer does with the arena that all of them map: write its pieces to their place in the
assembled tensors, and hash.

Nothing is gathered: every byte of the model is copied once, from the rank that holds it to where the engines read it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightsync.errors import SourceError
from weightsync.memory import arenas
from weightsync.protocol.http import TensorSpec
from weightsync.sources import Source
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box, narrowed
from weightsync.tensors.layout import DTYPES, Layout
from weightsync.tensors.subset import Wanted
from weightsync.trainer.ranks.assignment import Plan, spread


class Order(NamedTuple):
    """One piece to be written: ``part`` of the tensor that begins at byte ``at`` of the stream, out of the ``held``
    entry's box number ``box``. ``alone``: nobody else writes into tensor ``tensor``, of which all is to be hashed, so
    whoever writes it does that too."""

    tensor: int
    at: int
    held: int
    box: int
    part: Box
    alone: bool


class HashPart(NamedTuple):
    """What is to be hashed once all have written: a ``box`` of a tensor, or all of it, at byte ``at`` of the stream."""

    tensor: int
    spec: TensorSpec
    at: int
    box: Box | None


class Orders(NamedTuple):
    """One rank's work: what it writes, then, once all have, what of it is to be hashed."""

    write: tuple[Order, ...]
    hash: tuple[HashPart, ...]


class Work(NamedTuple):
    """What a rank has done: digests by tensor and box of it, bytes written, seconds spent copying and hashing."""

    digests: tuple[tuple[int, Box | None, int], ...]
    nbytes: int
    gather_s: float
    digest_s: float


def orders_of(plan: Plan, layout: Layout, demand: Wanted) -> list[Orders]:
    """Every rank's work; what is not hashed while it is written is hashed by whom that leaves with the least to do."""
    providers, entries = plan.providers(), layout.entries
    wanted = [demand.boxes(entry.number) if entry.nbytes else set() for entry in entries]
    later = [
        HashPart(entry.number, entry.spec, entry.offset, box)
        for entry in entries
        for box in sorted(wanted[entry.number], key=lambda box: box or ())
        if box is not None or len(providers[entry.number]) > 1
    ]
    everyone = range(len(plan.pieces))
    hashing = spread([(_nbytes(part.spec, part.box), everyone) for part in later], everyone)
    return [
        Orders(
            tuple(
                Order(
                    p.tensor,
                    entries[p.tensor].offset,
                    p.held,
                    p.box,
                    p.part,
                    len(providers[p.tensor]) == 1 and None in wanted[p.tensor],
                )
                for p in pieces
            ),
            tuple(part for part, one in zip(later, hashing, strict=True) if one == rank),
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
    arenas.synchronize(source.device)
    # All are asked for, also where nothing of them is needed: making them may take every rank.
    for index, (held, parts) in enumerate(zip(source.held, source.parts(), strict=True)):
        for order in wanted.get(index, ()):
            part = _cut(held.spec, held.boxes[order.box], parts[order.box], order.part)
            size = _nbytes(held.spec)
            region = stream[order.at : order.at + size]
            target = narrowed(region.view(part.dtype).view(held.spec.shape), *order.part)
            plain = target.is_contiguous() and part.is_contiguous() and not part.is_neg()
            at_once = algorithm and order.alone and pieces[order.tensor] == 1
            nbytes += part.nbytes
            if not plain or part.device.type != "cpu":
                target.copy_(part)
            elif not at_once:
                arenas.copy(target, part)
            else:
                # What is hashed is the trainer's own tensor, so that a fault in copying shows too.
                digests[order.tensor], seconds = _copy_and_hash(target, part, algorithm)
                hashing_s += seconds
    identity = time.perf_counter()
    for order in orders:
        if algorithm and order.alone and order.tensor not in digests:
            size = _nbytes(source.held[order.held].spec)
            digests[order.tensor] = digest.digest_bytes(algorithm, stream[order.at : order.at + size])
    hashing_s += time.perf_counter() - identity
    found = tuple((tensor, None, value) for tensor, value in digests.items())
    return Work(found, nbytes, time.perf_counter() - start - hashing_s, hashing_s)


@torch.no_grad()
def hash_parts(parts: Sequence[HashPart], stream: torch.Tensor, algorithm: str) -> Work:
    """Hash what all have written."""
    start = time.perf_counter()
    digests = []
    for tensor, spec, at, box in parts:
        region = stream[at : at + _nbytes(spec)].view(DTYPES[spec.dtype]).view(spec.shape)
        found = digest.hashed(algorithm, region if box is None else narrowed(region, *box))
        digests.append((tensor, box, found.value()))
    return Work(tuple(digests), 0, 0.0, time.perf_counter() - start)


def _nbytes(spec: TensorSpec, box: Box | None = None) -> int:
    return math.prod(spec.shape if box is None else box.shape) * DTYPES[spec.dtype].itemsize


def _cut(spec: TensorSpec, box: Box, local: torch.Tensor, part: Box) -> torch.Tensor:
    if tuple(local.shape) != tuple(box.shape) or local.dtype != DTYPES[spec.dtype]:
        raise SourceError(
            f"{spec.name} changed while it was sent: {spec.dtype} {list(box.shape)} became {local.dtype} "
            f"{list(local.shape)}"
        )
    return narrowed(local, [a - b for a, b in zip(part.start, box.start, strict=True)], part.shape)


def _copy_and_hash(target: torch.Tensor, part: torch.Tensor, algorithm: str) -> tuple[int, float]:
    """In pieces, so that what is hashed is still in the cache; the digest, and the seconds that hashing took."""
    hasher, seconds = digest.ALGORITHMS[algorithm](), 0.0
    into, out_of = (one.view(-1).view(torch.uint8) for one in (target, part))
    for left, right in zip(torch.split(into, digest.CHUNK_BYTES), torch.split(out_of, digest.CHUNK_BYTES), strict=True):
        arenas.copy(left, right)
        identity = time.perf_counter()
        hasher.update(right)
        seconds += time.perf_counter() - identity
    return hasher.value(), seconds
