"""LoRA adapters of one rank: as `loading`, for what is pushed with ``lora=``.

An adapter is made of the staged tensors before the commit, by the thread that receives them, and holds copies. So the
pause only exchanges it for the one before, the weights and whatever loads them are left alone, and the stage is free
for the next push. It keeps its number, so that requests in flight go on with the new one as the pause mode says.
"""

from __future__ import annotations

import functools
import logging

from msgspec import UNSET

from weightsync.engine.adapter import Adapter, LoraHooks
from weightsync.engine.job import Job
from weightsync.engine.stage import Stages
from weightsync.errors import ApplyFailed
from weightsync.memory import arenas
from weightsync.protocol.http import State, UpdateRequest
from weightsync.protocol.lora import LoraSpec
from weightsync.protocol.rank_replies import Accepted
from weightsync.protocol.states import Machine
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import EngineEnd, Incoming

logger = logging.getLogger(__name__)


class LoraLoading:
    """The pushed adapters of one rank. `receive` is called by the receiving thread, all else by the engine's loop."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        #: Apart from those of the weights, which may hold a version that is kept.
        self.stages = Stages(adapter.rank, adapter.device)
        self._layout = Layout(())
        self._unread: tuple[str, ...] = ()
        #: The last push whose commit began, the number of its adapter, and the one before.
        self._before: tuple[str, int, object | None] = ("", 0, None)

    @functools.cached_property
    def _hooks(self) -> LoraHooks:
        return self._adapter.lora_hooks()

    def job(self, request: UpdateRequest, end: EngineEnd) -> Job:
        """A push of an adapter that the engine can serve. Raises `ManifestMismatch` or `UnsupportedOption`."""
        self._unread = self._hooks.check(spec_of(request), request.manifest)
        if request.manifest != self._layout.specs:
            self._layout = Layout(request.manifest)
        return Job(request, end, Subset(self._layout, {}), None)

    def accepted(self) -> Accepted:
        """The reply to a push that was accepted."""
        return Accepted(unread=self._unread)

    def receive(self, incoming: Incoming, job: Job) -> float:
        """Receive and verify an adapter, and make it; return the seconds that verifying took. Raises as `Stages.fill`,
        and what the engine raises for tensors that do not fit."""
        staged, verify_s = self.stages.fill(incoming, job.request, job.subset, None)
        job.made = self._hooks.make(spec_of(job.request), staged.tensors())
        return verify_s

    def serve(self, job: Job, machine: Machine[State]) -> None:
        """Have the engine use the adapter of a push. Raises `ApplyFailed`; ``weights`` says what is served then."""
        number, rank = spec_of(job.request).number, self._adapter.rank
        self._before = job.request.push, number, self._hooks.served(number)
        try:
            # An engine step launched before the pause may still be reading the adapter before.
            arenas.synchronize(self._adapter.device)
            self._hooks.serve(number, job.made)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            if self._undo(job.request.push):
                machine.move("untouched")
                raise ApplyFailed(f"rank {rank} serves the adapter before again: {failed}") from error
            machine.move("broken")
            raise ApplyFailed(f"rank {rank} failed while loading an adapter: {failed}", weights="dirty") from error

    def restore(self, push: str, machine: Machine[State]) -> None:
        """Serve the adapter before ``push``, which failed on another rank, or none if there was none.

        Raises `ApplyFailed` if that fails too.
        """
        machine.check("rollback")
        if not self._undo(push):
            raise ApplyFailed(f"rank {self._adapter.rank} cannot serve the adapter before", weights="dirty")
        machine.move("rollback")
        machine.move("applied")

    def _undo(self, push: str) -> bool:
        last, number, before = self._before
        if last != push:
            return True  # it was not begun here
        try:
            self._hooks.serve(number, before)
        except Exception:
            logger.exception("push %s: the adapter before could not be served again", push)
            return False
        return True


def spec_of(request: UpdateRequest) -> LoraSpec:
    """The adapter of a push that is one."""
    assert request.adapter is not UNSET, "a push of an adapter"
    return request.adapter
