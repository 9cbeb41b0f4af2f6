"""The work of each rank of a sharded trainer: write its pieces into the arena that the ranks of its host map, and hash.

Nothing is gathered: every byte of the model is copied once, from a rank that holds it to where the engines read it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from msgspec import structs

from weightsync.errors import SourceError
from weightsync.memory import arenas
from weightsync.protocol.http import TensorSpec
from weightsync.sources import Source
from weightsync.tensors import digest
from weightsync.tensors.boxes import Box, is_within, narrowed, relative, whole
from weightsync.tensors.casting import cast
from weightsync.tensors.layout import DTYPES, Cell, Layout, listed
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Wanted
from weightsync.trainer.ranks.assignment import Assignment, Plan, spread

#: When to compare what several ranks of a trainer hold: at the first push and every hundredth, or at each.
CheckReplicas = Literal["first", "always"]


class Order(NamedTuple):
    """One piece to write: ``part`` of tensor ``tensor``. Box ``of`` of that tensor begins at byte ``at`` of the arena.

    It is read from box number ``box`` of the rank's ``held`` entry. ``exclusive``: no other rank writes into ``of``,
    and all of that is to be hashed, so the rank that writes it also hashes it. The tensor crosses as ``dtype``."""

    tensor: int
    at: int
    of: Box
    held: int
    box: int
    part: Box
    exclusive: bool
    dtype: str


class HashPart(NamedTuple):
    """What to hash once all have written: a ``box``, or all, of a tensor whose box ``of`` begins at byte ``at`` of the
    arena."""

    tensor: int
    spec: TensorSpec
    at: int
    of: Box
    box: Box | None


class Orders(NamedTuple):
    """One rank's work: what it writes, and what it hashes once all ranks have written."""

    write: tuple[Order, ...]
    hash: tuple[HashPart, ...]


class Work(NamedTuple):
    """The result of a rank: digests by tensor number and box, bytes written, seconds spent copying and hashing, and
    the infinite and NaN elements among those that it cast."""

    digests: tuple[tuple[int, Box | None, int], ...]
    nbytes: int
    gather_s: float
    digest_s: float
    not_finite: int = 0


def orders_of(plan: Plan, layout: Layout, demand: Wanted, domain_of: Sequence[int]) -> list[Orders]:
    """Every rank's work; ``domain_of`` has the memory domain of each.

    What is not hashed while it is written goes to the rank of its domain that has the least to hash.
    """
    # With one domain, pieces are written into the tensors in its arena.
    wholes = [Cell(0, whole(entry.spec), entry.offset) for entry in layout.entries] if not layout.table else []
    placed = [
        [(piece, wholes[piece.tensor] if wholes else _cell_of(layout, piece, domain_of[rank])) for piece in own]
        for rank, own in enumerate(plan.pieces)
    ]
    writers: dict[tuple[int, Cell], set[int]] = {}
    for rank, own in enumerate(placed):
        for piece, cell in own:
            writers.setdefault((piece.tensor, cell), set()).add(rank)
    later: list[tuple[HashPart, int]] = []
    at_once: set[tuple[int, Cell]] = set()
    for (number, cell), ranks in sorted(writers.items()):
        spec = layout.entries[number].spec
        for box in sorted(demand.boxes(number), key=lambda box: box or ()):
            if (box or whole(spec)) == cell.box and len(ranks) == 1:
                at_once.add((number, cell))
            elif is_within(box or whole(spec), cell.box):
                later.append((HashPart(number, spec, cell.at, cell.box, box), cell.domain))
    ranks_of = {domain: [rank for rank, found in enumerate(domain_of) if found == domain] for domain in domain_of}
    work = [(_nbytes(part.spec, part.box), ranks_of[domain]) for part, domain in later]
    hashing = spread(work, range(len(plan.pieces)))
    return [
        Orders(
            tuple(
                Order(
                    piece.tensor,
                    cell.at,
                    cell.box,
                    piece.held,
                    piece.box,
                    piece.part,
                    (piece.tensor, cell) in at_once,
                    layout.entries[piece.tensor].spec.dtype,
                )
                for piece, cell in own
            ),
            tuple(part for (part, _), hashed_by in zip(later, hashing, strict=True) if hashed_by == rank),
        )
        for rank, own in enumerate(placed)
    ]


def _cell_of(layout: Layout, piece: Assignment, domain: int) -> Cell:
    """The cell into which a rank of this domain writes a piece."""
    cells = layout.cells(piece.tensor)
    return next(cell for cell in cells if cell.domain == domain and is_within(piece.part, cell.box))


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Inside the context, what a source raises while it is read becomes a `SourceError`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise SourceError(f"the weights could not be read: {error}") from error


@torch.no_grad()
def write(source: Source, orders: Sequence[Order], stream: torch.Tensor, algorithm: str) -> Work:
    """Copy the pieces of ``orders`` into ``stream``, 1-D uint8, and hash the tensors that no other rank writes into.

    With an empty ``algorithm`` nothing is hashed. Raises `SourceError` that names a tensor whose shape or dtype is not
    what the source had announced, or that cannot be cast.
    """
    start, hashing_s, nbytes, not_finite = time.perf_counter(), 0.0, 0, 0
    wanted: dict[int, list[Order]] = {}
    for order in orders:
        wanted.setdefault(order.held, []).append(order)
    pieces = Counter((order.tensor, order.of) for order in orders)
    digests: dict[tuple[int, Box], int] = {}
    arenas.synchronize(source.device)
    # Every tensor is read, needed or not: making one may be a collective operation of all ranks.
    for index, (held, parts) in enumerate(zip(source.held, source.parts(), strict=True)):
        for order in wanted.get(index, ()):
            part = cut(held.spec, held.boxes[order.box], parts[order.box], order.part)
            crossing = structs.replace(held.spec, dtype=order.dtype)
            region = stream[order.at : order.at + _nbytes(crossing, order.of)]
            target = narrowed(region.view(DTYPES[order.dtype]).view(order.of.shape), *relative(order.part, order.of))
            nbytes += target.nbytes
            if target.dtype != part.dtype:
                not_finite += cast(held.spec.name, target, part)
                continue
            plain = target.is_contiguous() and part.is_contiguous() and not part.is_neg()
            at_once = algorithm and order.exclusive and pieces[order.tensor, order.of] == 1
            if not plain or part.device.type != "cpu":
                target.copy_(part)
            elif not at_once:
                arenas.copy(target, part)
            else:
                # The trainer's own tensor is hashed, so that a fault in copying shows too.
                digests[order.tensor, order.of], seconds = _copy_and_hash(target, part, algorithm)
                hashing_s += seconds
    arenas.synchronize(stream.device)
    hash_start = time.perf_counter()
    shapes = {order.tensor: source.held[order.held].spec.shape for order in orders}
    rest = {(order.tensor, order.of): order for order in orders if algorithm and order.exclusive}
    rest = {key: order for key, order in rest.items() if key not in digests}
    sizes = (math.prod(order.of.shape) * DTYPES[order.dtype].itemsize for order in rest.values())
    written = (stream[order.at :][:size] for order, size in zip(rest.values(), sizes, strict=True))
    digests |= zip(rest, digest.digests(algorithm, written), strict=True)
    hashing_s += time.perf_counter() - hash_start
    hashed = ((tensor, None if of.shape == shapes[tensor] else of, value) for (tensor, of), value in digests.items())
    return Work(tuple(hashed), nbytes, time.perf_counter() - start - hashing_s, hashing_s, not_finite)


@torch.no_grad()
def hash_copies(source: Source, copies: Sequence[Assignment], algorithm: str) -> Work:
    """Hash each of ``copies`` where the trainer holds it. Raises `SourceError` as `write`."""
    start = time.perf_counter()
    wanted: dict[int, list[Assignment]] = {}
    for copy in copies:
        wanted.setdefault(copy.held, []).append(copy)
    digests = []
    arenas.synchronize(source.device)
    for index, (held, parts) in enumerate(zip(source.held, source.parts(), strict=True)):
        for copy in wanted.get(index, ()):
            part = cut(held.spec, held.boxes[copy.box], parts[copy.box], copy.part).resolve_neg()
            if digest.algorithm_for(part.device) != algorithm:  # rank 0 has chosen it for its own device
                part = part.cpu()
            digests.append((copy.tensor, copy.part, digest.hashed(algorithm, part).value()))
    return Work(tuple(digests), 0, 0.0, time.perf_counter() - start)


def check_equal(manifest: Sequence[TensorSpec], ranks: Sequence[Work]) -> None:
    """Raise `SourceError` for tensors of which two ranks hold different values, by what each has hashed."""
    first: dict[tuple[int, Box | None], tuple[int, int]] = {}
    differing: dict[int, str] = {}
    for rank, work in enumerate(ranks):
        for tensor, box, value in work.digests:
            other, known = first.setdefault((tensor, box), (rank, value))
            if known != value:
                differing.setdefault(tensor, f"{manifest[tensor].name} (ranks {other} and {rank}, {box})")
    if differing:
        raise SourceError(
            f"the trainer's ranks hold different values of the same weights: {listed(differing.values())}; they have "
            "diverged, or were never made equal: broadcast them from one rank before training goes on"
        )


@torch.no_grad()
def hash_parts(parts: Sequence[HashPart], stream: Stream, algorithm: str) -> Work:
    """Hash parts of ``stream``, which all ranks have written, or which is this rank's own memory."""
    start = time.perf_counter()

    def region(part: HashPart) -> torch.Tensor:
        raw = stream[part.at : part.at + _nbytes(part.spec, part.of)]
        of = raw.view(DTYPES[part.spec.dtype]).view(part.of.shape)
        return of if part.box is None else narrowed(of, *relative(part.box, part.of))

    found = digest.digests(algorithm, map(region, parts))
    digests = ((part.tensor, part.box, value) for part, value in zip(parts, found, strict=True))
    return Work(tuple(digests), 0, 0.0, time.perf_counter() - start)


def _nbytes(spec: TensorSpec, box: Box | None = None) -> int:
    return math.prod(spec.shape if box is None else box.shape) * DTYPES[spec.dtype].itemsize


def cut(spec: TensorSpec, box: Box, local: torch.Tensor, part: Box) -> torch.Tensor:
    """A part of a rank's ``local`` tensor, which is ``box`` of that of ``spec``. Raises `SourceError` if it is not."""
    if tuple(local.shape) != tuple(box.shape) or local.dtype != DTYPES[spec.dtype]:
        raise SourceError(
            f"{spec.name} changed while it was sent: {spec.dtype} {list(box.shape)} became {local.dtype} "
            f"{list(local.shape)}"
        )
    return narrowed(local, *relative(part, box))


def _copy_and_hash(target: torch.Tensor, part: torch.Tensor, algorithm: str) -> tuple[int, float]:
    """Copy in chunks and hash each, with XXH3 from the cache; return the digest, and the seconds spent hashing."""
    hasher, seconds = digest.ALGORITHMS[algorithm](), 0.0
    into, out_of = (one.view(-1).view(torch.uint8) for one in (target, part))
    for left, right in zip(torch.split(into, digest.CHUNK_BYTES), torch.split(out_of, digest.CHUNK_BYTES), strict=True):
        arenas.copy(left, right)
        hash_start = time.perf_counter()
        hasher.update(right)
        seconds += time.perf_counter() - hash_start
    return hasher.value(), seconds
