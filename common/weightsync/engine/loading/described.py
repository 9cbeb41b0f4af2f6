"""How a rank loads, for people."""

from __future__ import annotations

from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.standby import Standby
from weightsync.tensors.layout import listed

_OWN = "the engine's own loader"


def described(plan: LoadPlan | None, *, trusted: bool, why: str, standby: Standby) -> str:
    """``why``: the reason for no ``plan``; empty before the first push, and then nothing is known."""
    if plan is None:
        if standby.used:
            return f"into a standby, by {_OWN}, and {standby.way}"
        return f"{_OWN}: {why}{standby.without}" if why else ""
    if not trusted:
        return f"{_OWN}: the load plan is checked by the first push that commits"
    rest = [f"{name} ({reason})" for name, reason in plan.fallen.items()] or sorted(plan.loader)
    subset = plan.subset
    share = f", reads {100 * subset.nbytes / subset.layout.payload_bytes:.0f} % of a push" if subset.name else ""
    way = ", into a standby" if standby.used else ""
    loader = f"; {_OWN} for {listed(rest)}" if rest else ""
    return f"load plan, {len(plan.copies)} copies{share}{way}{loader}{standby.without}"
