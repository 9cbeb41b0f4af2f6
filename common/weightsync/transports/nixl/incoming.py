"""One push as a rank receives it over NIXL: by READs of its own, or written by the trainer."""

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

#: Buckets that were posted and whose end was not seen yet: enough to hide the way of one message.
IN_FLIGHT: Final = 2


class Link(Protocol):
    """What `engine.Link` offers a push."""

    def reads(self, arena: str, request: UpdateRequest, parts: Subset, stage: torch.Tensor | None) -> Transfers:
        """READs of what is kept of every bucket."""

    def memory(self, request: UpdateRequest, stage: torch.Tensor | None) -> torch.Tensor:
        """Where buckets are brought."""

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """What the trainer needs to write there."""

    def notifications(self) -> list[bytes]:
        """What the trainer's agent has sent."""

    def arrived(self) -> None:
        """The last bucket is here, and nothing more under way."""


class _Push:
    """What both ways have in common, see `base.Incoming`."""

    whole: torch.Tensor | None = None

    def __init__(self, link: Link, call: RankSession, request: UpdateRequest, parts: Subset, arena: str, rank: int):
        self._link, self._call, self._request, self._parts, self._rank = link, call, request, parts, rank
        self._layout = parts.layout
        self.arena = arena
        self._announced: list[BucketReady] = []

    def _listen(self, wait_s: float) -> None:
        """Hear of the next bucket that is full."""
        message = self._call.heard(wait_s)
        if message is not None:
            self._announced.append(self._call.expect(message, len(self._announced)))
        else:
            time.sleep(SPIN_S)

    def _bucket(self, number: int, memory: torch.Tensor, slots: int) -> Bucket:
        if number + 1 == self._layout.buckets(self._request.bucket_bytes):
            self._link.arrived()
        at, nbytes = number % slots * self._request.bucket_bytes, self._nbytes(number)
        return Bucket(number, memory[at : at + nbytes], self._announced[number].digests)

    def _nbytes(self, number: int) -> int:
        size = self._request.bucket_bytes
        return min(size, self._layout.nbytes - number * size)


class Reading(_Push):
    """See `base.Incoming`; a bucket is read once it is announced, while the one before is still on its way."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        count = self._layout.buckets(self._request.bucket_bytes)
        with self._call.explained():
            reads = self._link.reads(self.arena, self._request, self._parts, stage)
        # Without a stage the other buffer is still being looked at.
        ahead = IN_FLIGHT if stage is not None else 1
        posted = 0
        for number in range(count):
            while posted <= number or not self._here(reads, number):
                self._call.check(f"bucket {number} to be read from {reads.remote.agent}")
                while posted < min(len(self._announced), number + ahead):
                    with self._call.explained(), translated(self._what(posted, reads)):
                        reads.post(posted, control.pack(BucketDone(push=self._request.push, index=posted)))
                    posted += 1
                self._listen(0.0 if posted > number else LOOK_UP_S)
            if not reads.moves(number):
                self._call.taken(number)  # nothing was read, so NIXL has notified nobody
            yield self._bucket(number, reads.memory, count if stage is not None else IN_FLIGHT)

    def _here(self, reads: Transfers, number: int) -> bool:
        with self._call.explained(), translated(self._what(number, reads)):
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
    """See `base.Incoming`; the trainer is told where there is room, and NIXL says what it has written."""

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        count = self._layout.buckets(self._request.bucket_bytes)
        memory, slots = self._link.memory(self._request, stage), count if stage is not None else IN_FLIGHT
        window = control.raw_handle(self._link.opened(memory))
        self._call.say(WriteWindow(self._request.push, slots, slots, window))
        here = self._parts.idle(self._request.bucket_bytes)
        for number in range(count):
            while number >= len(self._announced) or number not in here:
                self._call.check(f"bucket {number} to be written by the trainer")
                here.update(self._arrived())
                self._listen(0.0)
            yield self._bucket(number, memory, slots)
            if number + slots < count:
                self._call.say(WriteWindow(self._request.push, slots, number + 1 + slots))

    def _arrived(self) -> Iterator[int]:
        for notice in self._link.notifications():
            try:
                message = control.unpack_from_rank(notice)
            except msgspec.MsgspecError:
                continue  # the answer to the warm-up, or nobody's
            if isinstance(message, BucketDone) and message.push == self._request.push:
                yield message.index
