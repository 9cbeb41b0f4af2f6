"""Parameters of several trainer processes that engines read in place: each process is a memory domain of its own.

Nothing is copied on the trainer's side. Every rank offers what the plan has it provide, and hashes that where it is. An
offer holds until its rank revokes it: when the call fails, or when it is asked to write into an arena instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Final

import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas, shared_parameters
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol.handles import Handle
from weightsync.sources import Source
from weightsync.sources.drafted import parts_of
from weightsync.sources.mapping import MappingSource
from weightsync.sources.module import ModuleSource
from weightsync.tensors.boxes import innermost, is_within, whole
from weightsync.tensors.layout import Layout, Table
from weightsync.tensors.scattered import Stream
from weightsync.tensors.subset import Found, Wanted
from weightsync.trainer.ranks import assembly
from weightsync.trainer.ranks.assembly import HashPart, Work
from weightsync.trainer.ranks.assignment import Assignment, Plan
from weightsync.trainer.ranks.messages import Hash, Lend, Replies, Share, Shared, ToRank

#: Each run of bytes is a copy of its own while the engines are paused: with more in a tensor, on average, an arena is
#: faster.
_MOST_RUNS: Final = 16

Pieces = tuple[Assignment, ...]


class Offers:
    """What the ranks of a trainer of ``size`` processes offer, as rank 0 knows it.

    ``send`` sends a rank a message, and ``replies`` waits for the replies of ranks; both raise as those of
    `Coordinator`.
    """

    def __init__(self, size: int, send: Callable[[int, ToRank], None], replies: Replies):
        self._others, self._send, self._replies = range(1, size), send, replies
        #: The plan, what each rank offers by it, and the table of the domains; no ranks if it takes too many copies.
        self._of: tuple[Plan | None, tuple[Pieces, ...], Table] = (None, (), ())
        #: What each other rank was last told to offer, and has offered; and to hash.
        self._told: dict[int, Pieces] = {}
        self._offered: dict[int, Shared] = {}
        self._hashing: tuple[Layout | None, frozenset[str], list[tuple[HashPart, ...]]] = (None, frozenset(), [])
        self._told_to_hash: dict[int, tuple[HashPart, ...]] = {}
        #: The address of rank 0's first tensor, if that is not in shared memory.
        self._private = 0

    def forget(self) -> None:
        """Note that the call failed: every rank has revoked its offer."""
        for known in (self._told, self._offered, self._told_to_hash):
            known.clear()

    @property
    def names(self) -> tuple[str, ...]:
        """See `base.PeerRanks.offered`."""
        return tuple(self._offered[rank].name if rank in self._offered else "" for rank in self._others)

    def lend(self, arena: str, deadline: Deadline) -> list[Handle | None]:
        """See `base.PeerRanks`."""
        asked = [rank for rank, one in self._offered.items() if one.name and one.handle is None]
        for rank in asked:
            self._send(rank, Lend(arena))
        lent = self._replies("to share its parameters", deadline, asked)
        known: dict[int, Handle | None] = {rank: one.handle for rank, one in self._offered.items()}
        known |= {rank: done.lent for rank, done in lent.items()}
        return [known.get(rank) for rank in self._others]

    def of(
        self, plan: Plan, source: Source, device: torch.device, known: SharedParameters | None, deadline: Deadline
    ) -> tuple[list[torch.Tensor], Table] | None:
        """What rank 0 offers, and the table of all; None if any rank cannot.

        ``device`` is that of arenas; ``known`` is what rank 0 offered last.
        """
        if self._of[0] is not plan:
            self._of = plan, *_divided(plan)
        _, pieces, table = self._of
        if not pieces or not pieces[0]:
            return None
        with assembly.reading():
            own = self._found(tensors_of(source, pieces[0]), device, known)
        if own is None:
            return None
        arenas.synchronize(source.device)
        for rank in self._others:
            new = None if self._told.get(rank) == pieces[rank] else pieces[rank]
            before = self._offered[rank].name if rank in self._offered else ""
            self._send(rank, Share(before, new, device.type == "cuda"))
            self._told[rank] = pieces[rank]
        for rank, done in self._replies("to offer its parameters", deadline, self._others).items():
            assert done.shared is not None, "the reply to Share has the offer"
            if rank not in self._offered or done.shared.name != self._offered[rank].name:
                self._offered[rank] = done.shared
        able = all(self._offered[rank].name for rank in self._others if pieces[rank])
        return (own, table) if able else None

    def _found(
        self, tensors: Iterator[torch.Tensor], device: torch.device, known: SharedParameters | None
    ) -> list[torch.Tensor] | None:
        """See `shared_parameters.find`; in most trainers the first tensor is private, and stays where it is."""
        first = next(tensors)
        if first.data_ptr() == self._private:
            return None
        found = shared_parameters.find(itertools.chain([first], tensors), device, known)
        if found is None and shared_parameters.find([first], device) is None:
            self._private = first.data_ptr()
        return found

    def hashed(
        self, layout: Layout, stream: Stream, algorithm: str, demand: Wanted, deadline: Deadline
    ) -> tuple[Found, Work]:
        """Have every rank hash what it offers; the digests, and the slowest rank's time. ``stream`` is rank 0's."""
        if self._hashing[0] is not layout or self._hashing[1] != demand.names:
            self._hashing = layout, frozenset(demand.names), _to_hash(layout, demand)
        parts = self._hashing[2]
        asked = [rank for rank in self._others if parts[rank]]
        for rank in asked:
            new = None if self._told_to_hash.get(rank) is parts[rank] else parts[rank]
            self._send(rank, Hash(algorithm, new))
            self._told_to_hash[rank] = parts[rank]
        done = [assembly.hash_parts(parts[0], stream, algorithm)]
        replies = self._replies("to hash its parameters", deadline, asked)
        done += [reply.work for reply in replies.values() if reply.work is not None]
        found = {(tensor, box): value for work in done for tensor, box, value in work.digests}
        return found, Work((), 0, 0.0, max(work.digest_s for work in done))


def lasting(source: Source) -> bool:
    """Whether this kind of source has its tensors before and after they are read, and reads them without other ranks.

    Others make them while they are read: they may use one memory for all, or need every rank for each.
    """
    return all(
        isinstance(part, ModuleSource) or (isinstance(part, MappingSource) and part.lasts) for part in parts_of(source)
    )


def tensors_of(source: Source, pieces: Pieces) -> Iterator[torch.Tensor]:
    """What a rank offers, as views of its own parameters. Raises `SourceError` if they have changed."""
    wanted: dict[int, list[Assignment]] = {}
    for piece in pieces:
        wanted.setdefault(piece.held, []).append(piece)
    for index, (held, parts) in enumerate(zip(source.held, source.parts(), strict=True)):
        for piece in wanted.get(index, ()):
            yield assembly.cut(held.spec, held.boxes[piece.box], parts[piece.box], piece.part)


def _divided(plan: Plan) -> tuple[tuple[Pieces, ...], Table]:
    """What each rank offers, in the order in which its source yields it, and the table of the domains."""
    pieces = tuple(tuple(sorted(own, key=lambda piece: piece[1:])) for own in plan.pieces)
    shapes = [spec.shape for spec in plan.manifest]
    runs = (math.prod(p.part.shape[: max(0, innermost(shapes[p.tensor], p.part))]) for own in pieces for p in own)
    if sum(runs) > _MOST_RUNS * len(shapes):
        return (), ()
    return pieces, tuple(tuple((p.tensor, (p.part.start, p.part.shape)) for p in own) for own in pieces)


def _to_hash(layout: Layout, demand: Wanted) -> list[tuple[HashPart, ...]]:
    """What each rank hashes: the boxes that engines need, each by the rank in whose parameters it lies."""
    found: list[list[HashPart]] = [[] for _ in layout.table]
    for entry in layout.entries:
        for box in sorted(demand.boxes(entry.number), key=lambda box: box or ()):
            needed = whole(entry.spec) if box is None else box
            cells = layout.cells(entry.number)
            cell = next(cell for cell in cells if is_within(needed, cell.box))
            found[cell.domain].append(HashPart(entry.number, entry.spec, cell.at, cell.box, box))
    return [tuple(parts) for parts in found]
