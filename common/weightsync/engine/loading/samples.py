"""When samples of what a loader does are compared with its load plan."""

from __future__ import annotations

import time
from typing import Final

from weightsync.engine.adapter import LoaderHooks
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.loader_dependencies import Dependencies
from weightsync.tensors.layout import listed
from weightsync.uncollected import uncollected

#: Seconds of this thread's CPU that a sample may take in every check. One that takes n times as long is taken in every
#: n-th check, and at least in every `_RESTS`-th.
_SAMPLE_S: Final = 0.05
_RESTS: Final = 16


class Samples:
    """The samples of one rank, of which one is due in each check: at prepare, and before the commit.

    A rank that gets all tensors in full can load any push by the engine's loader. The check before the commit, which
    sees every change that one at prepare would have shown, has both samples, and runs the loader once for them.
    """

    def __init__(self) -> None:
        self._rest = 0  # checks left to do without a sample

    def due(self, plan: LoadPlan, *, commits: bool) -> int:
        """How many to compare in this check; ``commits``: it is the one before the commit."""
        checks = 1 if plan.subset.name else 2 * commits
        self._rest -= checks
        return min(checks, max(0, -self._rest))

    def find_change(
        self, plan: LoadPlan, hooks: LoaderHooks, dependencies: Dependencies, *, sample: bool, commits: bool
    ) -> str | None:
        """Why a trusted plan no longer is what the loader does; empty if no difference is found, None if nothing cheap
        was there to compare. ``sample`` and ``commits`` as in `due`."""
        changed: list[str] = []
        try:
            changed = dependencies.changed()
            samples = self.due(plan, commits=commits) if sample else 0
            if not (changed or samples):
                return None
            with uncollected():
                found = self.compare(plan, hooks, samples) if samples and not changed else "some"
                # With few tensors a loader may behave differently than with all: only a full recording decides.
                found = found and plan.changed(hooks)
            if changed and not found:
                dependencies.was_harmless(changed)
        except Exception as error:
            found = f"all ({type(error).__name__}: {error})"
        why = f"{listed(changed)} changed, and " if changed else ""
        return f"{why}the loader no longer does what was recorded with {found}" if found else ""

    def compare(self, plan: LoadPlan, hooks: LoaderHooks, samples: int) -> str:
        """As `LoadPlan.changed`; if a sample is expensive, the next checks do without."""
        start = time.thread_time()
        found = plan.changed(hooks, samples)
        self._rest = min(_RESTS, int((time.thread_time() - start) / samples / _SAMPLE_S))
        return found
