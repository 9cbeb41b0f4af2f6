"""Trainer side of WRITEs over NIXL: a thread keeps them going while the trainer packs, for the length of a push."""

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

#: Stages of a rank for which requests are kept: two, for each of two arenas.
KEPT: Final = 4


@dataclass
class _Window:
    """One rank's memory: how many buckets it has room for so far, and how many were posted and have arrived."""

    transfers: Transfers
    upto: int
    posted: int = 0
    arrived: int = 0


class Writer:
    """Prepares WRITEs into the memory that ranks offer, and keeps them from push to push."""

    def __init__(self, agent: Agent):
        self._agent = agent
        #: Prepared WRITEs, the latest last, by the agent and all else that they depend on.
        self._writes: dict[tuple[str, object], Transfers] = {}
        self._writing: Writing | None = None

    def begin(self, plan: UpdateRequest, layout: Layout, arena: torch.Tensor) -> Writing:
        """A push whose stream will lie in ``arena``, which is registered; ends the one before."""
        self._stop()
        self._writing = Writing(self, self._agent, plan, layout, arena)
        return self._writing

    def transfers(
        self, handle: NixlHandle, arena: torch.Tensor, spans: Callable[[], Spans], depends_on: object, peer: str
    ) -> Transfers:
        """WRITEs of ``spans()`` from ``arena`` to ``handle``; those of an earlier push that ``depends_on`` the same."""
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
        """An agent has sent a new handshake: what was prepared for it holds no more."""
        for key in [key for key in self._writes if key[0] == agent]:
            self._writes.pop(key).release()

    def forget(self) -> None:
        """The arena is about to be given back."""
        self._stop()
        while self._writes:
            self._writes.popitem()[1].release()

    def _stop(self) -> None:
        if self._writing is not None:
            self._writing.stop()


class Writing:
    """Writes the stream of one push to the ranks that ask for it."""

    def __init__(self, writer: Writer, agent: Agent, plan: UpdateRequest, layout: Layout, arena: torch.Tensor):
        self._writer, self._agent, self._plan, self._layout, self._arena = writer, agent, plan, layout, arena
        self._filled = 0
        #: Only ever added to while the thread runs.
        self._windows: dict[Peer, _Window] = {}
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        #: What the thread was notified of: an agent, and what it sent.
        self.heard: queue.SimpleQueue[tuple[str, list[bytes]]] = queue.SimpleQueue()
        self._error: WeightSyncError | None = None

    def filled(self, bucket: int) -> None:
        """A bucket, and all before it, may be written."""
        self._filled = bucket + 1

    def arrived(
        self, windows: Mapping[Peer, WriteWindow], agents: Mapping[str, Peer], needs: Mapping[Peer, Subset]
    ) -> dict[Peer, int]:
        """The last bucket that each rank has, of those that ask to be written to; -1 for none.

        ``agents`` are the ranks' own; ``needs`` is what each rank needs of the tensors. Raises `TransferFailed` with
        the rank for a WRITE that failed.
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
                # With nothing on its way there is still the notification of what was last.
                time.sleep(0 if self._drive() else SPIN_S)
        except WeightSyncError as error:
            self._error = error

    def _drive(self) -> bool:
        """Post what may be posted to every rank; returns whether anything is on its way."""
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
            for heard in self._agent.notifications().items():
                self.heard.put(heard)
        return busy

    def _window(self, peer: Peer, asked: WriteWindow, agents: Mapping[str, Peer], parts: Subset) -> _Window:
        """The memory that a rank has offered, ready to be written to. Raises `TransferFailed`."""
        layout, size, slots = self._layout, self._plan.bucket_bytes, self._plan.slots
        handle = control.handle_of(asked.handle, HANDLE, str(peer))
        if handle is None or agents.get(handle.agent) != peer:
            raise TransferFailed(f"{peer} offers memory of an agent that is not its own; push again")
        if handle.nbytes < min(layout.nbytes, asked.slots * size):
            raise TransferFailed(f"{peer} offers {handle.nbytes} bytes, its buckets take more")
        depends_on = (handle, self._arena.data_ptr(), layout.nbytes, size, slots, asked.slots, parts.name)
        made = self._writer.transfers(
            handle, self._arena, lambda: spans_of(parts, size, asked.slots, slots), depends_on, str(peer)
        )
        return _Window(made, asked.upto)

    def stop(self) -> None:
        """Nothing more is written; idempotent."""
        if self._thread is not None:
            self._cancelled.set()
            self._thread.join()  # it looks every moment, and never waits for a peer
            self._thread = None
