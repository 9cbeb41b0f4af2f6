"""One push on the trainer's side: the arena that it goes through, and the transports that send it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.memory import arenas
from weightsync.memory.arenas import Arena
from weightsync.memory.shared_parameters import SharedParameters
from weightsync.protocol.deltas import DeltaSpec
from weightsync.protocol.http import UpdateRequest
from weightsync.sources import Source
from weightsync.tensors import changes
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversions, by_source
from weightsync.tensors.layout import Entry, Layout
from weightsync.tensors.scattered import key
from weightsync.tensors.subset import Digests, Wanted
from weightsync.trainer.gpu_pack_plan import GpuPackPlan
from weightsync.trainer.pack_plan import PackPlan, pack_plan
from weightsync.trainer.packing import Packed as PackedBucket
from weightsync.trainer.packing import Packer, hash_stream
from weightsync.trainer.ranks import Coordinator
from weightsync.transports import registry
from weightsync.transports.base import Peer, Progress, Sending, TrainerEnd
from weightsync.uncollected import uncollected

Packed = dict[int, tuple[tuple[object, ...], PackPlan | GpuPackPlan | None, bool]]
"""By arena: what identifies the last packing, its plan if there is one, and whether planning was tried."""
_NOTHING: Final = Wanted(())


class Sent(NamedTuple):
    """Seconds that sending took: ``gather_s`` for copying the trainer's tensors, ``digest_s`` for hashing them, and
    ``verify_s`` for hashing at the slowest rank. ``not_finite``: infinite and NaN elements among those converted."""

    gather_s: float
    digest_s: float
    verify_s: float
    not_finite: int = 0


class Changes(NamedTuple):
    """What crosses to other hosts in place of a version: a stream of its own, in an ``arena`` of its own.

    ``announced`` has the digests of its buckets; ``changed`` tensors cross as deltas, and ``whole`` ones in full.
    ``find_s``: the seconds that it took to make all this.
    """

    spec: DeltaSpec
    layout: Layout
    arena: Arena
    announced: Sequence[Digests]
    changed: int
    whole: int
    find_s: float


class Outgoing:
    """A push, made by `Transfer.begin` or `Transfer.again`.

    ``plan`` is the request to every engine, ``layout`` is the stream, which goes through ``arena``; ``others`` are
    arenas that ranks may still use. ``ends`` has the trainer end of each transport in use, by name, and ``packed`` is
    kept from push to push. ``announced`` has the digests of each bucket that are known already, as ``demand`` asked for
    them.
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
        demand: Wanted = _NOTHING,
    ):
        self.plan, self.layout, self.arena = plan, layout, arena
        #: The version before, in another arena, as it crossed.
        self.base: Outgoing | None = None
        self.announced = list(announced) or [{}] * layout.buckets(plan.bucket_bytes)
        self._by_name, self._packed, self.others = ends, packed, others
        #: This push, in each of the transports that carry it.
        self._sendings: list[Sending] = []
        #: The same, in those that carry what has changed.
        self._changing: list[Sending] = []
        #: The digests that the connected ranks need, or did when what the arena holds was sent before.
        self.demand = demand
        #: What is sent to other hosts in place of what the arena holds.
        self.changes: Changes | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the arena holds the whole stream after the push."""
        plan = self.plan
        return not (plan.stream or plan.any_order) and self.layout.nbytes <= plan.slots * plan.bucket_bytes

    @property
    def memory(self) -> torch.Tensor:
        """What the arena holds."""
        assert isinstance(self.arena.bytes, torch.Tensor), "an arena, and not parameters in place"
        return self.arena.bytes

    def expect(self) -> None:
        """Have what the arena holds hashed while it is copied: the ranks will need what they needed of the base."""
        assert self.base is not None, "there is a version before"
        self.demand = self.base.demand

    def follow(self, base: Outgoing | None) -> None:
        """Take ``base`` as the version before, if it has the same tensors."""
        self.base = base if base is not None and base.layout.name == self.layout.name else None

    @property
    def content(self) -> str:
        """The name of what the arena holds, by which ranks know it."""
        return self.plan.content or self.plan.push

    def _changes(self, transport: str) -> Changes | None:
        return None if registry.spec(transport).local else self.changes

    def request(self, engine: str, transport: str) -> UpdateRequest:
        """The request to the engine at the URL ``engine``."""
        found = self._changes(transport)
        plan = self.plan if found is None else msgspec.structs.replace(self.plan, delta=found.spec)
        return self._by_name[transport].request(plan, engine)

    def await_ranks(self, peers: Mapping[str, set[Peer]], deadline: Deadline) -> None:
        """Wait until all ``peers``, by transport, have connected. Raises `TransferFailed` or `PushTimeout`."""
        for name, ranks in peers.items():
            found, plan, layout, arena = self._changes(name), self.plan, self.layout, self.arena
            if found is not None:
                plan = changes.crossing(msgspec.structs.replace(plan, delta=found.spec))
                layout, arena = found.layout, found.arena
            others = [other for other in (self.arena, *self.others) if other is not arena]
            sending = self._by_name[name].begin(plan, layout, [arena, *others], ranks, deadline)
            (self._sendings if found is None else self._changing).append(sending)
            sending.await_ranks()
        self.demand = self.demand.also(parts for sending in self._sendings for parts in sending.needs())

    def send(
        self,
        tensors: Iterable[torch.Tensor],
        progress: Progress,
        identity: object | None = None,
        conversions: Conversions = NO_CONVERSIONS,
    ) -> Sent:
        """Pack and send the stream; return once every rank has received and verified it.

        If ``identity``, see `Source.identity`, is that of the push before, ``tensors`` need not be read again.
        ``conversions`` as in `packing.Packer`. Raises `SourceError` for a tensor that has changed or cannot be cast,
        `TransferFailed` or `PushTimeout`.
        """
        if isinstance(self.arena, SharedParameters) and not self.plan.digest:  # nothing to copy or hash
            return Sent(0.0, 0.0, self._announce_all(progress))
        packing = _Packing(self, self._packed, self.plan.digest, identity, conversions)
        self.announced = []
        for bucket in packing.fill(tensors, self._acquire):
            self._announce(bucket.number, bucket.digests)
            self.announced.append(bucket.digests)
            progress(bucket.nbytes)
        sent = packing.sent._replace(verify_s=self._finish())
        packing.remember()
        return sent

    def send_pairs(
        self, pairs: Iterable[tuple[tuple[Entry, ...], torch.Tensor]], conversions: Conversions, progress: Progress
    ) -> Sent:
        """As `send`, in the order of ``pairs``: tensors, and where what they become lies in the stream.

        ``conversions`` may grow.
        """
        plan = self.plan
        packer = Packer(
            self.layout, self.arena.bytes, plan.bucket_bytes, plan.slots, plan.digest, self.demand, conversions
        )
        for bucket in packer.fill_pairs(pairs, self._acquire):
            self._announce(bucket.number, bucket.digests, bucket.begins)
            progress(bucket.nbytes)
        return Sent(packer.gather_s, packer.digest_s, self._finish(), packer.not_finite)

    def copy(
        self,
        tensors: Iterable[torch.Tensor],
        identity: object | None = None,
        conversions: Conversions = NO_CONVERSIONS,
    ) -> Sent:
        """Pack the stream into an arena that holds all of it, for `resend`, before any engine is asked. As `send`."""
        packing = _Packing(self, self._packed, self._known_digest, identity, conversions)
        self.announced = [bucket.digests for bucket in packing.fill(tensors, lambda bucket: None)]
        packing.remember()
        return packing.sent

    @property
    def _assembled(self) -> tuple[arenas.ShmArena | arenas.CudaArena, tuple[str, ...]]:
        """The arena, which several processes fill, or of which each has a part; and the names of all arenas in use."""
        assert not isinstance(self.arena, SharedParameters), "what is read in place is not written"
        every = [self.arena, *self.others]
        return self.arena, tuple(arena.name for arena in every if not isinstance(arena, SharedParameters))

    def provide(self, ranks: Coordinator, deadline: Deadline) -> None:
        """Have the trainer's other memory domains make arenas for what they hold of the stream. Raises what they
        raise."""
        arena, alive = self._assembled
        ranks.domains.provide(arena, self.layout, alive, deadline)

    def send_filled(self, ranks: Coordinator, source: Source, deadline: Deadline, progress: Progress) -> Sent:
        """As `send`, with the trainer's ranks filling an arena that holds all, or offering their parameters to be read
        in place. Also raises what they raise."""
        return self._fill(ranks, source, deadline, self.plan.digest)._replace(verify_s=self._announce_all(progress))

    def copy_filled(self, ranks: Coordinator, source: Source, deadline: Deadline) -> Sent:
        """As `copy`, with the trainer's ranks filling the arena. Also raises what they raise."""
        return self._fill(ranks, source, deadline, self._known_digest)

    @property
    def _known_digest(self) -> str:
        """The algorithm, if it is known what ranks need before they have connected: what they needed of the base."""
        return self.plan.digest if self.demand.names else ""

    def _fill(self, ranks: Coordinator, source: Source, deadline: Deadline, algorithm: str) -> Sent:
        size = self.plan.bucket_bytes
        if isinstance(self.arena, SharedParameters):
            if not algorithm:
                return Sent(0.0, 0.0, 0.0)
            found, work = ranks.offers.hashed(self.layout, self.arena.bytes, algorithm, self.demand, deadline)
            self.announced = self.demand.by_bucket(self.layout, size, found)
            return Sent(0.0, work.digest_s, 0.0)
        assert self.layout.nbytes <= self.plan.slots * size, "the arena holds the whole stream"
        arena, alive = self._assembled
        found, work = ranks.fill(source, deadline, self.layout, arena, alive, algorithm, self.demand)
        if algorithm:
            self.announced = self.demand.by_bucket(self.layout, size, found)
        return Sent(work.gather_s, work.digest_s, 0.0, work.not_finite)

    def resend(self, progress: Progress) -> Sent:
        """Send what the arena holds, from an earlier push or from `copy`. Raises `TransferFailed` or `PushTimeout`."""
        hashed_s = self.hash_rest()
        return Sent(0.0, hashed_s, self._announce_all(progress))

    def hash_rest(self) -> float:
        """Hash what the arena holds, as far as it is needed and was not; the seconds that it took."""
        start = time.perf_counter()
        new = self.demand.without(set[str]().union(*self.announced))
        if self.plan.digest and new.names:  # these ranks need other parts than those of the push that hashed it
            found = hash_stream(self.layout, self.arena.bytes, self.plan.digest, new)
            by_bucket = new.by_bucket(self.layout, self.plan.bucket_bytes, found)
            self.announced = [{**known, **more} for known, more in zip(self.announced, by_bucket, strict=True)]
        return time.perf_counter() - start

    def _announce_all(self, progress: Progress) -> float:
        """Announce every bucket of an arena that holds them all, and of what has changed; the seconds that `_finish`
        returns."""
        for number, digests in enumerate(self.changes.announced if self.changes is not None else ()):
            for sending in self._changing:
                sending.announce(number, digests)
        for number, digests in enumerate(self.announced):
            self._announce(number, digests)
            progress(min((number + 1) * self.plan.bucket_bytes, self.layout.nbytes))
        return self._finish()

    def _announce(self, number: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        for sending in self._sendings:
            sending.announce(number, digests, begins)

    def _finish(self) -> float:
        return max(sending.finish() for sending in (*self._sendings, *self._changing))

    def _acquire(self, bucket: int) -> None:
        for sending in self._sendings:
            sending.acquire(bucket)

    def cancel(self, error: BaseException) -> None:
        """Tell the ranks that the push is cancelled."""
        for sendings in (self._sendings, self._changing):
            while sendings:
                sendings.pop().cancel(error)


class _Packing:
    """One packing of a push: by the plan of the packing before, if that was of the same memory, else tensor by tensor.

    ``sent`` has what it took, but for ``verify_s``.
    """

    def __init__(
        self,
        push: Outgoing,
        packed: Packed,
        algorithm: str,
        identity: object | None,
        conversions: Conversions,
    ):
        self._how = push.layout, push.arena.bytes, push.plan.bucket_bytes, push.plan.slots, algorithm, push.demand
        self._conversions, self._packed, self._key = conversions, packed, key(push.arena.bytes)
        self._known = (identity, push.layout, *self._how[2:5], frozenset(push.demand.names), conversions)
        before, plan, self._planned = packed.get(self._key, ((), None, False))
        self._same = identity is not None and before == self._known
        self._plan = plan if self._same else None
        self._addresses: list[int] = []
        self.sent = Sent(0.0, 0.0, 0.0)

    def fill(self, tensors: Iterable[torch.Tensor], acquire: Callable[[int], None]) -> Iterator[PackedBucket]:
        """As `packing.Packer.fill`."""
        if self._plan is not None:
            packer: PackPlan | GpuPackPlan | Packer = self._plan
            yield from self._plan.fill(acquire)
        else:
            packer = Packer(*self._how, self._conversions)
            noted = _noting_addresses(tensors, self._addresses, self._how[1].device)
            yield from packer.fill(noted, acquire)
        self.sent = Sent(packer.gather_s, packer.digest_s, 0.0, packer.not_finite)

    def remember(self) -> None:
        """Make the plan for the next packing, if this was the second of the same memory: it will pay off."""
        if self._same and not self._planned:
            all_there = len(self._addresses) == sum(1 for _ in by_source(self._how[0], self._conversions))
            # The plan's own tensors are written by several threads, and inference mode is that of one.
            with uncollected(), torch.inference_mode(mode=False):
                repeated = pack_plan(*self._how, self._addresses, self._conversions) if all_there else None
            self._packed[self._key] = self._known, repeated, True
        elif not self._same:
            self._packed[self._key] = self._known, None, False


def _noting_addresses(
    tensors: Iterable[torch.Tensor], addresses: list[int], device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the tensors; append the address of each that is contiguous in a device's memory to ``addresses``."""
    for tensor in tensors:
        if tensor.device == device and tensor.is_contiguous() and not tensor.is_neg():
            addresses.append(tensor.data_ptr())
        yield tensor
