"""What a transport offers to the drivers.

A transport moves the stream of `layout.Layout` from one trainer process to every rank of every engine, and nothing
else: it knows neither models nor engines. The trainer end is driven by `sender.Sender`, the engine end by
`receiver.Receiver`, in a thread that never touches the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from threading import Event
from typing import NamedTuple, Protocol

import torch

from weightsync.errors import PushTimeout
from weightsync.layout import Layout
from weightsync.wire import IpcPrepare


class Deadline:
    """One budget of seconds, handed down to every wait."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, waiting_for: str) -> None:
        """Raise `PushTimeout` naming what was waited for, once the budget is spent."""
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


class TrainerEnd(Protocol):
    """Sends; lives as long as the sender."""

    device: torch.device
    """Where the bytes are packed."""
    address: str
    """Where this end is dialled; names it to `EngineEnd.release`."""

    def free_bytes(self) -> int:
        """Memory that an arena could take, in bytes."""

    def request(self, push: str, engine: str, layout: Layout, bucket_bytes: int, timeout_s: float) -> IpcPrepare:
        """The message that makes an engine's ranks come for the bytes."""

    def transfer(
        self,
        push: str,
        layout: Layout,
        tensors: Iterable[torch.Tensor],
        peers: set[Peer],
        deadline: Deadline,
        progress: Progress | None,
    ) -> float:
        """Send the stream and return once every peer has prepared; the result is the seconds spent gathering.

        Raises `TransferFailed` or `PushTimeout`, naming the peers.
        """

    def close(self) -> None:
        """Release everything; idempotent."""


class EngineEnd(Protocol):
    """Receives, in one rank; lives as long as the rank and serves one push after another."""

    def receive(self, request: IpcPrepare, layout: Layout, rank: int, cancelled: Event) -> torch.Tensor:
        """The whole stream as a 1-D uint8 tensor, valid until the push is committed or aborted.

        Raises `TransferFailed` or `PushTimeout`, and has then told the sender.
        """

    def confirm(self, push: str) -> None:
        """Tell the sender that the stream is staged and can be committed."""

    def release(self, address: str) -> None:
        """Give back what is held of the sender at ``address``, which has closed; of any other nothing."""

    def close(self) -> None:
        """Release everything; idempotent."""
