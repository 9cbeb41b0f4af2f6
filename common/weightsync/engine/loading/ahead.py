"""What the first push of a rank needs, made before it: the recording of the loader, and the standby."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator

import numpy
import torch

from weightsync.engine.adapter import Adapter, LoaderHooks, Movable
from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.slices import Sliced, Unfinished
from weightsync.engine.loading.complete import Complete
from weightsync.engine.loading.fake_tensor import Unrecordable
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.planned import Planned
from weightsync.engine.loading.sliced_recording import SlicedRecording
from weightsync.engine.loading.standby import Standby
from weightsync.engine.loading.works import Made, provided
from weightsync.protocol.expected import StandbyRequest
from weightsync.tensors.layout import Entry, Layout

logger = logging.getLogger(__name__)


class Ahead:
    """``plan()`` is the load plan of the pushes so far, if there is one. All methods belong to the engine's loop."""

    def __init__(self, adapter: Adapter, complete: Complete, standby: Standby, plan: Callable[[], LoadPlan | None]):
        self._adapter, self._complete, self._standby, self._plan = adapter, complete, standby, plan
        #: The request that is being handled, and what the first push is likely to have.
        self._name, self._layout = "", Layout(())
        self._recorded: LoadPlan | None = None
        self._recording: SlicedRecording[LoadPlan] | None = None
        #: A model, by a weak reference, whose plan could not fill a standby that its own loader can; and why.
        self._unfit: tuple[weakref.ref[torch.nn.Module], str] | None = None
        self.longest_call = ""
        """As `Standby.longest_call`, of the recording."""

    def make(self, asked: StandbyRequest) -> None:
        """Record the loader, and make the standby, for the time of a slice. Raises `standby.Unfinished`.

        What is not made here, the first push makes.
        """
        hooks, plan = self._adapter.loader_hooks(), self._plan()
        if isinstance(hooks, str):
            return
        if asked.name != self._name:
            self.stop()
            self._name, self._layout, self._recorded = asked.name, Layout(self._complete.likely()), None
            if isinstance(hooks, LoaderHooks) and plan is None and self._layout.specs:
                self._recording = self._recorder(hooks, self._layout)
        if self._recording is not None:
            self._record(self._recording)
        plan = plan or self._recorded
        if isinstance(hooks, LoaderHooks) and plan is not None:
            self._make_memory(asked, plan, hooks)
        elif self._layout.specs:
            self._make_model(asked)

    def _make_memory(self, asked: StandbyRequest, plan: LoadPlan, hooks: LoaderHooks) -> None:
        def begin(made: Planned | None, rules: Rules) -> Sliced[Made]:
            return provided(plan, rules, made)

        self._standby.make(asked.name, lambda: self._standby.begin_to_fill(plan, hooks, begin), asked.timeout_s)

    def _make_model(self, asked: StandbyRequest) -> None:
        device, layout = self._adapter.device, self._layout

        def zeros() -> Iterator[tuple[str, torch.Tensor]]:
            for entry in layout.entries:
                yield entry.spec.name, _zeros(entry, device)

        def begin() -> str | None:
            return self._standby.begin_to_load(asked.name, layout, zeros, lambda model: None)

        self._standby.make(asked.name, begin, asked.timeout_s)

    def _recorder(self, hooks: LoaderHooks, layout: Layout) -> SlicedRecording[LoadPlan]:
        device = self._adapter.device
        return SlicedRecording(hooks.model, lambda memory: LoadPlan(hooks, layout, device, memory))

    def _record(self, recording: SlicedRecording[LoadPlan]) -> None:
        try:
            plan = recording.result(self._adapter.rank)
            self._check(plan)
            self._recorded = plan
        except Unfinished:
            raise
        except Exception as error:
            logger.info("the loader cannot be recorded before the first push: %s", error)
        self._recording, self.longest_call = None, recording.stood_still

    def stop(self) -> None:
        """Stop to record, as `Standby.stop`."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def plan(self, hooks: LoaderHooks, layout: Layout, *, whole: bool) -> LoadPlan:
        """The plan for a push: as recorded before, if that has the same tensors, or now.

        Raises as `LoadPlan`, and `Unrecordable` for one of a ``whole`` push that cannot fill a standby where the
        engine's loader can; what a push leaves out says nothing about the model.
        """
        self.stop()
        if whole and self._unfit is not None and self._unfit[0]() is hooks.model:
            raise Unrecordable(self._unfit[1])
        found, self._recorded = self._recorded, None
        holds = found is not None and found.memory.model is hooks.model and found.memory.is_unmoved()
        if found is None or not holds or set(found.layout.specs) != set(layout.specs):
            plan = LoadPlan(hooks, layout, self._adapter.device)
            if whole:
                self._check(plan)
            return plan
        plan = found.relaid(layout)
        self._standby.follow(plan)
        return plan

    def _check(self, plan: LoadPlan) -> None:
        """Raise `Unrecordable` for a plan that cannot fill a standby of movable weights where the engine's loader can:
        by that, weights are loaded before the pause."""
        hooks = self._adapter.loader_hooks()
        if not isinstance(hooks, LoaderHooks) or not isinstance(hooks.movable, Movable):
            return
        try:
            plan.written()
        except Unrecordable as error:
            if not isinstance(hooks.standby(), str):
                self._unfit = weakref.ref(hooks.model), str(error)
                raise


def _zeros(entry: Entry, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or not entry.nbytes:
        return torch.zeros(entry.spec.shape, dtype=entry.dtype, device=device)
    # Memory that nobody writes to takes neither time nor place: 300 MB of zeros from torch take 0.3 s.
    found = numpy.zeros(entry.nbytes, dtype=numpy.uint8)
    return torch.from_numpy(found).view(entry.dtype).view(entry.spec.shape)
