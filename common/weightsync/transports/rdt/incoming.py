"""One push as a rank receives it over Ray Direct Transport, by READs of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch

from weightsync.errors import TransferFailed
from weightsync.protocol.control import BucketReady
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket
from weightsync.transports.control.engine import RankSession
from weightsync.transports.control.sockets import LOOK_UP_S
from weightsync.transports.nixl.agents import IN_FLIGHT, SPIN_S, Spans, spans_of
from weightsync.transports.rdt.compat import Direct, Read
from weightsync.transports.rdt.messages import RdtHandle

_T = TypeVar("_T")
#: So many buckets are read at once if they are announced by then: a READ costs half a millisecond beside its bytes.
_TOGETHER: Final = 16


class RdtIncoming:
    """See `base.Incoming`. What is announced is read while what was before that may be under way.

    ``buffer`` has memory for two buckets, for a push without a stage.
    """

    whole: torch.Tensor | None = None
    lingers = False

    def __init__(
        self,
        direct: Direct,
        session: RankSession,
        request: UpdateRequest,
        subset: Subset,
        arena: str,
        handle: RdtHandle,
        buffer: Callable[[int], torch.Tensor],
    ):
        self._direct, self._session, self._request, self._subset = direct, session, request, subset
        self._handle, self._buffer, self.arena, self.agent = handle, buffer, arena, handle.agent
        #: READs under way, by bucket.
        self._reads: dict[int, Read] = {}

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        size, layout, session = self._request.bucket_bytes, self._subset.layout, self._session
        count = layout.buckets(size)
        memory, here = (self._buffer(size), IN_FLIGHT) if stage is None else (stage, count)
        spans = spans_of(self._subset, size, self._request.slots, here)
        announced: list[BucketReady] = []
        if memory.numel():
            self._direct.register(memory)  # for all buckets at once
        try:
            begun = 0
            for number in range(count):
                while True:
                    # Without a stage the other buffer is still being read.
                    upto = number + 1 if stage is None else begun + _TOGETHER
                    if begun < (end := min(upto, len(announced))) and len(set(self._reads.values())) < IN_FLIGHT:
                        self._begin(range(begun, end), memory, spans)
                        begun = end
                    if begun > number and self._is_here(number):
                        break
                    session.check(f"bucket {number} to arrive from {self.agent}")
                    message = session.receive(0.0 if self._reads else LOOK_UP_S)
                    if message is None and self._reads:
                        time.sleep(SPIN_S)
                    while message is not None:
                        announced.append(session.expect(message, len(announced)))
                        message = session.receive(0.0)
                session.taken(number)
                at, nbytes = number % here * size, min(size, layout.nbytes - number * size)
                ready = announced[number]
                yield Bucket(number, memory[at : at + nbytes], ready.digests, ready.begins)
        finally:
            if memory.numel():
                self._direct.deregister(memory)  # what a READ under way needs stays until that has ended

    def _begin(self, buckets: range, memory: torch.Tensor, spans: Spans) -> None:
        merged: list[tuple[int, int, int]] = []
        for there, here, nbytes in itertools.chain.from_iterable(spans[bucket] for bucket in buckets):
            if merged and merged[-1][0] + merged[-1][2] == there and merged[-1][1] + merged[-1][2] == here:
                merged[-1] = merged[-1][0], merged[-1][1], merged[-1][2] + nbytes
            else:
                merged.append((there, here, nbytes))
        if merged:
            name = f"{self._request.push}-{buckets[0]}"
            moved = [(there, memory[here : here + nbytes]) for there, here, nbytes in merged]
            read = self._attempt(buckets[0], lambda: self._direct.read(name, self._handle, moved))
            self._reads |= dict.fromkeys(buckets, read)

    def _is_here(self, bucket: int) -> bool:
        read = self._reads.get(bucket)
        if read is None:
            return True
        if self._attempt(bucket, lambda: read.ended):
            del self._reads[bucket]
            return True
        return False

    def _attempt(self, bucket: int, act: Callable[[], _T]) -> _T:
        with self._session.explained():
            try:
                return act()
            except TransferFailed as error:
                raise TransferFailed(f"bucket {bucket} could not be read from {self.agent}: {error.message}") from error

    def leave(self) -> list[torch.Tensor]:
        """Drop the READs that are under way; returns the memory that they may write to until the agent ends."""
        reads, self._reads = set(self._reads.values()), {}
        held = [place for read in reads for place in read.memory]
        for read in reads:
            read.drop()
        return held
