"""A standby that load plans fill: a second set of the memory that they write, without the engine's loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.storages import Storages
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.tensors.layout import cut_run, listed
from weightsync.tensors.native_copy import Copies, Run
from weightsync.tensors.scattered import Stream, key


def described(plan: LoadPlan, way: str, own: str) -> str:
    """How a plan loads, for people; ``own`` stands for the loader of what the plan does not load."""
    rest = [f"{name} ({why})" for name, why in plan.fallen.items()] or sorted(plan.loader)
    subset = plan.subset
    share = f", reads {100 * subset.nbytes / subset.layout.payload_bytes:.0f} % of a push" if subset.name else ""
    return f"load plan, {len(plan.copies)} copies{share}{way}" + (f"; {own} for {listed(rest)}" if rest else "")


def nbytes_of(plan: LoadPlan) -> int:
    """The memory that a `Planned` takes. Raises as `LoadPlan.written`."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, plan.written())}
    return sum(storages.values())


#: By stage: the size of a bucket, and what is copied out of each.
_Prepared = dict[int, tuple[int, list[Copies]]]


def _by_bucket(plan: LoadPlan, stage: Stream, bucket_bytes: int) -> list[Copies]:
    """For each bucket of a stream, the copies of runs of bytes by ``plan`` out of it."""
    found: list[list[Run]] = [[] for _ in range(plan.layout.buckets(bucket_bytes))]
    for at, target, nbytes in plan.runs:
        for bucket, start, count in cut_run(at, nbytes, bucket_bytes):
            found[bucket].append(Run(start, target + start - at, count))
    return [Copies(plan.runs_from(stage, runs)) for runs in found]


class Arriving:
    """Fills a standby with ``push`` by ``plan`` while the push arrives.

    `take` belongs to the thread that receives the push: nothing else may use the standby meanwhile.
    """

    def __init__(self, push: str, plan: LoadPlan, bucket_bytes: int, prepared: _Prepared):
        self.push, self.plan, self._bucket_bytes, self._prepared = push, plan, bucket_bytes, prepared
        #: The stage that the push arrives in, and what is still to be copied, by bucket.
        self._stage: int | None = None
        self._left: dict[int, Copies] = {}

    def take(self, stage: Stream, bucket: int) -> None:
        """Copy what has arrived with a bucket."""
        if self._stage is None:
            self._stage = key(stage)
            if self._prepared.get(self._stage, (0,))[0] != self._bucket_bytes:
                self._prepared[self._stage] = self._bucket_bytes, _by_bucket(self.plan, stage, self._bucket_bytes)
            self._left = dict(enumerate(self._prepared[self._stage][1]))
        if (copies := self._left.pop(bucket, None)) is not None:
            copies.make()

    def fits(self, plan: LoadPlan, stage: Stream) -> bool:
        """Whether this is what ``plan`` does with a stage."""
        return plan is self.plan and key(stage) == self._stage

    def steps(self, stage: Stream) -> Iterator[None]:
        """Copy what is left, some milliseconds of it between two yields."""
        while self._left:
            yield from self._left.popitem()[1].steps()
        yield from self.plan.rest(stage)


class Planned(Storages):
    """The second set of all that ``plan`` writes, and the plan for it. Raises as `LoadPlan.written` and `Storages`."""

    def __init__(self, plan: LoadPlan, rules: Rules):
        super().__init__(plan.memory.model, plan.written(), rules)
        #: For what is served, and for the standby.
        self.plans = [plan, plan.moved(self.other)]
        #: For each of them, what `Arriving` prepares.
        self._prepared: list[_Prepared] = [{}, {}]

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

    def is_current(self) -> bool:
        """See `Swap.is_current`."""
        return self.plans[0].memory.is_unmoved() and super().is_current()

    def free(self) -> None:
        """See `Storages.free`."""
        super().free()
        del self.plans[1:], self._prepared[1:]
