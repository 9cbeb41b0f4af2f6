"""WRITEs of the trainer over NIXL: during a push, a thread drives them while the trainer packs."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from weightsync.errors import TransferFailed, WeightSyncError
from weightsync.protocol import control
from weightsync.protocol.control import BucketDone, WriteWindow
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.nixl.agents import SPIN_S, Agent, Spans, Transfers, spans_of, translated
from weightsync.transports.nixl.incoming import IN_FLIGHT
from weightsync.transports.nixl.messages import HANDLE, NixlHandle

#: How many prepared sets of transfers are kept for each rank: two stages times two arenas.
KEPT: Final = 4


@dataclass
class _Window:
    """One rank's memory: how many buckets it has room for so far, and how many were posted and have arrived."""

    transfers: Transfers
    upto: int
    posted: int = 0
    arrived: int = 0


class Writer:
    """Prepares WRITEs into the memory that ranks offer, and keeps them for later pushes."""

    def __init__(self, agent: Agent):
        self._agent = agent
        #: Prepared WRITEs by agent and everything else that they depend on; the most recently used last.
        self._writes: dict[tuple[str, object], Transfers] = {}
        self._writing: Writing | None = None

    def begin(self, plan: UpdateRequest, layout: Layout, arena: torch.Tensor) -> Writing:
        """Begin a push whose stream will lie in ``arena``, which is registered; stops the push before."""
        self._stop()
        self._writing = Writing(self, self._agent, plan, layout, arena)
        return self._writing

    def transfers(
        self, handle: NixlHandle, arena: torch.Tensor, spans: Callable[[], Spans], depends_on: object, peer: str
    ) -> Transfers:
        """WRITEs of ``spans()`` from ``arena`` to ``handle``; an earlier push's if ``depends_on`` is the same."""
        found = self._writes.pop((handle.agent, depends_on), None)
        if found is None:
            older = [key for key in self._writes if key[0] == handle.agent]
            for key in older[: max(0, len(older) - KEPT + 1)]:
                self._writes.pop(key).release()
            self._agent.add_peer(handle.agent, handle.metadata, peer)
            found = Transfers("WRITE", self._agent, handle, arena, spans())
        self._writes[handle.agent, depends_on] = found
        return found

    def drop(self, agent: str) -> None:
        """Release what was prepared for an agent, which has answered a new handshake."""
        for key in [key for key in self._writes if key[0] == agent]:
            self._writes.pop(key).release()

    def forget(self) -> None:
        """Release everything prepared: the arenas are about to be freed."""
        self._stop()
        while self._writes:
            self._writes.popitem()[1].release()

    def _stop(self) -> None:
        if self._writing is not None:
            self._writing.stop()


class Writing:
    """Writes the stream of one push to the ranks that offer a window."""

    def __init__(self, writer: Writer, agent: Agent, plan: UpdateRequest, layout: Layout, arena: torch.Tensor):
        self._writer, self._agent, self._plan, self._layout, self._arena = writer, agent, plan, layout, arena
        self._filled = 0
        #: Entries are only added while the thread runs.
        self._windows: dict[Peer, _Window] = {}
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        #: Notifications that the thread received: the agent, and what it sent.
        self.received: queue.SimpleQueue[tuple[str, list[bytes]]] = queue.SimpleQueue()
        self._error: WeightSyncError | None = None

    def filled(self, bucket: int) -> None:
        """Allow a bucket and all before it to be written."""
        self._filled = bucket + 1

    def arrived(
        self, windows: Mapping[Peer, WriteWindow], agents: Mapping[str, Peer], needs: Mapping[Peer, Subset]
    ) -> dict[Peer, int]:
        """The last bucket that each rank with a window has; -1 for none.

        ``agents`` maps agents' names to their ranks; ``needs`` has the subset of each rank. Raises `TransferFailed`,
        naming the rank, if a WRITE failed.
        """
        for peer, asked in windows.items():
            window = self._windows.get(peer)
            if window is None:
                self._windows = {**self._windows, peer: self._window(peer, asked, agents, needs[peer])}
            else:
                window.upto = asked.upto
        if self._windows and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weightsync-write", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        return {peer: window.arrived - 1 for peer, window in self._windows.items()}

    def _run(self) -> None:
        try:
            while not self._cancelled.is_set():
                # With nothing under way, the notification of the last transfer may still be to come.
                time.sleep(0 if self._drive() else SPIN_S)
        except WeightSyncError as error:
            self._error = error

    def _drive(self) -> bool:
        """Post every WRITE that may be posted; returns whether any is under way."""
        busy = False
        for peer, window in self._windows.items():
            with translated(f"bucket {window.arrived} could not be written to {peer}"):
                while window.arrived < window.posted and window.transfers.done(window.arrived):
                    window.arrived += 1
                while window.posted < min(self._filled, window.upto, window.arrived + IN_FLIGHT):
                    done = control.pack(BucketDone(push=self._plan.push, index=window.posted))
                    window.transfers.post(window.posted, done)
                    window.posted += 1
            busy |= window.arrived < window.posted
        if not busy:
            for entry in self._agent.notifications().items():
                self.received.put(entry)
        return busy

    def _window(self, peer: Peer, asked: WriteWindow, agents: Mapping[str, Peer], subset: Subset) -> _Window:
        """Prepare WRITEs to the memory that a rank has offered. Raises `TransferFailed`."""
        layout, size, slots = self._layout, self._plan.bucket_bytes, self._plan.slots
        handle = control.handle_of(asked.handle, HANDLE, str(peer))
        if handle is None or agents.get(handle.agent) != peer:
            raise TransferFailed(f"{peer} offers memory of an agent that is not its own; push again")
        if handle.nbytes < min(layout.nbytes, asked.slots * size):
            raise TransferFailed(f"{peer} offers {handle.nbytes} bytes, fewer than its buckets take")
        depends_on = (handle, self._arena.data_ptr(), layout.nbytes, size, slots, asked.slots, subset.name)
        made = self._writer.transfers(
            handle, self._arena, lambda: spans_of(subset, size, asked.slots, slots), depends_on, str(peer)
        )
        return _Window(made, asked.upto)

    def stop(self) -> None:
        """Stop writing; idempotent."""
        if self._thread is not None:
            self._cancelled.set()
            self._thread.join()  # it checks all the time, and never waits for a peer
            self._thread = None
