"""WRITEs over NIXL, of a trainer or of an engine rank that passes buckets on.

On rank 0's host a thread drives them while the trainer packs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from weightsync.errors import TransferFailed, WeightSyncError
from weightsync.protocol import control
from weightsync.protocol.control import BucketDone
from weightsync.transports.base import Peer
from weightsync.transports.nixl.agents import IN_FLIGHT, SPIN_S, Agent, Spans, Transfers, translated
from weightsync.transports.nixl.messages import NixlHandle

#: How many prepared sets of transfers are kept for each rank: two stages times two arenas.
KEPT: Final = 4


class Writer:
    """Prepares WRITEs into the memory that ranks offer, and keeps them for later pushes."""

    def __init__(self, agent: Agent):
        self._agent = agent
        #: Prepared WRITEs by agent and everything else that they depend on; the most recently used last.
        self._writes: dict[tuple[str, object], Transfers] = {}

    def transfers(
        self, handle: NixlHandle, arena: torch.Tensor, spans: Callable[[], Spans], depends_on: object, peer: Peer
    ) -> Transfers:
        """WRITEs of ``spans()`` from ``arena`` to ``handle``; an earlier push's if ``depends_on`` is the same."""
        key = handle.agent, (handle, arena.data_ptr(), depends_on)
        found = self._writes.pop(key, None)
        if found is None:
            older = [one for one in self._writes if one[0] == handle.agent]
            for one in older[: max(0, len(older) - KEPT + 1)]:
                self._writes.pop(one).release()
            self._agent.add_peer(handle.agent, handle.metadata, str(peer))
            found = Transfers("WRITE", self._agent, handle, arena, spans())
        self._writes[key] = found
        return found

    def reconnect(self, agent: str) -> None:
        """Drop the connection to an agent, and the WRITEs prepared over it: `Agent.add_peer` makes another."""
        for key in [key for key in self._writes if key[0] == agent]:
            self._writes.pop(key).release()
        self._agent.forget(agent)

    def forget(self) -> None:
        """Release everything prepared: the arenas are about to be freed."""
        while self._writes:
            self._writes.popitem()[1].release()


@dataclass
class _Window:
    """One rank's memory: how many buckets it has room for so far, and how many were posted and have arrived."""

    transfers: Transfers
    upto: int
    posted: int = 0
    arrived: int = 0


class Writing:
    """The WRITEs of one push. ``filled``: the number of buckets that may be written."""

    def __init__(self, push: str, filled: int = 0):
        self._push, self.filled = push, filled
        #: Replaced as a whole, for a thread may be reading it.
        self._windows: dict[Peer, _Window] = {}
        #: The ranks to which a WRITE has failed.
        self.failed: dict[Peer, TransferFailed] = {}

    def knows(self, peer: Peer) -> bool:
        """Whether `add` was called for a rank."""
        return peer in self._windows

    def add(self, peer: Peer, transfers: Transfers, upto: int, first: int = 0) -> None:
        """Have a rank written to, from bucket ``first`` on, as long as it has room: up to ``upto``, exclusive."""
        self._windows = {**self._windows, peer: _Window(transfers, upto, first, first)}

    def drop(self, peer: Peer) -> None:
        """Write no more to a rank; a WRITE may be under way."""
        self._windows = {other: window for other, window in self._windows.items() if other != peer}
        self.failed.pop(peer, None)

    def allow(self, peer: Peer, upto: int) -> None:
        """Note that a rank has room for more buckets."""
        self._windows[peer].upto = upto

    def arrived(self) -> dict[Peer, int]:
        """The last bucket that each rank has; -1 for none."""
        return {peer: window.arrived - 1 for peer, window in self._windows.items()}

    def drive(self) -> bool:
        """Post every WRITE that may be posted; returns whether any is under way. See `failed`."""
        busy = False
        for peer, window in self._windows.items():
            if peer in self.failed:
                continue
            try:
                with translated(f"bucket {window.arrived} could not be written to {peer}"):
                    self._post(window)
            except TransferFailed as error:
                self.failed[peer] = error
            busy |= window.arrived < window.posted
        return busy

    def _post(self, window: _Window) -> None:
        while window.arrived < window.posted and window.transfers.done(window.arrived):
            window.arrived += 1
        while window.posted < min(self.filled, window.upto, window.arrived + IN_FLIGHT):
            window.transfers.post(window.posted, control.pack(BucketDone(push=self._push, index=window.posted)))
            window.posted += 1

    def check(self) -> None:
        """Raise the error of a rank to which a WRITE has failed."""
        if self.failed:
            raise next(iter(self.failed.values()))


class Background:
    """Drives `Writing` in a thread, from `start` until `stop`."""

    def __init__(self, writing: Writing, agent: Agent):
        self._writing, self._agent = writing, agent
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        #: Notifications that the thread received: the agent, and what it sent.
        self.received: queue.SimpleQueue[tuple[str, list[bytes]]] = queue.SimpleQueue()
        self._error: WeightSyncError | None = None

    def start(self) -> None:
        """Start the thread, if it does not run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-write", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, or that of a WRITE."""
        if self._error is not None:
            raise self._error
        self._writing.check()

    def _run(self) -> None:
        try:
            while not self._cancelled.is_set():
                busy = self._writing.drive()
                if not busy:
                    for entry in self._agent.notifications().items():
                        self.received.put(entry)
                # With nothing under way, the notification of the last transfer may still be to come.
                time.sleep(0 if busy else SPIN_S)
        except WeightSyncError as error:
            self._error = error

    def stop(self) -> None:
        """Stop the thread; idempotent."""
        if self._thread is not None:
            self._cancelled.set()
            self._thread.join()  # it checks all the time, and never waits for a peer
            self._thread = None
