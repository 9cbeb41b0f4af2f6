"""One push on the trainer's side: the arena that it goes through, and the transports that send it."""

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
from weightsync.tensors.casting import NO_CASTS
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import key
from weightsync.tensors.subset import Digests, Wanted
from weightsync.trainer.pack_plan import PackPlan, pack_plan
from weightsync.trainer.packing import Packer, hash_stream
from weightsync.trainer.ranks import Coordinator
from weightsync.transports.base import Peer, Progress, Sending, TrainerEnd

Packed = dict[int, tuple[tuple[object, ...], PackPlan | None, bool]]
"""By arena: what identifies the last packing, its plan if there is one, and whether planning was tried."""


class Sent(NamedTuple):
    """Seconds that sending took: ``gather_s`` for copying the trainer's tensors, ``digest_s`` for hashing them, and
    ``verify_s`` for hashing at the slowest rank. ``not_finite``: infinite and NaN elements among those cast."""

    gather_s: float
    digest_s: float
    verify_s: float
    not_finite: int = 0


class Outgoing:
    """A push, made by `Transfer.begin` or `Transfer.again`.

    ``plan`` is the request to every engine, ``layout`` is the stream, which goes through ``arena``; ``others`` are
    arenas that ranks may still use. ``ends`` has the trainer end of each transport in use, by name, and ``packed`` is
    kept from push to push. ``announced`` has the digests of each bucket, if ``arena`` already holds the stream.
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
        #: The digests that the connected ranks need.
        self.demand = Wanted(())

    @property
    def is_whole(self) -> bool:
        """Whether the arena holds the whole stream after the push."""
        return not self.plan.stream and self.layout.nbytes <= self.plan.slots * self.plan.bucket_bytes

    def request(self, engine: str, transport: str) -> UpdateRequest:
        """The request to the engine at the URL ``engine``."""
        return self._by_name[transport].request(self.plan, engine)

    def await_ranks(self, peers: Mapping[str, set[Peer]], deadline: Deadline) -> None:
        """Wait until all ``peers``, by transport, have connected. Raises `TransferFailed` or `PushTimeout`."""
        for name, ranks in peers.items():
            sending = self._by_name[name].begin(self.plan, self.layout, [self.arena, *self._others], ranks, deadline)
            self._sendings.append(sending)
            sending.await_ranks()
        self.demand = Wanted(parts for sending in self._sendings for parts in sending.needs())

    def send(
        self,
        tensors: Iterable[torch.Tensor],
        progress: Progress | None,
        identity: object | None = None,
        sources: Mapping[int, torch.dtype] = NO_CASTS,
    ) -> Sent:
        """Pack and send the stream; return once every rank has received and verified it.

        If ``identity``, see `Source.identity`, is that of the push before, ``tensors`` need not be read again.
        ``sources`` as in `packing.Packer`. Raises `SourceError` for a tensor that has changed or cannot be cast,
        `TransferFailed` or `PushTimeout`.
        """
        if isinstance(self.arena, SharedParameters) and not self.plan.digest:  # nothing to copy or hash
            self.announced = [{}] * self.layout.buckets(self.plan.bucket_bytes)
            return Sent(0.0, 0.0, self._announce_all(progress))
        addresses: list[int] = []
        how = self.layout, self.arena.bytes, self.plan.bucket_bytes, self.plan.slots, self.plan.digest, self.demand
        known = (identity, self.layout, *how[2:5], frozenset(self.demand.names))
        before, pack, planned = self._packed.get(key(self.arena.bytes), ((), None, False))
        same = identity is not None and before == known
        if same and pack is not None:
            packer: PackPlan | Packer = pack
            filled = pack.fill(self._acquire)
        else:
            packer = Packer(*how, sources)
            filled = packer.fill(_noting_addresses(tensors, addresses), self._acquire)
        self.announced = []
        for bucket in filled:
            self._announce(bucket.number, bucket.digests)
            self.announced.append(bucket.digests)
            if progress is not None:
                progress(bucket.nbytes)
        sent = Sent(packer.gather_s, packer.digest_s, self._finish(), packer.not_finite)
        if same and not planned:  # pushed for the second time: a plan will pay off
            all_there = len(addresses) == len(self.layout.entries)
            repeated = pack_plan(*how, addresses, sources) if all_there else None
            self._packed[key(self.arena.bytes)] = known, repeated, True
        elif not same:
            self._packed[key(self.arena.bytes)] = known, None, False
        return sent

    def send_filled(self, ranks: Coordinator, source: Source, deadline: Deadline, progress: Progress | None) -> Sent:
        """As `send`, with the trainer's ranks filling an arena that holds all. Also raises what they raise."""
        size = self.plan.bucket_bytes
        assert self.layout.nbytes <= self.plan.slots * size, "the arena holds the whole stream"
        assert isinstance(self.arena, arenas.ShmArena), "several processes can fill an arena in host memory only"
        alive = tuple(arena.name for arena in [self.arena, *self._others] if isinstance(arena, arenas.ShmArena))
        found, work = ranks.fill(source, deadline, self.layout, self.arena, alive, self.plan.digest, self.demand)
        self.announced = [{}] * self.layout.buckets(size)
        if self.plan.digest:
            self.announced = self.demand.by_bucket(self.layout, size, found)
        return Sent(work.gather_s, work.digest_s, self._announce_all(progress), work.not_finite)

    def resend(self, progress: Progress | None) -> Sent:
        """Send what the arena holds from an earlier push without packing. Raises `TransferFailed` or `PushTimeout`."""
        start = time.perf_counter()
        new = self.demand.without(set[str]().union(*self.announced))
        if self.plan.digest and new.names:  # these ranks need other parts than the ranks of that push
            found = hash_stream(self.layout, self.arena.bytes, self.plan.digest, new)
            by_bucket = new.by_bucket(self.layout, self.plan.bucket_bytes, found)
            self.announced = [{**known, **more} for known, more in zip(self.announced, by_bucket, strict=True)]
        hashed_s = time.perf_counter() - start
        return Sent(0.0, hashed_s, self._announce_all(progress))

    def _announce_all(self, progress: Progress | None) -> float:
        """Announce every bucket of an arena that holds them all; the seconds that `_finish` returns."""
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
        """Tell the ranks that the push is cancelled."""
        while self._sendings:
            self._sendings.pop().cancel(error)


def _noting_addresses(tensors: Iterable[torch.Tensor], addresses: list[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors; append the address of each that is contiguous in host memory to ``addresses``."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg():
            addresses.append(tensor.data_ptr())
        yield tensor
