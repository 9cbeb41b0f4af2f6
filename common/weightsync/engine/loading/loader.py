"""How one rank loads: what a complete push is, and whether its load plan or the engine's own loader brings it in.

A plan is compared all along, outside of the pause: at prepare and before each commit with the model's addresses, the
simple values of its modules and the environment, and with what the loader does to a few tensors, others each time. What
differs is recorded anew, and that push goes through the loader. After a replay 4 MiB of the live parameters are
compared with the stage; where they differ the loader brings the push in, and the plan is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
from msgspec import structs

from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, Sealed
from weightsync.engine.coverage import packed, passed_over
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.loader_dependencies import Dependencies
from weightsync.engine.loading.model_memory import inside
from weightsync.engine.loading.recording import record, uncollected
from weightsync.engine.stage import Staged
from weightsync.errors import ManifestMismatch, ManifestUnknown, TransferFailed, WrongState
from weightsync.memory import arenas
from weightsync.protocol.http import Accepted, Ready, TensorSpec
from weightsync.protocol.model_status import Comparison, ModelStatus
from weightsync.protocol.states import PLAN, Machine, PlanState
from weightsync.tensors.layout import Layout, check_manifest, listed, named
from weightsync.tensors.scattered import Stream, spans
from weightsync.tensors.subset import Subset

logger = logging.getLogger(__name__)

_OWN: Final = "the engine's own loader"
#: What a sample may cost in every look, in seconds of this thread; one that takes n times as long is made in every n-th
#: look, and at the latest after so many.
_SAMPLE_S: Final = 0.05
_RESTS: Final = 16


class Loading:
    """One rank's ways to load. Methods are called from the engine's loop; only `keep` may come from elsewhere.

    A plan is recorded for the manifest of a push, before anything of it is accepted. The engine's loader brings in the
    first push; the plan is trusted once all that it would have copied is found where it would have put it. Before it
    is used again what the loader depends on is looked at, and a part of the tensors is recorded again; afterwards, a
    part of the model is compared with what was pushed. A plan that is not right any more is dropped. `states.PLAN` says
    what may follow what.
    """

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._expected: Expected | ManifestMismatch | None = None
        self._hooks: LoaderHooks | None = None
        self._manifest: Sequence[TensorSpec] = ()
        self._layout: Layout | None = None
        self._plan: LoadPlan | None = None
        self._dependencies: Dependencies | None = None
        self._machine: Machine[PlanState] = Machine(PLAN, "unrecorded", f"the load plan of rank {adapter.rank}")
        self._why = ""
        #: The loader was seen to keep tensors, or cannot be seen through: what it gets is its own.
        self._gives_away = False
        #: What the last manifest fills and leaves out, and how long the engine stood still to find out.
        self._accepted, self._filled = Accepted(), ModelStatus()
        self._record_s = 0.0
        #: Pushes that the plan has loaded, and by what was compared, the last comparison.
        self._pushes = 0
        self._looked = ""
        #: So many looks are still to do without a sample.
        self._rest = 0
        self._compared: dict[str, Comparison] = {}

    @property
    def path(self) -> str:
        """For `http.RankStatus.loading`; empty before the first push."""
        if self._plan is None:
            return f"{_OWN}: {self._why}" if self._why else ""
        if not self._machine.allows("replay"):
            return f"{_OWN}: the load plan is checked by the first push that commits"
        rest = [f"{name} ({why})" for name, why in self._plan.fallen.items()]
        rest += [] if self._plan.fallen else sorted(self._plan.loader)
        parts = self._plan.parts
        share = f", reads {100 * parts.nbytes / parts.layout.payload_bytes:.0f} % of a push" if parts.name else ""
        return f"load plan, {len(self._plan.copies)} copies{share}" + (f"; {_OWN} for {listed(rest)}" if rest else "")

    def status(self) -> ModelStatus | None:
        """What the manifest that was accepted last fills, and what was compared; None before there is one."""
        if self._layout is None:
            return None
        return structs.replace(self._filled, pushes=self._pushes, compared=tuple(self._compared.values()))

    # --- what is complete

    def accept(self, manifest: Sequence[TensorSpec], known: str = "", push: str = "") -> Layout:
        """The layout of a push that is complete. Raises `ManifestMismatch` by name for one that is not.

        What is complete says the checkpoint that the engine was started with; whether its loader passes over some of
        it, the front end can tell from `accepted` of all ranks. Where nothing tells what that is, every parameter must
        be loaded as a whole, and no tensor may be left unread by all ranks. An empty manifest is that of the push
        before, if its layout has the name ``known``; else `ManifestUnknown` is raised.
        """
        if known and not manifest:
            if self._layout is None or self._layout.name != known:
                raise ManifestUnknown(f"rank {self._adapter.rank} knows no manifest {known}; send it")
            manifest = self._manifest
        layout = self._layout if manifest == self._manifest else None
        if layout is not None and not self._revised(layout, push, sample=True):
            return layout
        expected = self._known()
        self._layout = None
        if layout is None:
            check_manifest(manifest, *(expected if isinstance(expected, Expected) else (manifest,)))
            layout = Layout(manifest)
            self._compared.clear()
            self._record(layout)
        if isinstance(expected, Expected):
            self._check_optional(expected, manifest)
        else:
            self._check_coverage(expected)
        self._manifest, self._layout = manifest, layout
        return layout

    def accepted(self) -> Accepted:
        """What to answer to a push that was accepted."""
        found = self._accepted
        return Accepted(found.unread, found.skipped, found.unwritten, self.ready().record_s)

    def ready(self) -> Ready:
        """What to answer once it was looked up; what recording took is told once."""
        seconds, self._record_s = self._record_s, 0.0
        return Ready(seconds)

    def _known(self) -> Expected | ManifestMismatch:
        if self._expected is None:
            try:
                self._expected = self._adapter.expected()
            except ManifestMismatch as error:
                self._expected = error
        return self._expected

    def _record(self, layout: Layout) -> None:
        start = time.perf_counter()
        self._machine.move("record")
        self._plan, self._hooks, self._pushes = None, None, 0
        self._accepted, self._filled = Accepted(), ModelStatus()
        try:
            hooks = self._adapter.loader_hooks()
            if not isinstance(hooks, LoaderHooks):
                self._why = hooks.why if isinstance(hooks, Sealed) else hooks
                self._machine.move("sealed")
                return
            with uncollected():
                self._plan = LoadPlan(hooks, layout, self._adapter.device)
                self._accepted = self._left_out(self._plan)
            self._hooks = hooks
            self._machine.move("recorded")
        except Exception as error:
            self._machine.move("sealed")
            self._plan, self._gives_away = None, True
            self._why = f"it cannot be recorded ({type(error).__name__}: {error})"
            logger.info("%s", self.path)
        finally:
            self._record_s += time.perf_counter() - start

    def _left_out(self, plan: LoadPlan) -> Accepted:
        unread, unwritten = plan.unread(), plan.unwritten()
        parameters = {owner.name for owner in plan.memory.owners if owner.parameter}
        self._filled = ModelStatus(
            parameters=len(parameters),
            written=len(parameters.difference(unwritten)),
            unwritten=named(unwritten),
            unread_tensors=len(unread),
            unread=named(unread),
        )
        if not isinstance(self._known(), Expected):
            return Accepted(tuple(unread))
        names, specs = set(unread), plan.layout.specs
        skipped = packed(number for number, spec in enumerate(specs) if spec.name in names)
        return Accepted((), skipped, passed_over(specs, names, plan.unfilled()) if unread else {})

    def _check_coverage(self, unknown: ManifestMismatch) -> None:
        if self._plan is None:
            raise ManifestMismatch(f"{unknown}; nor does recording the engine's loader tell: {self._why}")
        if unwritten := self._plan.unwritten():
            raise ManifestMismatch(
                f"the push does not fit the engine's model: nothing that was sent is loaded into {listed(unwritten)}; "
                "send the whole checkpoint, or start the engine from a folder that holds one, which then says what is "
                "whole"
            )

    def _check_optional(self, expected: Expected, manifest: Sequence[TensorSpec]) -> None:
        """A tied tensor may be left out only where the engine gets its weights from the other one."""
        if self._plan is None or self._hooks is None or len(manifest) == len(expected.specs):
            return
        try:
            whole = record(self._hooks, expected.specs, self._adapter.device, self._plan.memory)
        except Exception as error:
            logger.info("what the engine's loader does with the whole checkpoint cannot be recorded: %s", error)
            return
        if lost := self._plan.lost(whole):
            left_out = {spec.name for spec in expected.specs} - {spec.name for spec in manifest}
            raise ManifestMismatch(
                f"the push does not fit the engine's model: without {listed(left_out)} nothing is loaded into "
                f"{listed(lost)}; send them too"
            )

    # --- whether what was recorded still holds

    def _unmoved(self) -> bool:
        """Whether the plan's memory is still the model's, or that there is no plan."""
        if self._plan is None or self._hooks is None:
            return True
        hooks = self._adapter.loader_hooks()
        return (
            isinstance(hooks, LoaderHooks) and hooks.model is self._plan.memory.model and self._plan.memory.is_unmoved()
        )

    def _revised(self, layout: Layout, push: str, *, sample: bool) -> bool:
        """Whether the plan for this layout did not hold any more, and was made anew."""
        if not self._unmoved():
            why = "the model's memory has moved"
        elif not (why := self._strayed(push, sample)):
            return False
        logger.warning("rank %d: %s; its load plan is recorded again", self._adapter.rank, why)
        self._record(layout)
        return True

    def _strayed(self, push: str, sample: bool) -> str:
        """Why a trusted plan is not what the loader does; empty if it is, as far as a cheap look can tell."""
        plan, hooks, dependencies = self._plan, self._hooks, self._dependencies
        if plan is None or hooks is None or dependencies is None or not self._machine.allows("replay"):
            return ""
        start, changed = time.perf_counter(), []
        try:
            changed = dependencies.changed()
            sample = sample and self._is_due()
            if not (changed or sample):
                return ""
            with uncollected():
                found = self._sampled(plan, hooks) if sample and not changed else "some"
                # A loader may do with a few tensors what it does not do with all: only all of them decide.
                found = found and plan.redone(hooks, share=False)
            if changed and not found:
                dependencies.was_harmless(changed)
        except Exception as error:
            found = f"all ({type(error).__name__}: {error})"
        finally:
            self._record_s += time.perf_counter() - start
        why = f"{listed(changed)} changed, and " if changed else ""
        fault = f"{why}the loader does not do what was recorded with {found}" if found else ""
        self._note("what the loader does", push, fault)
        return fault

    def _is_due(self) -> bool:
        self._rest -= 1
        return self._rest < 0

    def _sampled(self, plan: LoadPlan, hooks: LoaderHooks) -> str:
        """As `LoadPlan.redone` of some tensors; where that costs much, the next looks do without."""
        start = time.thread_time()
        found = plan.redone(hooks, share=True)
        self._rest = min(_RESTS, int((time.thread_time() - start) / _SAMPLE_S))
        return found

    def _note(self, what: str, push: str, fault: str) -> None:
        self._compared[what] = Comparison(what, push, fault)

    def look_up(self, staged: Staged | None, push: str = "") -> None:
        """Before generation stops to load this: get ready; what does not hold any more is recorded again."""
        lacked = self._accepted.unwritten.keys()
        if self._layout is not None:
            # Some engines ask once more when they are about to stop.
            self._revised(self._layout, push, sample=push != self._looked or not push)
            self._looked = push
        if worse := self._accepted.unwritten.keys() - lacked:
            self._layout = None  # so that the next push is compared anew, by all ranks
            raise TransferFailed(
                f"rank {self._adapter.rank}: the engine's loader has changed since the push was accepted, and does not "
                f"load {listed(worse)} any more; push again"
            )
        if staged is None:
            return
        if self._plan is not None and self._replays(staged):
            self._plan.bind(staged.data)
        elif staged.parts.name:
            raise TransferFailed(
                f"rank {self._adapter.rank} holds the parts that it read by a load plan which no longer fits its "
                "model; push again"
            )

    def _replays(self, staged: Staged) -> bool:
        plan = self._plan
        if plan is None or not self._machine.allows("replay") or staged.layout is not plan.layout:
            return False
        return staged.parts.name in ("", plan.parts.name)

    def parts(self, layout: Layout) -> Subset:
        """What this rank needs of a push that was accepted: what its load plan reads, once that is trusted."""
        plan = self._plan
        if plan is None or not self._machine.allows("replay") or plan.layout is not layout:
            return Subset(layout, {})  # it may be the engine's loader that brings it in
        return plan.parts if not plan.parts.name or self._unmoved() else Subset(layout, {})

    # --- loading

    def load(self, staged: Staged) -> None:
        """Load a whole version. Raises whatever the engine raises, and as `Staged.check`."""
        self._load(staged)
        # The sender takes its memory back on the reply: nothing may still be reading it.
        arenas.synchronize(self._adapter.device)
        staged.check()

    def _load(self, staged: Staged) -> None:
        plan = self._plan
        if plan is None or not self._replays(staged):
            if staged.parts.name:
                raise WrongState(f"rank {self._adapter.rank} holds parts that no load plan is for")
            self._load_by_engine(staged)
            if plan is not None and staged.layout is plan.layout and self._machine.allows("alike"):
                self._check(plan, staged)
            return
        why = self._replay(plan, staged)
        self._note("what is in the model", staged.push, why)
        if not why:
            self._machine.move("replay")
            self._pushes += 1
            return
        self._drop(why)
        if staged.parts.name:
            raise WrongState(f"rank {self._adapter.rank} holds parts that no load plan is for any more: {why}")
        self._load_by_engine(staged)

    def _replay(self, plan: LoadPlan, staged: Staged) -> str:
        """Why what was pushed is not in the model after all; empty if it is, as far as it was looked at."""
        assert self._hooks is not None
        with self._hooks.around():
            # What is done around a load may bring back other memory than was there when it was looked at.
            moved = not plan.memory.is_unmoved()
            if not moved:
                plan.replay(staged.data)
                if plan.loader:
                    self._hooks.load([pair for pair in staged.tensors() if pair[0] in plan.loader])
        if moved or not plan.memory.is_unmoved():
            return "its memory moves while it is loaded"
        arenas.synchronize(self._adapter.device)
        name = plan.strays(staged.data)
        return f"{name} is not what was copied to it: it is worked on after loading" if name else ""

    def _load_by_engine(self, staged: Staged) -> None:
        """Through the engine's own path. Raises what that does, or `WrongState` if the model would be the sender's."""
        tensors = staged.tensors()
        self._adapter.load(_given_away(tensors) if self._gives_away else tensors)
        hooks = self._adapter.loader_hooks()
        taken = inside(hooks.model, spans(staged.data)) if isinstance(hooks, (LoaderHooks, Sealed)) else ""
        if taken:
            self._gives_away = True
            raise WrongState(
                f"the engine's loader did not copy {taken} but kept the tensor that it was given, which lies in memory "
                "of the sender or of the next push; with the next push it gets memory of its own: push again"
            )

    def _check(self, plan: LoadPlan, staged: Staged) -> None:
        """The engine has loaded what the plan would have: trust the plan if the weights lie where it puts them."""
        why = ""
        if not self._unmoved():
            why = "it lays the parameters out anew with every load"
        elif name := plan.differs(staged.data):
            why = f"what it makes of {name} is not what was recorded: it is worked on after loading"
        else:
            try:
                self._dependencies = Dependencies(plan.memory.model, plan.loads)
            except Exception as error:  # the weights are right, and it is only the plan that nothing can be told of
                why = f"what it depends on cannot be told ({type(error).__name__}: {error})"
        self._note("what the engine loaded", staged.push, why)
        if why:
            self._drop(why)
        else:
            plan.bind(staged.data)
            self._rest = 0
            self._machine.move("alike")
        logger.info("rank %d loads through %s", self._adapter.rank, self.path)

    def _drop(self, why: str) -> None:
        self._machine.move("astray")
        self._plan, self._hooks, self._why = None, None, why

    def keep(self, stages: Iterable[Stream]) -> None:
        """Let go of all memory but these stages."""
        if (plan := self._plan) is not None:
            plan.keep(stages)


def _given_away(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each in memory of its own, made when it is asked for."""
    return ((name, tensor.clone()) for name, tensor in tensors)
