"""A push of what has changed, as a rank receives it: the transport brings the changes, and the stage the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import torch
from msgspec import UNSET

from weightsync.engine.verifying import Check
from weightsync.errors import DigestMismatch, TransferFailed
from weightsync.protocol.deltas import Index
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors import changes
from weightsync.tensors.divided import part
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket, EngineEnd, Incoming


def opened(end: EngineEnd, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> Incoming:
    """As `EngineEnd.open`, for a push of either kind."""
    if request.delta is UNSET:
        return end.open(request, subset, rank, cancelled)
    crossing, crosses = changes.crossing(request), Subset(changes.layout_of(request.delta), {})
    incoming = end.open(crossing, crosses, rank, cancelled)
    return ChangedIncoming(incoming, Check(rank, crossing, crosses), crosses.layout, request, subset, cancelled)


class ChangedIncoming:
    """See `base.Incoming`: what ``incoming`` brings, a stream of ``layout`` that ``check`` verifies, turns the version
    in the stage into that of ``request``, of which this rank needs ``subset``."""

    whole = None

    def __init__(
        self,
        incoming: Incoming,
        check: Check,
        layout: Layout,
        request: UpdateRequest,
        subset: Subset,
        cancelled: Event,
    ):
        self._incoming, self._verifies, self.layout, self.arena = incoming, check, layout, incoming.arena
        self._request, self._subset, self._cancelled = request, subset, cancelled
        #: Where the changes are received; whoever has the stage provides it.
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def lingers(self) -> bool:
        """See `base.Incoming`, of ``memory``."""
        return self._incoming.lingers

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`; ``stage`` has the version before. Raises `DigestMismatch` if the changes do not fit."""
        assert stage is not None, "changes are applied where the version before lies"
        layout, size, done = self._subset.layout, self._request.bucket_bytes, 0
        digests, applying = tuple[tuple[int, ...], ...](), None
        head, body = (entry.raw(self.memory) for entry in self.layout.entries)
        for arrived in self._arrived():
            if arrived < len(head):
                continue
            with self._fitting():
                if applying is None:
                    index = changes.read_index(head)
                    applying, digests = changes.Applying(index, layout, len(body)), self._digests(index)
                upto = applying.apply(body, arrived - self.layout.entries[1].offset, stage, self._check)
            while done < len(digests) and (upto >= layout.nbytes or (done + 1) * size <= upto):
                self._check()
                yield Bucket(done, stage[done * size : min((done + 1) * size, layout.nbytes)], digests[done])
                done += 1

    def _arrived(self) -> Iterator[int]:
        """Receive and verify the changes; yields how many bytes are there, after each bucket."""
        assert self._request.delta is not UNSET, "a push of changes"
        size, parts = self._request.delta.bucket_bytes, functools.partial(part, self.memory)
        for bucket in self._incoming.buckets(self.memory):
            if bucket.digest is not None:
                self._verifies.whole(bucket, self.memory, size)
            ended = (piece.entry for piece in self.layout.pieces(bucket.number, size) if piece.last)
            self._verifies.compare(bucket, ended, parts)
            yield min((bucket.number + 1) * size, self.layout.nbytes)

    def _digests(self, index: Index) -> tuple[tuple[int, ...], ...]:
        found = index.digests.get(self._subset.name, ())
        if len(found) != (count := self._subset.layout.buckets(self._request.bucket_bytes)):
            raise TransferFailed(f"digests of {len(found)} of {count} buckets came with what has changed")
        return found

    @contextmanager
    def _fitting(self) -> Iterator[None]:
        try:
            yield
        except TransferFailed as error:
            self._check()
            raise DigestMismatch(f"what has changed does not fit the version that this rank has: {error}") from error

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise TransferFailed("the push was aborted")
