"""A standby that load plans fill: a second set of the memory that they write, without the engine's loader."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.storages import Storages
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.tensors.layout import listed
from weightsync.tensors.scattered import Stream


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


class Planned(Storages):
    """The second set of all that ``plan`` writes, and the plan for it. Raises as `LoadPlan.written` and `Storages`."""

    def __init__(self, plan: LoadPlan, rules: Rules):
        super().__init__(plan.memory.model, plan.written(), rules)
        #: For what is served, and for the standby.
        self.plans = [plan, plan.moved(self.other)]

    def fill(self, stage: Stream) -> Iterator[None]:
        """Load a stage into the standby, some milliseconds of it between two yields."""
        yield from self.plans[1].steps(stage)

    def exchange(self) -> None:
        """See `Swap.exchange`; the plans are exchanged with what they write."""
        super().exchange()
        self.plans.reverse()

    def is_current(self) -> bool:
        """See `Swap.is_current`."""
        return self.plans[0].memory.is_unmoved() and super().is_current()

    def free(self) -> None:
        """See `Storages.free`."""
        super().free()
        del self.plans[1:]
