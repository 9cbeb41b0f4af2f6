"""Trainer side of WRITEs over NIXL: a thread keeps them going while the trainer packs, for the length of a push."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
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
from weightsync.transports.nixl.agents import SPIN_S, Agent, Transfers, spans_of, translated
from weightsync.transports.nixl.incoming import IN_FLIGHT
from weightsync.transports.nixl.messages import HANDLE

#: Stages of a rank for which requests are kept: two, for each of two arenas.
KEPT: Final = 4


@dataclass
class _EngineWriter:
    """The way into one rank's memory: how many buckets were sent on it, and how many have arrived."""

    transfers: Transfers
    upto: int
    posted: int = 0
    arrived: int = 0


class Writer:
    """Writes the stream of one push after another to the ranks that ask for it; `stop` comes before the next."""

    def __init__(self, agent: Agent):
        self._agent = agent
        #: Prepared WRITEs, the latest last, by the agent and all else that they depend on.
        self._writes: dict[tuple[str, object], Transfers] = {}
        self._plan: UpdateRequest | None = None
        self._layout, self._arena = Layout([]), torch.empty(0, dtype=torch.uint8)
        self._filled = 0
        #: Only ever added to while the thread runs.
        self._lanes: dict[Peer, _EngineWriter] = {}
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        #: What the thread came by: an agent, and what it sent.
        self.heard: queue.SimpleQueue[tuple[str, list[bytes]]] = queue.SimpleQueue()
        self._error: WeightSyncError | None = None

    def begin(self, plan: UpdateRequest, layout: Layout, arena: torch.Tensor) -> None:
        """A push whose stream will lie in ``arena``, which is registered."""
        self.stop()
        self._plan, self._layout, self._arena = plan, layout, arena
        self._filled, self._lanes, self._error = 0, {}, None

    def filled(self, bucket: int) -> None:
        """A bucket, and all before it, may be written."""
        self._filled = bucket + 1

    def arrived(
        self, rooms: Mapping[Peer, WriteWindow], agents: Mapping[str, Peer], needs: Mapping[Peer, Subset]
    ) -> dict[Peer, int]:
        """The last bucket that each rank has, of those that ask to be written to; -1 for none.

        ``agents`` are the ranks' own, ``keeps`` is what each keeps.
        Raises `TransferFailed` for what went wrong on the way, by name.
        """
        for peer, room in rooms.items():
            lane = self._lanes.get(peer)
            if lane is None:
                self._lanes = {**self._lanes, peer: self._lane(peer, room, agents, needs[peer])}
            else:
                lane.upto = room.upto
        if self._lanes and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._run, name="weightsync-write", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        return {peer: lane.arrived - 1 for peer, lane in self._lanes.items()}

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                # With nothing on its way there is still the notice of what was last.
                time.sleep(0 if self._drive() else SPIN_S)
        except WeightSyncError as error:
            self._error = error

    def _drive(self) -> bool:
        """Look after every lane; whether anything is on its way."""
        assert self._plan is not None
        busy = False
        for peer, lane in self._lanes.items():
            with translated(f"bucket {lane.arrived} could not be written to {peer}"):
                while lane.arrived < lane.posted and lane.transfers.done(lane.arrived):
                    lane.arrived += 1
                while lane.posted < min(self._filled, lane.upto, lane.arrived + IN_FLIGHT):
                    lane.transfers.post(lane.posted, control.pack(BucketDone(push=self._plan.push, index=lane.posted)))
                    lane.posted += 1
            busy |= lane.arrived < lane.posted
        if not busy:
            for heard in self._agent.notifications().items():
                self.heard.put(heard)
        return busy

    def _lane(self, peer: Peer, room: WriteWindow, agents: Mapping[str, Peer], parts: Subset) -> _EngineWriter:
        """The way into the memory that a rank has offered, prepared where it is not yet."""
        assert self._plan is not None
        layout, size, slots = self._layout, self._plan.bucket_bytes, self._plan.slots
        handle = control.handle_of(room.handle, HANDLE, str(peer))
        if handle is None or agents.get(handle.agent) != peer:
            raise TransferFailed(f"{peer} offers memory of an agent that is not its own; push again")
        if handle.nbytes < min(layout.nbytes, room.slots * size):
            raise TransferFailed(f"{peer} offers {handle.nbytes} bytes, its buckets take more")
        place = (handle, self._arena.data_ptr(), layout.nbytes, size, slots, room.slots, parts.name)
        found = self._writes.pop((handle.agent, place), None)
        if found is None:
            older = [key for key in self._writes if key[0] == handle.agent]
            for key in older[: max(0, len(older) - KEPT + 1)]:
                self._writes.pop(key).release()
            self._agent.add_peer(handle.agent, handle.metadata, str(peer))
            spans = spans_of(parts, size, room.slots, slots)
            found = Transfers("WRITE", self._agent, handle, self._arena, spans)
        self._writes[handle.agent, place] = found
        return _EngineWriter(found, room.upto)

    def drop(self, agent: str) -> None:
        """An agent is introduced anew: what was prepared for it holds no more."""
        for key in [key for key in self._writes if key[0] == agent]:
            self._writes.pop(key).release()

    def stop(self) -> None:
        """The push is over: nothing more is written."""
        if self._thread is not None:
            self._over.set()
            self._thread.join()  # it looks every moment, and never waits for a peer
            self._thread = None

    def forget(self) -> None:
        """The arena is about to be given back."""
        self.stop()
        while self._writes:
            self._writes.popitem()[1].release()
