"""Loading in one rank: what a complete push is, and whether a load plan or the engine's own loader loads it.

Before each commit, and at prepare where not all tensors come in full, a plan is compared with the model's addresses,
the simple values of its modules and the environment, and in samples with what the loader does. If anything differs, the
loader is recorded again, and loads that push. After a replay, 4 MiB of the parameters are compared with the stage; if
they differ, the loader loads the push, and the plan is dropped.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from msgspec import structs

from weightsync.engine.adapter import Adapter, LoaderHooks, Sealed
from weightsync.engine.loading.ahead import Ahead
from weightsync.engine.loading.complete import Complete
from weightsync.engine.loading.described import described
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.loader_dependencies import Dependencies
from weightsync.engine.loading.model_memory import inside
from weightsync.engine.loading.planned import Arriving
from weightsync.engine.loading.samples import Samples
from weightsync.engine.loading.standby import Standby
from weightsync.engine.stage import Staged
from weightsync.errors import ManifestUnknown, TransferFailed, WrongState
from weightsync.memory import arenas
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.model_status import Comparison, ModelStatus
from weightsync.protocol.rank_replies import Accepted, Ready
from weightsync.protocol.states import PLAN, Machine, PlanState
from weightsync.tensors.domains import layout_of
from weightsync.tensors.layout import Layout, Table, listed
from weightsync.tensors.scattered import Stream, spans
from weightsync.tensors.subset import Subset
from weightsync.uncollected import uncollected

logger = logging.getLogger(__name__)

_MOVES: Final = "the memory of its model moves while it is loaded"


class Loading:
    """The ways of one rank to load. Only `keep` may be called from outside of the engine's loop.

    A plan is recorded for the manifest of a push before the push is accepted. The engine's loader loads the first push;
    the plan is trusted once everything it would have copied is found where it would have put it. `states.PLAN` is its
    state machine.
    """

    def __init__(self, adapter: Adapter):
        self.adapter = adapter
        self._complete = Complete(adapter)
        self.standby = Standby(adapter, self._complete)
        self.ahead = Ahead(adapter, self._complete, self.standby, lambda: self._plan)
        self._hooks: LoaderHooks | None = None
        #: What the last push left as the engine had it.
        self._kept: tuple[str, ...] = ()
        self._layout: Layout | None = None
        self._plan: LoadPlan | None = None
        self._dependencies: Dependencies | None = None
        self._machine: Machine[PlanState] = Machine(PLAN, "unrecorded", f"the load plan of rank {adapter.rank}")
        self._why = ""
        #: The loader keeps tensors, or may do so: it gets clones.
        self._loads_clones = False
        #: What the last manifest fills and leaves out, and how long the engine did not generate to find out.
        self._accepted, self._filled = Accepted(), ModelStatus()
        self._record_s = 0.0
        self._pushes = 0  # loaded by the plan
        self._checked_push = ""  # the last that was checked before its commit
        self._samples = Samples()
        self._compared: dict[str, Comparison] = {}  # the last of each kind

    @property
    def path(self) -> str:
        """How this rank loads, for `http.RankStatus.loading`; empty before the first push."""
        trusted = self._machine.allows("replay")
        return described(self._plan, trusted=trusted, why=self._why, standby=self.standby)

    def status(self) -> ModelStatus | None:
        """What the last accepted manifest fills, and the last comparisons; None before the first manifest."""
        if self._layout is None:
            return None
        return structs.replace(self._filled, pushes=self._pushes, compared=tuple(self._compared.values()))

    def accept(
        self,
        manifest: Sequence[TensorSpec],
        known: str = "",
        push: str = "",
        kept: tuple[str, ...] = (),
        domains: Table = (),
    ) -> Layout:
        """Return the layout of a complete push. Raises `ManifestMismatch`, naming tensors, if it is not complete.

        `Complete` says what that is; whether the loader skips some of it, the front end can tell from `accepted` of all
        ranks. Tensors in ``kept`` stay as they are. An empty manifest stands for that of the push before,
        if the name of its layout is ``known``; otherwise `ManifestUnknown` is raised.
        """
        if known and not manifest:
            if self._layout is None or self._layout.name != known:
                raise ManifestUnknown(f"rank {self.adapter.rank} does not know the manifest {known}; send it")
            manifest, domains = self._layout.specs, self._layout.table
        self._checked_push = ""
        layout = self._layout
        if layout is not None and (tuple(manifest), kept, domains) != (layout.specs, self._kept, layout.table):
            layout = None
        # A rank that gets all tensors in full can load any push: it is checked before the commit.
        later = not kept and (plan := self._trusted(layout)) is not None and not plan.subset.name
        if layout is not None and (later or not self._record_if_changed(layout, push)):
            return layout
        self._layout, self._kept = None, kept
        if layout is None:
            self._complete.check(manifest, kept)
            layout = layout_of(manifest, domains)
            self._compared.clear()
            self._record(layout)
        stays = self._complete.check_recorded(self._plan, self._hooks, manifest, self._why, kept)
        unwritten = {name: bits for name, bits in self._accepted.unwritten.items() if name not in stays.parameters}
        self._accepted = structs.replace(self._accepted, unwritten=unwritten, kept=stays.digests)
        self._layout = layout
        return layout

    def expected(self) -> ExpectedReply:
        """This rank's part of the list of a complete push, see `Complete.reply`."""
        return self._complete.reply()

    def accepted(self) -> Accepted:
        """The reply to a push that was accepted."""
        return structs.replace(self._accepted, record_s=self.ready().record_s)

    def ready(self) -> Ready:
        """The reply after `prepare_load`; the seconds that recording took are reported once."""
        seconds, self._record_s = self._record_s, 0.0
        return Ready(seconds, self.standby.seconds, self.path)

    def _record(self, layout: Layout) -> None:
        start = time.perf_counter()
        self._machine.move("record")
        self._plan, self._hooks, self._pushes = None, None, 0
        self._accepted, self._filled = Accepted(), ModelStatus()
        try:
            hooks = self.adapter.loader_hooks()
            if not isinstance(hooks, LoaderHooks):
                self._why = hooks.why if isinstance(hooks, Sealed) else hooks
                self._machine.move("sealed")
                return
            with uncollected():
                self._plan = self.ahead.plan(hooks, layout, whole=not self._kept)
                self._accepted, self._filled = self._complete.left_out(self._plan)
            self._hooks = hooks
            self._machine.move("recorded")
        except Exception as error:
            self._machine.move("sealed")
            self._plan, self._loads_clones = None, True
            self._why = f"it cannot be recorded ({type(error).__name__}: {error})"
            logger.info("%s", self.path)
        finally:
            self._record_s += time.perf_counter() - start

    def _unmoved(self) -> bool:
        """Whether the model's memory is where it was when the plan was recorded, or there is no plan."""
        if self._plan is None or self._hooks is None:
            return True
        hooks, memory = self.adapter.loader_hooks(), self._plan.memory
        return isinstance(hooks, LoaderHooks) and hooks.model is memory.model and memory.is_unmoved()

    def _record_if_changed(self, layout: Layout, push: str, *, sample: bool = True, commits: bool = False) -> bool:
        """Record the loader again if the plan for this layout no longer holds; returns whether it did so.

        ``commits``: this is the check before the commit.
        """
        why = self._find_change(push, sample, commits) if self._unmoved() else "the model's memory has moved"
        if not why:
            return False
        logger.warning("rank %d: %s; its load plan is recorded again", self.adapter.rank, why)
        self._record(layout)
        return True

    def _find_change(self, push: str, sample: bool, commits: bool) -> str:
        """Why a trusted plan no longer is what the loader does; empty if no cheap check finds a difference."""
        plan, hooks, dependencies = self._plan, self._hooks, self._dependencies
        if plan is None or hooks is None or dependencies is None or not self._machine.allows("replay"):
            return ""
        start = time.perf_counter()
        found = self._samples.find_change(plan, hooks, dependencies, sample=sample, commits=commits)
        self._record_s += time.perf_counter() - start
        return "" if found is None else self._note("what the loader does", push, found)

    def _note(self, what: str, push: str, fault: str) -> str:
        self._compared[what] = Comparison(what, push, fault)
        return fault

    def prepare_load(self, staged: Staged | None, push: str = "", timeout_s: float = math.inf) -> None:
        """Prepare to load, before generation stops; record a changed loader again. Raises as `Standby.load`."""
        before, accepted = self._plan, self._accepted
        if self._layout is not None and not self.standby.loads(push):
            # Some engines call this twice for a push.
            self._record_if_changed(self._layout, push, sample=push != self._checked_push or not push, commits=True)
            self._checked_push = push
        worse = self._accepted.unwritten.keys() - accepted.unwritten.keys()
        if before is not None and before is not self._plan and not before.subset.name and not worse:
            # A tensor that one rank with a subset leaves out, another may read; this rank would need all.
            worse = set(self._plan.unread() if self._plan is not None else ()).difference(before.unread())
        if worse:
            self._layout = None  # so that all ranks check the next push in full
            raise TransferFailed(
                f"rank {self.adapter.rank}: the engine's loader has changed since the push was accepted, and does not "
                f"load {listed(worse)} any more; push again"
            )
        if staged is None:
            return
        plan = self._plan
        if plan is not None and self._hooks is not None and self._replays(staged):
            self.standby.fill(push, plan, self._hooks, staged, timeout_s)
            if not self.standby.holds(push):
                plan.bind(staged.data)
            return
        if staged.subset.name:
            raise TransferFailed(
                f"rank {self.adapter.rank} holds only what its load plan reads, which no longer fits its model; "
                "push again"
            )
        weights, check = functools.partial(self._weights, staged), functools.partial(self._check_adopted, staged)
        if plan is None:
            self.standby.load(push, staged.layout, weights, check, timeout_s)
        elif self._hooks is not None and staged.layout is plan.layout:
            self.standby.prove(push, plan, self._hooks, staged, weights, check, timeout_s)

    def _weights(self, staged: Staged) -> Iterator[tuple[str, torch.Tensor]]:
        return staged.tensors(cloned=self._loads_clones)

    def _trusted(self, layout: Layout | None) -> LoadPlan | None:
        """The load plan, if it may load a push of this layout."""
        plan = self._plan
        return plan if plan is not None and plan.layout is layout and self._machine.allows("replay") else None

    def _replays(self, staged: Staged) -> bool:
        plan = self._trusted(staged.layout)
        return plan is not None and staged.subset.name in ("", plan.subset.name)

    def subset(self, layout: Layout, bytes_per_s: float = 0.0) -> Subset:
        """What this rank needs of an accepted push: the subset that its load plan reads, once that is trusted.

        ``bytes_per_s`` is the speed at which a push arrives, if it is known.
        """
        plan = self._trusted(layout)
        if plan is not None and bytes_per_s:
            plan.fit(bytes_per_s)
        if plan is None or (plan.subset.name and not self._unmoved()):
            return Subset(layout, {})  # the engine's loader may have to load it
        return plan.subset

    def arriving(self, layout: Layout, push: str, bucket_bytes: int) -> Arriving | None:
        """See `Standby.arriving`, for a push that was accepted."""
        plan = self._trusted(layout)
        return None if plan is None else self.standby.arriving(push, plan, bucket_bytes)

    def load(self, staged: Staged, push: str = "") -> None:
        """Load a version. Raises whatever the engine raises, and as `Staged.check`."""
        if self.standby.holds(push) and self.standby.is_current():
            try:
                self.standby.exchange()
            finally:
                self._follow()
            if self._plan is None:
                return
            if why := self._compare(self._plan, staged):
                staged.check()
            elif not self._machine.allows("replay"):
                return self._trust(self._plan, staged)
            return self._replayed(staged, why)
        self.standby.pass_by(staged.layout)
        self._load(staged)
        # On the reply the sender may write to its memory again: nothing may still be reading it.
        arenas.synchronize(self.adapter.device)
        staged.check()

    def go_back(self, rollback: str) -> None:
        """See `Standby.go_back`."""
        try:
            self.standby.go_back(rollback)
        finally:
            self._follow()

    def undo(self, push: str) -> bool:
        """See `Standby.undo`."""
        try:
            return self.standby.undo(push)
        finally:
            self._follow()

    def _follow(self) -> None:
        """Weights may have been exchanged: the plan is that for where they lie."""
        self._plan = self.standby.plan(self._plan)

    def _load(self, staged: Staged) -> None:
        plan = self._plan
        if plan is None or not self._replays(staged):
            if staged.subset.name:
                raise WrongState(f"rank {self.adapter.rank} holds only parts of a version, and no load plan for them")
            self._load_by_engine(staged)
            if plan is not None and staged.layout is plan.layout and self._machine.allows("matched"):
                self._check(plan, staged)
            return
        self._replayed(staged, self._replay(plan, staged))

    def _replayed(self, staged: Staged, why: str) -> None:
        """The plan was replayed; ``why`` says why the model does not hold the push: then the loader loads it."""
        self._note("what is in the model", staged.push, why)
        if not why:
            self._machine.move("replay")
            self._pushes += 1
            return
        self._drop(why)
        self.standby.release()
        self.standby.pass_by(staged.layout)
        if staged.subset.name:
            rank = self.adapter.rank
            raise WrongState(f"rank {rank} holds only parts of a version, and its load plan no longer holds: {why}")
        self._load_by_engine(staged)

    def _replay(self, plan: LoadPlan, staged: Staged) -> str:
        """Replay the plan; returns why the model does not hold the push, empty if a sample of it does."""
        assert self._hooks is not None
        with self._hooks.around():
            # The steps around a load may have moved memory since the check.
            if not (moved := not plan.memory.is_unmoved()):
                plan.replay(staged.data)
                if plan.loader:
                    self._hooks.load([pair for pair in staged.tensors() if pair[0] in plan.loader])
        return _MOVES if moved else self._compare(plan, staged)

    def _compare(self, plan: LoadPlan, staged: Staged) -> str:
        if not plan.memory.is_unmoved():
            return _MOVES
        arenas.synchronize(self.adapter.device)
        name = plan.strays(staged.data)
        return f"{name} is not what was copied to it: it is processed after loading" if name else ""

    def _load_by_engine(self, staged: Staged) -> None:
        """Load with the engine's loader. Raises what that raises, or `WrongState` if a parameter lies in the stage."""
        with self.standby.together.loads(staged.push):
            self.adapter.load(self._weights(staged))
        if not isinstance(hooks := self.adapter.loader_hooks(), str):
            self._check_adopted(staged, hooks.model)

    def _check_adopted(self, staged: Staged, model: torch.nn.Module) -> None:
        if taken := inside(model, spans(staged.data)):
            self._loads_clones = True
            raise WrongState(
                f"the engine's loader did not copy {taken} but kept the tensor that it was given, which lies in memory "
                "that the next push overwrites; from the next push on it gets clones: push again"
            )

    def _check(self, plan: LoadPlan, staged: Staged) -> None:
        """After the engine's loader has loaded a version: trust the plan if every weight is where it would put it."""
        if not self._unmoved():
            self._trust(plan, staged, "it moves the parameters with every load")
        elif name := plan.differs(staged.data):
            self._trust(plan, staged, f"{name} is not what was recorded: it is processed after loading")
        else:
            self._trust(plan, staged)

    def _trust(self, plan: LoadPlan, staged: Staged, why: str = "") -> None:
        """Trust the plan, unless there is a reason ``why`` not."""
        if not why:
            try:
                self._dependencies = Dependencies(plan.memory.model, self._loads)
            except Exception as error:  # the weights are right, but the plan cannot be checked later
                why = f"what it depends on cannot be determined ({type(error).__name__}: {error})"
        self._note("what the engine loaded", staged.push, why)
        if why:
            self._drop(why)
        else:
            plan.bind(staged.data)
            self._samples = Samples()
            self._machine.move("matched")
        logger.info("rank %d loads through %s", self.adapter.rank, self.path)

    def _loads(self, tensor: torch.Tensor) -> bool:
        return self._plan is not None and self._plan.loads(tensor)

    def _drop(self, why: str) -> None:
        self._machine.move("differed")
        self._plan, self._hooks, self._why = None, None, why

    def keep(self, stages: Iterable[Stream]) -> None:
        """Drop references to any other stage than these."""
        stages = list(stages)
        if (plan := self._plan) is not None:
            plan.keep(stages)
        self.standby.keep(stages)
