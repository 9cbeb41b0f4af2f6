"""A standby that load plans fill: a second set of the memory that they write, without the engine's loader."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence

import torch

from weightsync.engine.exchange.pairs import Rules, Unlike
from weightsync.engine.exchange.storages import Storages
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.tensors.gpu_copy import TensorCopies
from weightsync.tensors.layout import cut_run
from weightsync.tensors.native_copy import Copies, Run
from weightsync.tensors.scattered import Stream, key

logger = logging.getLogger(__name__)


def nbytes_of(plan: LoadPlan) -> int:
    """The memory that a `Planned` takes. Raises as `LoadPlan.written`."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plan.written())}
    return sum(storages.values())


#: What is copied with a bucket.
_Taken = tuple[Copies, TensorCopies]
#: By stage: the size of a bucket, and what is copied with each.
_Prepared = dict[int, tuple[int, list[_Taken]]]


def _by_bucket(plan: LoadPlan, stage: Stream, bucket_bytes: int) -> list[_Taken]:
    """What ``plan`` copies once each bucket of a stream has arrived, after all before it."""
    count = plan.layout.buckets(bucket_bytes)
    runs: list[list[Run]] = [[] for _ in range(count)]
    for at, target, nbytes in plan.runs:
        for bucket, start, size in cut_run(at, nbytes, bucket_bytes):
            runs[bucket].append(Run(start, target + start - at, size))
    pairs: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(count)]
    with torch.inference_mode(False), torch.no_grad():
        for copy, entry in plan.strided:
            pairs[max(0, entry.offset + entry.nbytes - 1) // bucket_bytes] += copy.parts(stage, entry) or ()
    return [
        (Copies(plan.runs_from(stage, each)), TensorCopies([target for target, _ in both], [part for _, part in both]))
        for each, both in zip(runs, pairs, strict=True)
    ]


class Arriving:
    """Fills a standby with ``push`` by ``plan`` while the push arrives.

    `take` belongs to the thread that receives the push: nothing else may use the standby meanwhile.
    """

    def __init__(self, push: str, plan: LoadPlan, bucket_bytes: int, prepared: _Prepared):
        self.push, self.plan, self._bucket_bytes, self._prepared = push, plan, bucket_bytes, prepared
        #: The stage that the push arrives in, and what is still to be copied, by bucket.
        self._stage: int | None = None
        self._left: dict[int, _Taken] = {}

    def take(self, stage: Stream, bucket: int) -> None:
        """Copy what has arrived with a bucket."""
        if self._stage is None:
            self._stage = key(stage)
            if self._prepared.get(self._stage, (0,))[0] != self._bucket_bytes:
                self._prepared[self._stage] = self._bucket_bytes, _by_bucket(self.plan, stage, self._bucket_bytes)
            self._left = dict(enumerate(self._prepared[self._stage][1]))
        for copies in self._left.pop(bucket, ()):
            copies.make()

    def lies_in(self, stages: Sequence[Stream]) -> bool:
        """Whether it arrives in one of these stages."""
        return any(key(stage) == self._stage for stage in stages)

    def fits(self, plan: LoadPlan, stage: Stream) -> bool:
        """Whether this is what ``plan`` does with a stage."""
        return plan is self.plan and key(stage) == self._stage

    def steps(self, stage: Stream) -> Iterator[None]:
        """Copy what is left, some milliseconds of it between two yields."""
        while self._left:
            for copies in self._left.popitem()[1]:
                yield from copies.steps()
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
        self._prepared: list[_Prepared] = [{}, {}]

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
