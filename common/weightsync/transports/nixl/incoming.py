"""One push as a rank receives it over NIXL: by its own READs, or by WRITEs of the trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
import torch

from weightsync.protocol import control
from weightsync.protocol.control import BucketDone, BucketReady, WriteWindow
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket
from weightsync.transports.control.engine import RankSession
from weightsync.transports.control.sockets import LOOK_UP_S
from weightsync.transports.nixl.agents import SPIN_S, Transfers, translated
from weightsync.transports.nixl.messages import NixlHandle

#: Transfers under way at once: enough to hide the latency of one message.
IN_FLIGHT: Final = 2


class Link(Protocol):
    """What a push uses of `engine.Link`."""

    def reads(self, arena: str, request: UpdateRequest, subset: Subset, stage: torch.Tensor | None) -> Transfers:
        """The READs of what this rank needs of every bucket."""

    def memory(self, request: UpdateRequest, stage: torch.Tensor | None) -> torch.Tensor:
        """The memory that receives the buckets."""

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """The handle with which the trainer can write to ``memory``."""

    def notifications(self) -> list[bytes]:
        """The notifications from the trainer's agent since the last call."""

    def arrived(self) -> None:
        """Note that the last bucket is here, and no transfer is under way."""


class _Push:
    """The base of `Reading` and `Written`, see `base.Incoming`."""

    whole: torch.Tensor | None = None

    def __init__(self, link: Link, session: RankSession, request: UpdateRequest, subset: Subset, arena: str, rank: int):
        self._link, self._session, self._request, self._subset, self._rank = link, session, request, subset, rank
        self._layout = subset.layout
        self.arena = arena
        self._announced: list[BucketReady] = []

    def _receive(self, timeout_s: float) -> None:
        """Take the next announcement of a bucket, if one arrives within ``timeout_s``."""
        message = self._session.receive(timeout_s)
        if message is not None:
            self._announced.append(self._session.expect(message, len(self._announced)))
        else:
            time.sleep(SPIN_S)

    def _bucket(self, number: int, memory: torch.Tensor, slots: int) -> Bucket:
        if number + 1 == self._layout.buckets(self._request.bucket_bytes):
            self._link.arrived()
        at, nbytes = number % slots * self._request.bucket_bytes, self._nbytes(number)
        announced = self._announced[number]
        return Bucket(number, memory[at : at + nbytes], announced.digests, announced.begins)

    def _nbytes(self, number: int) -> int:
        size = self._request.bucket_bytes
        return min(size, self._layout.nbytes - number * size)


class Reading(_Push):
    """See `base.Incoming`; reads a bucket once it is announced, while the one before is still under way."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        count = self._layout.buckets(self._request.bucket_bytes)
        with self._session.explained():
            reads = self._link.reads(self.arena, self._request, self._subset, stage)
        # Without a stage the other buffer is still being read.
        ahead = IN_FLIGHT if stage is not None else 1
        posted = 0
        for number in range(count):
            while posted <= number or not self._here(reads, number):
                self._session.check(f"bucket {number} to be read from {reads.remote.agent}")
                while posted < min(len(self._announced), number + ahead):
                    with self._session.explained(), translated(self._what(posted, reads)):
                        reads.post(posted, control.pack(BucketDone(push=self._request.push, index=posted)))
                    posted += 1
                self._receive(0.0 if posted > number else LOOK_UP_S)
            if not reads.moves(number):
                self._session.taken(number)  # nothing was read, so NIXL notifies nobody
            yield self._bucket(number, reads.memory, count if stage is not None else IN_FLIGHT)

    def _here(self, reads: Transfers, number: int) -> bool:
        with self._session.explained(), translated(self._what(number, reads)):
            return reads.done(number)

    def _what(self, bucket: int, reads: Transfers) -> str:
        start = bucket * self._request.bucket_bytes
        end = min(start + self._request.bucket_bytes, self._layout.nbytes)
        first = next(iter(self._layout.pieces(bucket, self._request.bucket_bytes)), None)
        name = f", from {first.entry.spec.name} on" if first is not None else ""
        return (
            f"rank {self._rank} could not read bucket {bucket} (bytes {start} to {end} of the stream{name}) from "
            f"{reads.remote.agent}"
        )


class Written(_Push):
    """See `base.Incoming`; tells the trainer where to write, and NIXL notifies of every bucket written."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        count = self._layout.buckets(self._request.bucket_bytes)
        memory, slots = self._link.memory(self._request, stage), count if stage is not None else IN_FLIGHT
        window = control.raw_handle(self._link.opened(memory))
        self._session.send(WriteWindow(self._request.push, slots, slots, window))
        here = self._subset.idle(self._request.bucket_bytes)
        for number in range(count):
            while number >= len(self._announced) or number not in here:
                self._session.check(f"bucket {number} to be written by the trainer")
                here.update(self._arrived())
                self._receive(0.0)
            yield self._bucket(number, memory, slots)
            if number + slots < count:
                self._session.send(WriteWindow(self._request.push, slots, number + 1 + slots))

    def _arrived(self) -> Iterator[int]:
        for notice in self._link.notifications():
            try:
                message = control.unpack_from_rank(notice)
            except msgspec.MsgspecError:
                continue  # the reply to the warm-up, or a stray notification
            if isinstance(message, BucketDone) and message.push == self._request.push:
                yield message.index
