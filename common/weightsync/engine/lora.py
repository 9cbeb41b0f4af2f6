"""LoRA adapters of one rank: as `loading`, for what is pushed with ``lora=``.

An adapter is made of the staged tensors before the commit, by the thread that receives them, and holds copies. So the
pause only exchanges it for the one before, the weights and whatever loads them are left alone, and the stage is free
for the next push. It keeps its number, so that requests in flight go on with the new one as the pause mode says.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

from msgspec import UNSET

from weightsync.engine.adapter import Adapter, LoraHooks
from weightsync.engine.job import Job
from weightsync.engine.stage import Stages
from weightsync.errors import ApplyFailed, TransferFailed
from weightsync.memory import arenas
from weightsync.protocol.http import CommitRequest, State, UpdateRequest
from weightsync.protocol.lora import AdapterId, LoraSpec
from weightsync.protocol.rank_replies import Accepted
from weightsync.protocol.states import Machine
from weightsync.python_lock import passed_soon
from weightsync.tensors.domains import layout_of
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import EngineEnd, Incoming

logger = logging.getLogger(__name__)


class _Held(NamedTuple):
    """An adapter that was pushed, as `LoraHooks.served` returns it."""

    number: AdapterId
    version: str
    made: object


class _Begun(NamedTuple):
    """The last commit that began: the push, the adapter and its number, and what was there before."""

    push: str = ""
    name: str = ""
    number: AdapterId = 0
    before: object | None = None
    current: _Held | None = None
    previous: _Held | None = None


class LoraLoading:
    """The pushed adapters of one rank. `receive` is called by the receiving thread, all else by the engine's loop."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        #: Apart from those of the weights, which may hold a version that is kept.
        self.stages = Stages(adapter.rank, adapter.device)
        self._layout = Layout(())
        self._unread: tuple[str, ...] = ()
        self._begun = _Begun()
        #: By name, the pushed adapters that are served, and those before them, to go back to.
        self._current: dict[str, _Held] = {}
        self._previous: dict[str, _Held] = {}

    @functools.cached_property
    def _hooks(self) -> LoraHooks:
        return self._adapter.lora_hooks()

    def job(self, request: UpdateRequest, end: EngineEnd) -> Job:
        """A push of an adapter that the engine can serve. Raises `ManifestMismatch` or `UnsupportedOption`."""
        self._unread = self._hooks.check(spec_of(request), request.manifest)
        if (request.manifest, request.domains) != (self._layout.specs, self._layout.table):
            self._layout = layout_of(request.manifest, request.domains)
        return Job(request, end, Subset(self._layout, {}), None)

    def accepted(self) -> Accepted:
        """The reply to a push that was accepted."""
        return Accepted(unread=self._unread)

    @passed_soon()
    def receive(self, incoming: Incoming, job: Job) -> float:
        """Receive and verify an adapter, and make it; return the seconds that verifying took. Raises as `Stages.fill`,
        and what the engine raises for tensors that do not fit."""
        staged, verify_s = self.stages.fill(incoming, job.request, job.subset, None)
        job.made = self._hooks.make(spec_of(job.request), staged.tensors())
        return verify_s

    def kept(self) -> dict[str, str]:
        """The versions of adapters that a rollback can go back to, by name."""
        return {name: held.version for name, held in list(self._previous.items()) if self._is_current(name)}

    def _is_current(self, name: str) -> bool:
        """Whether the engine still has the version that was pushed last: users may replace it."""
        held = self._current.get(name)
        return held is not None and self._hooks.served(held.number) == held.made

    def check_kept(self, name: str, version: str) -> None:
        """Raise `TransferFailed` unless a rollback can go back to this version of an adapter."""
        if self.kept().get(name) != version:
            rank = self._adapter.rank
            raise TransferFailed(f"rank {rank} keeps no version {version!r} of the adapter {name!r} to go back to")

    def apply(self, job: Job | None, request: CommitRequest, machine: Machine[State]) -> None:
        """Have the engine use the adapter of a push, or with no ``job`` the one before. Raises `ApplyFailed`; its
        ``weights`` says what is served then."""
        if job is None:
            held = self._previous[str(request.lora)]
            self._serve(request, held.number, held.made, machine)
        else:
            self._serve(request, spec_of(job.request).number, job.made, machine)

    def _serve(self, request: CommitRequest, number: AdapterId, made: object, machine: Machine[State]) -> None:
        name, rank, before = str(request.lora), self._adapter.rank, self._hooks.served(number)
        current = self._current.get(name) if self._is_current(name) else None
        self._begun = _Begun(request.push, name, number, before, current, self._previous.get(name))
        try:
            # An engine step launched before the pause may still be reading the adapter before.
            arenas.synchronize(self._adapter.device)
            self._hooks.serve(number, made)
            self._note(name, _Held(number, request.version, self._hooks.served(number)), current)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
            if self._undo(request.push):
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

    def _note(self, name: str, current: _Held | None, previous: _Held | None) -> None:
        for held, one in ((self._current, current), (self._previous, previous)):
            if one is None:
                held.pop(name, None)
            else:
                held[name] = one

    def _undo(self, push: str) -> bool:
        begun = self._begun
        if begun.push != push:
            return True  # it was not begun here
        try:
            self._hooks.serve(begun.number, begun.before)
            self._note(begun.name, begun.current, begun.previous)
        except Exception:
            logger.exception("push %s: the adapter before could not be served again", push)
            return False
        return True


def spec_of(request: UpdateRequest) -> LoraSpec:
    """The adapter of a push that is one."""
    assert request.adapter is not UNSET, "a push of an adapter"
    return request.adapter
