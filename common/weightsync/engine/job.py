"""One push on one rank."""

from __future__ import annotations

from threading import Event

from msgspec import UNSET

from weightsync.deadline import Deadline
from weightsync.engine.changed import opened
from weightsync.engine.loading.planned import Arriving
from weightsync.engine.stage import Staged
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.base import EngineEnd, Incoming


class Job:
    """One push on this rank, from prepare to commit or abort."""

    def __init__(self, request: UpdateRequest, end: EngineEnd, subset: Subset, arriving: Arriving | None):
        self.request, self.transport, self.subset, self.arriving = request, end, subset, arriving
        self.deadline = Deadline(request.timeout_s)
        self.cancelled, self.ended = Event(), Event()
        self.incoming: Incoming | None = None
        self.staged: Staged | None = None
        #: The adapter that was made of what arrived, if it is one; it has copies.
        self.made: object | None = None

    def open(self, rank: int) -> Incoming:
        """Connect this rank to the sender. Raises `TransferFailed` or `PushTimeout`."""
        return opened(self.transport, self.request, self.subset, rank, self.cancelled)

    @property
    def adapts(self) -> bool:
        """Whether this is a push of an adapter."""
        return self.request.lora is not UNSET

    def end(self) -> None:
        """Drop all references to the sender's memory: the push was applied or cancelled."""
        self.incoming = self.staged = self.arriving = self.made = None
        self.cancelled.set()
