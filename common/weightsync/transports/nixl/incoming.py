"""One push as a rank receives it over NIXL: by its own READs, by WRITEs of the trainer's hosts, or by both."""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import msgspec
import torch
from msgspec import UNSET

from weightsync.protocol import control
from weightsync.protocol.control import BucketDone, BucketReady, PassOn, Supplied, WriteWindow
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket
from weightsync.transports.control.engine import RankSession
from weightsync.transports.control.sockets import LOOK_UP_S
from weightsync.transports.nixl.agents import IN_FLIGHT, SPIN_S, Transfers, translated
from weightsync.transports.nixl.messages import NixlHandle
from weightsync.transports.nixl.passing import Passing

#: The speed of a link is measured by at least so many gaps between the arrivals of buckets.
_GAPS: Final = 5


class Way(Protocol):
    """What a push uses of `link.Way`."""

    @property
    def agent(self) -> str:
        """The agent of one of the sender's hosts."""

    @property
    def written(self) -> bool:
        """Whether that writes to this rank, which otherwise reads."""


class Link(Protocol):
    """What a push uses of `link.Link`."""

    @property
    def ways(self) -> Sequence[Way]:
        """One for each of the sender's hosts."""

    def reads(
        self, domain: int, arena: str, request: UpdateRequest, subset: Subset, stage: torch.Tensor | None
    ) -> Transfers:
        """The READs of what this rank needs of every bucket from one memory domain."""

    def memory(self, request: UpdateRequest, stage: torch.Tensor | None) -> torch.Tensor:
        """The memory that receives the buckets."""

    def opened(self, memory: torch.Tensor) -> NixlHandle:
        """The handle with which the sender can write to ``memory``."""

    def notifications(self) -> dict[str, list[bytes]]:
        """The notifications since the last call, by agent."""

    def arrived(self) -> None:
        """Note that the last bucket is here, and no transfer is under way."""

    def passing(self, request: UpdateRequest, subset: Subset, memory: torch.Tensor) -> Passing:
        """What this rank passes on of a push."""


def speed(arrived: Sequence[float], bucket_bytes: int) -> float:
    """The speed of a link over which buckets have arrived at these times, in bytes a second; 0 for too few buckets.

    That of the fastest quarter of them: the others may have waited for the sender to pack them.
    """
    gaps = sorted(itertools.starmap(operator.sub, zip(arrived[1:], arrived[:-1], strict=True)))
    return bucket_bytes / max(gaps[len(gaps) // 4], 1e-9) if len(gaps) >= _GAPS else 0.0


class NixlIncoming:
    """See `base.Incoming`.

    READs are posted once their bucket is announced, while the one before is still under way. Who is to write is told
    where; NIXL notifies of every bucket written.
    """

    whole: torch.Tensor | None = None
    lingers = False

    def __init__(self, link: Link, session: RankSession, request: UpdateRequest, subset: Subset, arena: str, rank: int):
        self._link, self._session, self._request, self._subset, self._rank = link, session, request, subset, rank
        self._layout = subset.layout
        self.arena = arena
        self._announced: list[BucketReady] = []
        #: When each bucket was found to have arrived.
        self._arrived: list[float] = []
        self._reads: list[Transfers] = []
        #: The buckets of which each host has written what this rank needs, by the host's agent.
        self._written: dict[str, set[int]] = {}
        #: The agents of other ranks that may have passed buckets on to this one, the last first.
        self._suppliers: dict[str, str] = {}
        #: The buckets that other agents have written, perhaps before the sender says that they supply this rank.
        self._passed: dict[str, set[int]] = {}
        #: Of a rank that is written to: what it passes on.
        self._passing: Passing | None = None
        #: Whether this rank passes buckets on, or gets them from another: it tells the sender of each.
        self._chained = False

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        count = self._layout.buckets(self._request.bucket_bytes)
        memory, slots = self._link.memory(self._request, stage), count if stage is not None else IN_FLIGHT
        self._begin(stage, memory, slots)
        # Without a stage the other buffer is still being read.
        ahead = IN_FLIGHT if stage is not None else 1
        posted = 0
        for number in range(count):
            while posted <= number or not self._is_here(number):
                self._session.check(f"bucket {number} to arrive from {self._late(number)}")
                while posted < min(len(self._announced), number + ahead):
                    self._post(posted)
                    posted += 1
                self._drive()
                self._receive(0.0 if posted > number or self._written else LOOK_UP_S)
            self._arrived.append(time.perf_counter())
            # Of several hosts none knows what the others have sent, and of what is not read NIXL notifies nobody.
            elsewhere = self._layout.table or (self._reads and not self._reads[0].moves(number))
            if elsewhere and not self._chained:
                self._session.taken(number)
            yield self._bucket(number, memory, slots)
            if self._chained:
                self._session.taken(number)
                self._pass_on(number, count)
            elif self._written and number + slots < count:
                self._session.send(WriteWindow(self._request.push, slots, number + 1 + slots))

    @property
    def bytes_per_s(self) -> float:
        """The speed of the link, if this rank was sent everything; 0 if it is unknown, or too little was sent."""
        known = self._request.delta is UNSET and not self._subset.name
        return speed(self._arrived, self._request.bucket_bytes) if known else 0.0

    def _pass_on(self, bucket: int, count: int) -> None:
        """Pass on a bucket that is verified; if it is the last, until all who get it from this rank have everything."""
        if self._passing is None:
            return
        self._passing.verified(bucket)
        while not self._passing.drive() and bucket + 1 == count:
            self._session.check("other ranks to get from this one what it passes on")
            self._link.notifications()  # which drives WRITEs
            self._receive(0.0)

    def _begin(self, stage: torch.Tensor | None, memory: torch.Tensor, slots: int) -> None:
        """Prepare the READs, and say who is to write."""
        domains = []
        for domain, way in enumerate(self._link.ways[: max(1, len(self._layout.table))]):
            if self._layout.table and not self._layout.domain_bytes(domain):
                continue
            if way.written:
                domains.append(domain)
                self._written[way.agent] = self._idle(domain)
                continue
            with self._session.explained():
                self._reads.append(self._link.reads(domain, self.arena, self._request, self._subset, stage))
        if domains and stage is not None and not self._reads:
            self._passing = self._link.passing(self._request, self._subset, memory)
        if domains or self._layout.table:
            window = control.raw_handle(self._link.opened(memory)) if domains else control.NO_HANDLE
            self._session.send(WriteWindow(self._request.push, slots, slots, window, tuple(domains)))

    def _idle(self, domain: int) -> set[int]:
        """The buckets of which this rank needs nothing from a domain."""
        size = self._request.bucket_bytes
        if not isinstance(self._layout, DividedLayout):
            return self._subset.idle(size)
        needed = self._layout.needed(domain, self._subset, size)
        return {number for number, runs in enumerate(needed) if not runs}

    def _post(self, bucket: int) -> None:
        done = control.pack(BucketDone(push=self._request.push, index=bucket))
        for reads in self._reads:
            with self._session.explained(), translated(self._what(bucket, reads)):
                reads.post(bucket, done)

    def _is_here(self, bucket: int) -> bool:
        for reads in self._reads:
            with self._session.explained(), translated(self._what(bucket, reads)):
                if not reads.done(bucket):
                    return False
        passed = any(bucket in self._passed.get(agent, ()) for agent in self._suppliers)
        return passed or all(bucket in here for here in self._written.values())

    def _late(self, bucket: int) -> str:
        """The agents from which a bucket is still to come, for errors."""
        readers = (reads.remote.agent for reads in self._reads if bucket >= len(self._announced))
        writers = [agent for agent, here in self._written.items() if bucket not in here]
        if self._suppliers:
            writers = [next(iter(self._suppliers.values()))]
        return ", ".join([*readers, *writers]) or "the trainer"

    def _drive(self) -> None:
        """Take the notifications of WRITEs that have ended, and pass on what may be."""
        if self._passing is not None:
            self._passing.drive()
        for agent, notices in self._link.notifications().items() if self._written else ():
            here = self._written if agent in self._written else self._passed
            for notice in notices:
                try:
                    message = control.unpack_from_rank(notice)
                except msgspec.MsgspecError:
                    continue  # the reply to the warm-up, or a stray notification
                if isinstance(message, BucketDone) and message.push == self._request.push:
                    here.setdefault(agent, set()).add(message.index)

    def _receive(self, timeout_s: float) -> None:
        """Take the sender's next message, if one arrives within ``timeout_s``."""
        message = self._session.receive(timeout_s)
        if message is None:
            time.sleep(SPIN_S)
        elif isinstance(message, Supplied):
            self._chained = True
            self.lingers |= bool(self._suppliers)  # the one before may still be writing
            if message.agent:
                self._suppliers = {message.agent: message.name, **self._suppliers}
        elif isinstance(message, PassOn) and self._passing is not None:
            self._chained = True
            self._passing.told(message)
            self.lingers |= self._passing.abandoned
        else:
            self._announced.append(self._session.expect(message, len(self._announced)))

    def _bucket(self, number: int, memory: torch.Tensor, slots: int) -> Bucket:
        if number + 1 == self._layout.buckets(self._request.bucket_bytes):
            self._link.arrived()
        at, nbytes = number % slots * self._request.bucket_bytes, self._nbytes(number)
        announced = self._announced[number]
        return Bucket(number, memory[at : at + nbytes], announced.digests, announced.begins, announced.digest)

    def _nbytes(self, number: int) -> int:
        size = self._request.bucket_bytes
        return min(size, self._layout.nbytes - number * size)

    def _what(self, bucket: int, reads: Transfers) -> str:
        start = bucket * self._request.bucket_bytes
        end = min(start + self._request.bucket_bytes, self._layout.nbytes)
        first = next(iter(self._layout.pieces(bucket, self._request.bucket_bytes)), None)
        name = f", from {first.entry.spec.name} on" if first is not None else ""
        return (
            f"rank {self._rank} could not read bucket {bucket} (bytes {start} to {end} of the stream{name}) from "
            f"{reads.remote.agent}"
        )
