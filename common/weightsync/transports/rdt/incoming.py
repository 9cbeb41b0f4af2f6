"""One push as a rank receives it over Ray Direct Transport, by READs of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

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


class RdtIncoming:
    """See `base.Incoming`. A bucket is read once it is announced, while the one before may be under way.

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
        #: READs under way, by bucket, the oldest first.
        self._reads: dict[int, Read] = {}

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        size, layout, session = self._request.bucket_bytes, self._subset.layout, self._session
        count = layout.buckets(size)
        memory, here = (self._buffer(size), IN_FLIGHT) if stage is None else (stage, count)
        # Without a stage the other buffer is still being read.
        ahead = 1 if stage is None else IN_FLIGHT
        spans = spans_of(self._subset, size, self._request.slots, here)
        announced: list[BucketReady] = []
        if memory.numel():
            self._direct.register(memory)  # for all buckets at once
        try:
            begun = 0
            for number in range(count):
                while begun <= number or not self._is_here(number):
                    session.check(f"bucket {number} to arrive from {self.agent}")
                    while begun < min(len(announced), number + ahead):
                        self._begin(begun, memory, spans)
                        begun += 1
                    message = session.receive(0.0 if self._reads else LOOK_UP_S)
                    if message is not None:
                        announced.append(session.expect(message, len(announced)))
                    elif self._reads:
                        time.sleep(SPIN_S)
                session.taken(number)
                at, nbytes = number % here * size, min(size, layout.nbytes - number * size)
                ready = announced[number]
                yield Bucket(number, memory[at : at + nbytes], ready.digests, ready.begins)
        finally:
            if memory.numel():
                self._direct.deregister(memory)  # what a READ under way needs stays until that has ended

    def _begin(self, bucket: int, memory: torch.Tensor, spans: Spans) -> None:
        moved = [(there, memory[here : here + nbytes]) for there, here, nbytes in spans[bucket]]
        if moved:
            name = f"{self._request.push}-{bucket}"
            self._reads[bucket] = self._attempt(bucket, lambda: self._direct.read(name, self._handle, moved))

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
        held = [place for read in self._reads.values() for place in read.memory]
        while self._reads:
            self._reads.popitem()[1].drop()
        return held
