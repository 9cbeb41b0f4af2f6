"""What a transport offers to the drivers.

A transport moves the stream of `layout.Layout` from one trainer process to every rank of every engine, and nothing
else: it knows neither models nor engines. The trainer end is driven by `sender.Sender`, the engine end by
`receiver.Receiver`, in a thread that never touches the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from threading import Event
from typing import NamedTuple, Protocol

import torch

from weightsync.errors import PushTimeout, WeightSyncError
from weightsync.layout import Layout
from weightsync.wire import IpcPrepare


class Deadline:
    """One budget of seconds, handed down to every wait. Another thread may end it early, with the reason."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._reason: WeightSyncError | None = None

    def left(self) -> float:
        """Seconds left, never negative."""
        return 0.0 if self._reason else max(0.0, self._end - time.monotonic())

    def end(self, reason: WeightSyncError) -> None:
        """Spend the budget at once: what is waited for will not come."""
        self._reason = self._reason or reason

    def check(self, waiting_for: str) -> None:
        """Raise, once the budget is spent, the reason it was ended for, else `PushTimeout` naming what was awaited."""
        if self._reason is not None:
            raise self._reason
        if self.left() == 0.0:
            raise PushTimeout(f"no answer within {self.seconds:g} s, waiting for {waiting_for}")


class Peer(NamedTuple):
    """One engine rank as the trainer end knows it."""

    engine: str
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.engine}"


Progress = Callable[[int], None]
"""Called with the bytes announced so far after every bucket."""


class Sent(NamedTuple):
    """Seconds of a transfer: ``gather_s`` copying the trainer's tensors, ``digest_s`` hashing them, ``verify_s`` the
    slowest rank's checking."""

    gather_s: float
    digest_s: float
    verify_s: float


class Bucket(NamedTuple):
    """Part of the stream. ``data``, 1-D uint8, must not be read once the next bucket was asked for; ``digests`` are
    those of the tensors that end in it."""

    number: int
    data: torch.Tensor
    digests: tuple[int, ...]


class TrainerEnd(Protocol):
    """Sends; lives as long as the sender."""

    device: torch.device
    """Where the bytes are packed."""
    address: str
    """Where this end is dialled; names it to `EngineEnd.release`."""

    def free_bytes(self) -> int:
        """Memory that an arena could take, in bytes."""

    def request(self, plan: IpcPrepare, engine: str) -> IpcPrepare:
        """The message that makes an engine's ranks come for the bytes: ``plan`` with this end's address and secret."""

    def meet(self, plan: IpcPrepare, layout: Layout, peers: set[Peer], deadline: Deadline) -> None:
        """Return once every peer has come for the bytes. Raises `TransferFailed` or `PushTimeout`, naming the peers."""

    def send(self, tensors: Iterable[torch.Tensor], progress: Progress | None) -> Sent:
        """Send the stream to whom `meet` has met; returns once every peer has it, and verified. Raises as `meet`."""

    def call_off(self, error: BaseException) -> None:
        """Tell the peers that no more will come."""

    def served(self) -> None:
        """What was sent last is served: where engines keep the version before, the next push must leave it intact."""

    def close(self) -> None:
        """Release everything; idempotent."""


class Incoming(Protocol):
    """One push as an engine end receives it."""

    arena: str
    """Names the sender's memory."""
    whole: torch.Tensor | None
    """All buckets one after the other, where the sender's memory holds the whole stream: it then is the stage."""

    def buckets(self) -> Iterator[Bucket]:
        """Every bucket in order. Raises `TransferFailed` or `PushTimeout`."""


class EngineEnd(Protocol):
    """Receives, in one rank; lives as long as the rank and serves one push after another."""

    def meet(self, request: IpcPrepare, layout: Layout, rank: int, over: Event) -> Incoming:
        """Come for the bytes. ``over`` is set when the push is called off. Raises `TransferFailed` or `PushTimeout`."""

    def confirm(self, push: str, verify_s: float) -> None:
        """Tell the sender that the push is ready to be committed."""

    def fail(self, push: str, error: BaseException) -> None:
        """Tell the sender that the push is over here."""

    def release(self, address: str) -> bool:
        """Give back what is held of the sender at ``address``, which has closed; false if nothing was."""

    def close(self) -> None:
        """Release everything; idempotent."""
