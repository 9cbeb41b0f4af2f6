"""What a push sends: the trainer's tensors, or again what an arena holds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from weightsync.deadline import Deadline
from weightsync.errors import SourceError
from weightsync.memory import arenas
from weightsync.sources.iterator import IteratorSource, Placed
from weightsync.tensors.conversion import Conversion
from weightsync.tensors.layout import listed
from weightsync.trainer.deltas import Deltas
from weightsync.trainer.outgoing import Changes, Outgoing, Sent
from weightsync.trainer.push_plan import PushPlan
from weightsync.trainer.ranks import Coordinator
from weightsync.trainer.reading import How, Reading
from weightsync.trainer.results import DeltaResult
from weightsync.trainer.transfer import Transfer
from weightsync.transports.base import Progress

_T = TypeVar("_T")


class Repeated(NamedTuple):
    """A push of the served version, which the arena still holds, to engines that do not serve it."""

    outgoing: Outgoing

    @property
    def name(self) -> str:
        """As `ModelPush.name`."""
        return self.outgoing.plan.push

    @property
    def nbytes(self) -> int:
        """As `ModelPush.nbytes`."""
        return 0

    def begin(self, transfer: Transfer) -> Outgoing:
        """As `ModelPush.begin`."""
        return self.outgoing

    def send(self, outgoing: Outgoing, deadline: Deadline, progress: Progress) -> Sent:
        """As `ModelPush.send`."""
        return outgoing.resend(progress)

    def took(self, outgoing: Outgoing, transfer_s: float) -> None:
        """It says nothing of pushes to all engines."""


class ModelPush:
    """A push of ``plan``, whose tensors are read as ``reading`` says; ``ranks`` are those of the trainer, if several.

    If they are to be read early, they are copied before any engine is asked, which then waits for no engine. That takes
    one arena that holds everything, and that no engine keeps a version in: before an engine has accepted the push it
    may still go back to that version.
    """

    def __init__(
        self,
        plan: PushPlan,
        reading: Reading,
        ranks: Coordinator | None,
        deadline: Deadline,
        placed: Callable[[PushPlan, Placed], PushPlan],
        deltas: Deltas,
    ):
        self._placed, self._deltas = placed, deltas
        #: Why everything is sent, to other hosts; empty if what has changed is.
        self.why_all = "no engine is on another host, or what they or this push ask for excludes changes"
        self.plan, self._reading, self._ranks, self._deadline = plan, reading, ranks, deadline
        #: The push whose arena holds the tensors, and what copying took, once they are copied.
        self._copied: tuple[Outgoing, Sent] | None = None
        #: Of parameters that are read in place after the trainer went on: how often each had been written to.
        self._writes = [*map(_writes, plan.shared or ())] if reading.early else []

    @property
    def name(self) -> str:
        """The name by which the engines know the push."""
        return self.plan.request.push if self._copied is None else self._copied[0].plan.push

    @property
    def nbytes(self) -> int:
        """The bytes that it transfers."""
        return self.plan.layout.nbytes

    def begin(self, transfer: Transfer) -> Outgoing:
        """Provide the arena, and return the push that goes through it. Raises as `send` if it reads the tensors."""
        if self._copied is not None:
            return self._copied[0]
        plan = self.plan
        if isinstance(plan.source, IteratorSource) and not plan.request.any_order:
            return self._place(plan.source, transfer)
        outgoing = transfer.begin(plan.request, plan.layout, plan.shared, spare=plan.choice.spare)
        if plan.ranks is not None and plan.layout.table and plan.shared is None:
            outgoing.provide(plan.ranks, self._deadline)
        if plan.shared is not None:
            self._finish("in place")
        elif self._looks_for_changes(outgoing) or (
            self._reading.early and outgoing.is_whole and not plan.request.keep and not plan.layout.table
        ):
            self._copied = outgoing, self._reading.run(lambda: self._copy(outgoing))
            self._finish("copied")
            self._find_changes(outgoing, transfer)
        return outgoing

    def _looks_for_changes(self, outgoing: Outgoing) -> bool:
        """Whether what has changed may be sent; then what is copied is hashed as well."""
        if self.plan.choice.spare:
            self.why_all = self._deltas.why_not(outgoing)
            if not self.why_all:
                outgoing.expect()
        return not self.why_all

    def _find_changes(self, outgoing: Outgoing, transfer: Transfer) -> None:
        if not self.why_all:
            self.why_all = self._deltas.find(outgoing, transfer)

    @property
    def changes(self) -> Changes | None:
        """What is sent to other hosts in place of everything."""
        return None if self._copied is None else self._copied[0].changes

    def sent_elsewhere(self) -> tuple[DeltaResult | None, str]:
        """What was sent to engines on other hosts in place of everything; and if it was nothing, why so."""
        found = self.changes
        if found is None:
            return None, self.why_all
        same = len(self.plan.layout.entries) - found.changed - found.whole
        return DeltaResult(found.layout.payload_bytes, found.changed, found.whole, same, found.find_s), ""

    def took(self, outgoing: Outgoing, transfer_s: float) -> None:
        """Note how long the transfer took."""
        copied = Sent(0.0, 0.0, 0.0) if self._copied is None else self._copied[1]
        self._deltas.took(outgoing, copied.gather_s + copied.digest_s, transfer_s)

    def _place(self, source: IteratorSource, transfer: Transfer) -> Outgoing:
        whole = transfer.begin(self.plan.request, self.plan.layout, spare=self.plan.choice.spare)
        found = self._reading.run(lambda: self._read(source, whole))
        self.plan = self._placed(self.plan, found)
        outgoing = transfer.begin(self.plan.request, self.plan.layout, spare=self.plan.choice.spare)
        outgoing.follow(whole.base)
        self._copied = outgoing, Sent(found.seconds, 0.0, 0.0, found.not_finite)
        self._finish("copied")
        self._looks_for_changes(outgoing)
        self._find_changes(outgoing, transfer)
        return outgoing

    def _read(self, source: IteratorSource, outgoing: Outgoing) -> Placed:
        arena = outgoing.arena.bytes
        assert isinstance(arena, torch.Tensor), "an iterator's tensors are not read in place"
        assert self.plan.fitting is not None, "the plan of an iterator says what crosses of each tensor"
        return self._together(source, functools.partial(source.place, outgoing.layout, arena, self.plan.fitting))

    def _together(self, source: IteratorSource, read: Callable[[], _T]) -> _T:
        """Read an iterator; every other rank of the trainer reads its own meanwhile."""
        if self._ranks is None:
            return read()
        return self._ranks.together(functools.partial(_to_the_end, source, read), self._deadline)

    def again(self, transfer: Transfer) -> ModelPush | None:
        """The same push once more, from the arena, to engines that were restarted; None if it is not there."""
        if self._copied is None or transfer.closed:
            return None
        outgoing, copied = self._copied
        if outgoing.changes is not None:
            self.why_all = "an engine did not have the version before"
        self._copied = transfer.repeat(outgoing), copied
        return self

    def _copy(self, outgoing: Outgoing) -> Sent:
        plan = self.plan
        if plan.ranks is not None:
            return outgoing.copy_filled(plan.ranks, plan.source, self._deadline)
        arenas.synchronize(plan.source.device)
        return outgoing.copy(plan.source.tensors(), plan.identity, plan.conversions)

    def send(self, outgoing: Outgoing, deadline: Deadline, progress: Progress) -> Sent:
        """Send the bytes. Raises `SourceError`, `TransferFailed` or `PushTimeout`."""
        if self._copied is not None:
            copied, sent = self._copied[1], outgoing.resend(progress)
            return Sent(copied.gather_s, copied.digest_s + sent.digest_s, sent.verify_s, copied.not_finite)
        if self.plan.shared is not None:
            sent = self._send(outgoing, deadline, progress)
            self.check_unchanged("no engine was asked to commit")
            return sent
        sent = self._reading.run(lambda: self._send(outgoing, deadline, progress))
        self._finish("sent")
        return sent

    def _send(self, outgoing: Outgoing, deadline: Deadline, progress: Progress) -> Sent:
        plan = self.plan
        if isinstance(plan.source, IteratorSource):
            return self._send_in_turn(plan.source, outgoing, progress)
        if plan.ranks is not None:
            return outgoing.send_filled(plan.ranks, plan.source, deadline, progress)
        arenas.synchronize(plan.source.device)
        tensors = plan.source.tensors() if plan.shared is None else plan.shared
        return outgoing.send(tensors, progress, plan.identity, plan.conversions)

    def _send_in_turn(self, source: IteratorSource, outgoing: Outgoing, progress: Progress) -> Sent:
        assert self.plan.fitting is not None, "the plan of an iterator says what crosses of each tensor"
        conversions: dict[int, Conversion] = {}
        pairs = source.in_turn(outgoing.layout, self.plan.fitting, conversions, self.plan.dropped)
        sent = self._together(source, lambda: outgoing.send_pairs(pairs, conversions, progress))
        self.plan = self.plan._replace(conversions=conversions)
        return sent

    def check_unchanged(self, then: str) -> None:
        """Raise `SourceError`, with what has happened ``then``, if parameters that are read in place were written to.

        torch counts the writes, except those that go around it, such as through ``tensor.data``.
        """
        plan = self.plan
        now = [*map(_writes, plan.shared or ())] if self._writes else []
        if changed := [
            entry.spec.name
            for entry, before, after in zip(plan.layout.entries, self._writes, now, strict=False)
            if before != after
        ]:
            raise SourceError(
                f"{listed(changed)} changed while the engines read it in place, and {then}; wait for the future of "
                "push_async before the next optimiser step if it says in_place, and push again"
            )

    def _finish(self, how: How) -> None:
        self._reading.how = how
        self._reading.finish()
        if self._reading.early and self._ranks is not None:
            self._ranks.release(self._deadline)


def _to_the_end(source: IteratorSource, read: Callable[[], _T]) -> _T:
    try:
        return read()
    except Exception:
        # The other ranks read theirs to the end, and would wait for this one where all make a tensor together.
        with contextlib.suppress(Exception):
            source.drain()
        raise


def _writes(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
