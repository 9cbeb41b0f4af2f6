"""A standby that load plans fill: a second set of the memory that they write, without the engine's loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weightsync.engine.exchange.pairs import Rules, Unlike
from weightsync.engine.exchange.storages import Storages
from weightsync.engine.loading.in_passing import in_passing
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.verifying import Hashed
from weightsync.tensors.gpu_copy import TensorCopies
from weightsync.tensors.layout import cut_run
from weightsync.tensors.native_copy import Copies, Run
from weightsync.tensors.one_pass import OnePass
from weightsync.tensors.scattered import Stream, key

logger = logging.getLogger(__name__)


def nbytes_of(plan: LoadPlan) -> int:
    """The memory that a `Planned` takes. Raises as `LoadPlan.written`."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plan.written())}
    return sum(storages.values())


class _Taken(NamedTuple):
    """What is copied with a bucket; ``work`` also hashes it."""

    work: OnePass | None
    copies: Copies
    strided: TensorCopies

    def steps(self) -> Iterator[None]:
        """Copy all, some milliseconds of it between two yields."""
        if self.work is not None:
            self.work.make()
            yield
        yield from self.copies.steps()
        yield from self.strided.steps()


#: What is hashed with each bucket, see `verifying.Taking`.
_AllHashed = Sequence[Sequence[Hashed] | None]


class _Prepared:
    """What ``plan`` copies once each bucket of a stream has arrived, after all before it.

    ``hashed`` is what is hashed with each bucket; None if nothing is.
    """

    def __init__(self, plan: LoadPlan, stage: Stream, bucket_bytes: int, hashed: _AllHashed | None):
        self.settings = bucket_bytes, hashed
        count = plan.layout.buckets(bucket_bytes)
        runs: list[list[Run]] = [[] for _ in range(count)]
        for at, target, nbytes in plan.runs:
            for bucket, start, size in cut_run(at, nbytes, bucket_bytes):
                runs[bucket].append(Run(start, target + start - at, size))
        pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(count)]
        with torch.inference_mode(False), torch.no_grad():
            for copy, entry in plan.strided:
                pairs[max(0, entry.offset + entry.nbytes - 1) // bucket_bytes] += copy.parts(stage, entry) or ()
        there = [plan.runs_from(stage, each) for each in runs]
        works = in_passing([None] * count if hashed is None else hashed, there, bucket_bytes)
        self.buckets = [
            _Taken(work, Copies(left), TensorCopies([target for target, _ in both], [part for _, part in both]))
            for (work, left), both in zip(works, pairs, strict=True)
        ]

    def fits(self, bucket_bytes: int, hashed: _AllHashed | None) -> bool:
        """Whether this is what is copied with buckets of this size, given that the stage is the same."""
        size, own = self.settings
        return size == bucket_bytes and own is hashed


class Arriving:
    """Fills a standby with ``push`` by ``plan`` while the push arrives; see `verifying.Taking`.

    `passing` and `take` belong to the thread that receives the push: nothing else may use the standby meanwhile.
    ``prepared`` is kept from push to push, by stage.
    """

    def __init__(self, push: str, plan: LoadPlan, bucket_bytes: int, prepared: dict[int, _Prepared]):
        self.push, self.plan, self._bucket_bytes, self._prepared = push, plan, bucket_bytes, prepared
        #: The stage that the push arrives in, and what is still to be copied, by bucket.
        self._stage: int | None = None
        self._left: dict[int, _Taken] = {}

    def _begin(self, stage: Stream, hashed: _AllHashed | None) -> None:
        if self._stage is None:
            self._stage = key(stage)
            found = self._prepared.get(self._stage)
            if found is None or not found.fits(self._bucket_bytes, hashed):
                found = self._prepared[self._stage] = _Prepared(self.plan, stage, self._bucket_bytes, hashed)
            self._left = dict(enumerate(found.buckets))

    def passing(self, stage: Stream, bucket: int, hashed: _AllHashed) -> OnePass | None:
        """See `verifying.Taking`."""
        self._begin(stage, hashed)
        taken = self._left.get(bucket)
        if taken is None or taken.work is None:
            return None
        self._left[bucket] = taken._replace(work=None)
        return taken.work

    def take(self, stage: Stream, bucket: int) -> None:
        """See `verifying.Taking`."""
        self._begin(stage, None)
        for _ in self._left.pop(bucket).steps() if bucket in self._left else ():
            pass

    def lies_in(self, stages: Sequence[Stream]) -> bool:
        """Whether it arrives in one of these stages."""
        return any(key(stage) == self._stage for stage in stages)

    def fits(self, plan: LoadPlan, stage: Stream) -> bool:
        """Whether this is what ``plan`` does with a stage."""
        return plan is self.plan and key(stage) == self._stage

    def steps(self, stage: Stream) -> Iterator[None]:
        """Copy what is left, some milliseconds of it between two yields."""
        while self._left:
            yield from self._left.popitem()[1].steps()
        self.plan.rest(stage)


class Planned(Storages):
    """The second set of all that ``plan`` writes, and the plan for it. Raises as `LoadPlan.written` and `Storages`."""

    def __init__(self, plan: LoadPlan, rules: Rules):
        super().__init__(plan.memory.model, plan.written(), rules)
        #: For what is served, and for the standby.
        self.plans = [plan, plan.moved(self.other)]
        self.turned = False
        """Whether the standby's memory is in the place of the model's, see `turn`."""
        #: For each of them, what `Arriving` prepares.
        self._prepared: list[dict[int, _Prepared]] = [{}, {}]

    def follow(self, plan: LoadPlan) -> None:
        """Be filled by ``plan``, if that is the same recording as the plan so far, of another layout."""
        if plan is not self.plans[0] and plan.recording is self.plans[0].recording:
            self.plans, self._prepared = [plan, plan.moved(self.other)], [{}, {}]

    def arriving(self, push: str, bucket_bytes: int) -> Arriving:
        """What fills the standby while a push arrives."""
        return Arriving(push, self.plans[1], bucket_bytes, self._prepared[1])

    def keep(self, stages: Sequence[Stream]) -> None:
        """As `LoadPlan.keep`, for both plans."""
        for plan, prepared in zip(self.plans, self._prepared, strict=True):
            plan.keep(stages)
            for gone in prepared.keys() - set(map(key, stages)):
                del prepared[gone]

    def fill(self, stage: Stream, arrived: Arriving | None) -> Iterator[None]:
        """Load a stage into the standby, unless that was done when it arrived; some milliseconds between two yields."""
        plan = self.plans[1]
        yield from arrived.steps(stage) if arrived is not None and arrived.fits(plan, stage) else plan.steps(stage)

    def exchange(self) -> None:
        """See `Swap.exchange`; the plans are exchanged with what they write."""
        super().exchange()
        self.plans.reverse()
        self._prepared.reverse()

    def turn(self, turned: bool) -> None:
        """Have the standby's memory in the place of the model's, where the engine's own loader writes, or no more.

        What else the loader has replaced in the model by then is put back, and `Unlike` raised.
        """
        if turned == self.turned:
            return
        try:
            self.exchange()
        except BaseException:
            if self.torn:
                # The engine serves, and nothing else would keep it from doing so with weights of two versions.
                logger.critical("the weights of two versions are mixed, and the engine has to be restarted")
                os._exit(1)
            raise
        self.turned = turned
        if not turned and self.put_back():
            raise Unlike("the engine's loader replaces parts of the model")

    def is_current(self) -> bool:
        """See `Swap.is_current`."""
        return self.plans[0].memory.is_unmoved() and super().is_current()

    def free(self) -> None:
        """See `Storages.free`."""
        super().free()
        del self.plans[1:], self._prepared[1:]
