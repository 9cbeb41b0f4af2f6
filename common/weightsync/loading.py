"""How one rank loads: what a complete push is, and whether its load plan or the engine's own loader brings it in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from weightsync import staging
from weightsync.errors import ManifestMismatch, ManifestUnknown, TransferFailed, WrongState
from weightsync.layout import Layout, check_manifest, listed
from weightsync.load_plan import LoadPlan
from weightsync.parts import Parts
from weightsync.recording import record
from weightsync.scattered import Stream
from weightsync.sink import Expected, Opened, Sink
from weightsync.stage import Staged
from weightsync.wire import TensorSpec

logger = logging.getLogger(__name__)

_OWN: Final = "the engine's own loader"


class Loading:
    """One rank's ways to load. Methods are called from the engine's loop; only `keep` may come from elsewhere.

    A plan is recorded for the manifest of a push, before anything of it is accepted. The engine's loader brings in the
    first push; the plan is trusted once all that it would have copied is found where it would have put it.
    """

    def __init__(self, sink: Sink):
        self._sink = sink
        self._expected: Expected | ManifestMismatch | None = None
        self._opened: Opened | None = None
        self._manifest: Sequence[TensorSpec] | None = None
        self._layout: Layout | None = None
        self._plan: LoadPlan | None = None
        self._trusted = False
        self._why = ""
        #: Names in the manifest that this rank reads nothing of, where no checkpoint says that they are right.
        self.unread: tuple[str, ...] = ()

    @property
    def way(self) -> str:
        """For `wire.RankStatus.loading`; empty before the first push."""
        if self._plan is None:
            return f"{_OWN}: {self._why}" if self._why else ""
        if not self._trusted:
            return f"{_OWN}: the load plan is checked by the first push that commits"
        rest = [f"{name} ({why})" for name, why in self._plan.fallen.items()]
        rest += [] if self._plan.fallen else sorted(self._plan.loader)
        parts = self._plan.parts
        share = f", reads {100 * parts.nbytes / parts.layout.payload_bytes:.0f} % of a push" if parts.name else ""
        return f"load plan, {len(self._plan.copies)} copies{share}" + (f"; {_OWN} for {listed(rest)}" if rest else "")

    def accept(self, manifest: Sequence[TensorSpec], known: str = "") -> Layout:
        """The layout of a push that is complete. Raises `ManifestMismatch` by name for one that is not.

        What is complete says the checkpoint that the engine was started with. Where nothing tells what that is, every
        parameter must be loaded as a whole, and no tensor may be left `unread` by all ranks. An empty manifest is that
        of the push before, if its layout has the name ``known``; else `ManifestUnknown` is raised.
        """
        if known and not manifest:
            if self._layout is None or self._layout.name != known:
                raise ManifestUnknown(f"rank {self._sink.rank} knows no manifest {known}; send it")
            return self._layout
        if self._layout is not None and manifest == self._manifest:
            return self._layout
        expected = self._known()
        if isinstance(expected, Expected):
            check_manifest(manifest, expected.specs, expected.optional)
        else:
            check_manifest(manifest, manifest)  # that nothing is sent twice
        layout, self._layout, self.unread = Layout(manifest), None, ()
        self._record(layout)
        if isinstance(expected, Expected):
            self._check_optional(expected, manifest)
        else:
            self._check_coverage(expected)
        self._manifest, self._layout = manifest, layout
        return layout

    def _known(self) -> Expected | ManifestMismatch:
        if self._expected is None:
            try:
                self._expected = self._sink.expected()
            except ManifestMismatch as error:
                self._expected = error
        return self._expected

    def _record(self, layout: Layout) -> None:
        self._plan, self._trusted, self._opened = None, False, None
        try:
            opened = self._sink.opened()
            if isinstance(opened, str):
                self._why = opened
                return
            self._plan = LoadPlan(opened, layout, self._sink.device)
            self._opened = opened
        except Exception as error:
            self._why = f"it cannot be recorded ({type(error).__name__}: {error})"
            logger.info("%s", self.way)

    def _check_coverage(self, unknown: ManifestMismatch) -> None:
        if self._plan is None:
            raise ManifestMismatch(f"{unknown}; nor does recording the engine's loader tell: {self._why}")
        if unwritten := self._plan.unwritten():
            raise ManifestMismatch(
                f"the push does not fit the engine's model: nothing that was sent is loaded into {listed(unwritten)}; "
                "send the whole checkpoint, or start the engine from a folder that holds one, which then says what is "
                "whole"
            )
        self.unread = tuple(self._plan.unread())

    def _check_optional(self, expected: Expected, manifest: Sequence[TensorSpec]) -> None:
        """A tied tensor may be left out only where the engine gets its weights from the other one."""
        if self._plan is None or self._opened is None or len(manifest) == len(expected.specs):
            return
        try:
            lost = self._plan.lost(record(self._opened, expected.specs, self._sink.device))
        except Exception as error:
            logger.info("what the engine's loader does with the whole checkpoint cannot be recorded: %s", error)
            return
        if lost:
            left_out = {spec.name for spec in expected.specs} - {spec.name for spec in manifest}
            raise ManifestMismatch(
                f"the push does not fit the engine's model: without {listed(left_out)} nothing is loaded into "
                f"{listed(lost)}; send them too"
            )

    def _unmoved(self) -> bool:
        """Whether what was recorded still holds, or that there was nothing to record."""
        if self._plan is None or self._opened is None:
            return True
        opened = self._sink.opened()
        return isinstance(opened, Opened) and opened.model is self._plan.memory.model and self._plan.memory.is_unmoved()

    def look_up(self, staged: Staged | None) -> None:
        """Before generation stops to load this: get ready; if the model's memory has moved, record again."""
        if self._layout is not None and not self._unmoved():
            logger.warning("rank %d: the model's memory has moved; its load plan is recorded again", self._sink.rank)
            self._record(self._layout)
        if staged is None:
            return
        if self._plan is not None and self._replays(staged):
            self._plan.bind(staged.data)
        elif staged.parts.name:
            raise TransferFailed(
                f"rank {self._sink.rank} holds the parts that it read by a load plan which no longer fits its model; "
                "push again"
            )

    def _replays(self, staged: Staged) -> bool:
        plan = self._plan
        if plan is None or not self._trusted or staged.layout is not plan.layout:
            return False
        return staged.parts.name in ("", plan.parts.name)

    def parts(self, layout: Layout) -> Parts:
        """What this rank needs of a push that was accepted: what its load plan reads, once that is trusted."""
        plan = self._plan
        if plan is None or not self._trusted or plan.layout is not layout:
            return Parts(layout, {})  # it may be the engine's loader that brings it in
        return plan.parts if not plan.parts.name or self._unmoved() else Parts(layout, {})

    def load(self, staged: Staged) -> None:
        """Load a whole version. Raises whatever the engine raises, and as `Staged.check`."""
        self._load(staged)
        # The sender takes its memory back on the reply: nothing may still be reading it.
        staging.synchronize(self._sink.device)
        staged.check()

    def _load(self, staged: Staged) -> None:
        plan = self._plan
        if staged.parts.name and not self._replays(staged):
            raise WrongState(f"rank {self._sink.rank} holds parts that no load plan is for")
        if plan is None or staged.layout is not plan.layout:
            self._sink.load(staged.tensors())
        elif not self._trusted:
            self._sink.load(staged.tensors())
            self._check(plan, staged)
        else:
            assert self._opened is not None
            with self._opened.around():
                plan.replay(staged.data)
                if plan.loader:
                    self._opened.load([pair for pair in staged.tensors() if pair[0] in plan.loader])

    def _check(self, plan: LoadPlan, staged: Staged) -> None:
        """The engine has loaded what the plan would have: trust the plan if the weights lie where it puts them."""
        why = ""
        if not self._unmoved():
            why = "it lays the parameters out anew with every load"
        elif name := plan.differs(staged.data):
            why = f"what it makes of {name} is not what was recorded: it is worked on after loading"
        if why:
            self._plan, self._opened, self._why = None, None, why
        else:
            plan.bind(staged.data)
            self._trusted = True
        logger.info("rank %d loads through %s", self._sink.rank, self.way)

    def keep(self, stages: Iterable[Stream]) -> None:
        """Let go of all memory but these stages."""
        if (plan := self._plan) is not None:
            plan.keep(stages)
