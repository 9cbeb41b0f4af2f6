"""One push as the trainer sends it: the memory that it goes through, and the transports that carry it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol.http import UpdateRequest
from weightsync.sources import Source
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import key
from weightsync.tensors.subset import Digests, Wanted
from weightsync.trainer.pack_plan import PackPlan, pack_plan
from weightsync.trainer.packing import Packer, hash_stream
from weightsync.trainer.ranks import Coordinator
from weightsync.transports.base import Peer, Progress, Sending, TrainerEnd

Packed = dict[int, tuple[tuple[object, ...], PackPlan | None, bool]]
"""By arena, what was packed last, and how to do so again if it was planned."""


class Sent(NamedTuple):
    """Seconds of a transfer: ``gather_s`` copying the trainer's tensors, ``digest_s`` hashing them, ``verify_s`` the
    slowest rank's checking."""

    gather_s: float
    digest_s: float
    verify_s: float


class Outgoing:
    """A push of ``plan``, whose stream is ``layout``, made by `Transfer.begin` or `Transfer.again`.

    ``arena`` is where the stream goes through, ``others`` hold what may be served still; ``ends`` are those of the
    transports in use, by name, ``packed`` what is known of earlier pushes. ``announced`` are the digests
    of each bucket, if the arena holds the stream since an earlier push.
    """

    def __init__(
        self,
        ends: Mapping[str, TrainerEnd],
        packed: Packed,
        plan: UpdateRequest,
        layout: Layout,
        arena: Arena,
        others: Sequence[Arena],
        announced: Sequence[Digests] = (),
    ):
        self.plan, self.layout, self.arena, self.announced = plan, layout, arena, list(announced)
        self._by_name, self._packed, self._others = ends, packed, others
        #: This push, in each of the transports that carry it.
        self._sendings: list[Sending] = []
        #: What is to be hashed for those who came.
        self.demand = Wanted(())

    @property
    def is_whole(self) -> bool:
        """Whether the arena holds the whole stream once it was sent."""
        return not self.plan.stream and self.layout.nbytes <= self.plan.slots * self.plan.bucket_bytes

    def request(self, engine: str, transport: str) -> UpdateRequest:
        """What an engine is to be asked, by its URL."""
        return self._by_name[transport].request(self.plan, engine)

    def await_ranks(self, peers: Mapping[str, set[Peer]], deadline: Deadline) -> None:
        """Return once every rank, by transport, has come for the bytes. Raises `TransferFailed` or `PushTimeout`."""
        for name, those in peers.items():
            sending = self._by_name[name].begin(self.plan, self.layout, [self.arena, *self._others], those, deadline)
            self._sendings.append(sending)
            sending.await_ranks()
        self.demand = Wanted(parts for sending in self._sendings for parts in sending.needs())

    def send(self, tensors: Iterable[torch.Tensor], progress: Progress | None, identity: object | None = None) -> Sent:
        """Pack and send the stream; returns once every rank has it, and verified. Raises as `await_ranks`.

        Where ``mark``, see `Source.identity`, is that of the push before, ``tensors`` are not looked at.
        """
        if isinstance(self.arena, SharedParameters) and not self.plan.digest:  # there is nothing to do with them
            self.announced = [{}] * self.layout.buckets(self.plan.bucket_bytes)
            return Sent(0.0, 0.0, self._announce_all(progress))
        addresses: list[int] = []
        how = self.layout, self.arena.bytes, self.plan.bucket_bytes, self.plan.slots, self.plan.digest, self.demand
        known = (identity, self.layout, *how[2:5], frozenset(self.demand.names))
        before, pack, planned = self._packed.get(key(self.arena.bytes), ((), None, False))
        seen = identity is not None and before == known
        if seen and pack is not None:
            packer: PackPlan | Packer = pack
            filled = pack.fill(self._acquire)
        else:
            packer = Packer(*how)
            filled = packer.fill(_noted(tensors, addresses), self._acquire)
        self.announced = []
        for bucket in filled:
            self._announce(bucket.number, bucket.digests)
            self.announced.append(bucket.digests)
            if progress is not None:
                progress(bucket.nbytes)
        sent = Sent(packer.gather_s, packer.digest_s, self._finish())
        if seen and not planned:  # worth while, for it comes again
            all_there = len(addresses) == len(self.layout.entries)
            self._packed[key(self.arena.bytes)] = known, pack_plan(*how, addresses) if all_there else None, True
        elif not seen:
            self._packed[key(self.arena.bytes)] = known, None, False
        return sent

    def send_filled(self, ranks: Coordinator, source: Source, deadline: Deadline, progress: Progress | None) -> Sent:
        """As `send`, of an arena that holds all and that the trainer's ranks fill. Raises what they raise, too."""
        size = self.plan.bucket_bytes
        assert self.layout.nbytes <= self.plan.slots * size, "the arena holds everything"
        assert isinstance(self.arena, arenas.ShmArena), "processes share the host's memory"
        alive = tuple(arena.name for arena in [self.arena, *self._others] if isinstance(arena, arenas.ShmArena))
        found, work = ranks.fill(source, deadline, self.layout, self.arena, alive, self.plan.digest, self.demand)
        self.announced = [{}] * self.layout.buckets(size)
        if self.plan.digest:
            self.announced = self.demand.by_bucket(self.layout, size, found)
        return Sent(work.gather_s, work.digest_s, self._announce_all(progress))

    def resend(self, progress: Progress | None) -> Sent:
        """Send what lies in the arena since an earlier push; nothing is packed. Raises as `await_ranks`."""
        start = time.perf_counter()
        new = self.demand.without(set[str]().union(*self.announced))
        if self.plan.digest and new.names:  # they keep other parts than those it was sent to
            found = hash_stream(self.layout, self.arena.bytes, self.plan.digest, new)
            by_bucket = new.by_bucket(self.layout, self.plan.bucket_bytes, found)
            self.announced = [{**known, **more} for known, more in zip(self.announced, by_bucket, strict=True)]
        hashed_s = time.perf_counter() - start
        return Sent(0.0, hashed_s, self._announce_all(progress))

    def _announce_all(self, progress: Progress | None) -> float:
        """Every bucket, of an arena that holds them all; the seconds of `_finish`."""
        for number, digests in enumerate(self.announced):
            self._announce(number, digests)
            if progress is not None:
                progress(min((number + 1) * self.plan.bucket_bytes, self.layout.nbytes))
        return self._finish()

    def _announce(self, number: int, digests: Digests) -> None:
        for sending in self._sendings:
            sending.announce(number, digests)

    def _finish(self) -> float:
        return max(sending.finish() for sending in self._sendings)

    def _acquire(self, bucket: int) -> None:
        for sending in self._sendings:
            sending.acquire(bucket)

    def cancel(self, error: BaseException) -> None:
        """Tell the ranks that no more will come."""
        while self._sendings:
            self._sendings.pop().cancel(error)


def _noted(tensors: Iterable[torch.Tensor], addresses: list[int]) -> Iterator[torch.Tensor]:
    """The tensors; the addresses of those that lie in host memory in one piece are noted."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
            addresses.append(tensor.data_ptr())
        yield tensor
