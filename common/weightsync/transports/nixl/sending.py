"""What a trainer's host has over NIXL: its agent, its registered arenas, and its connections to engine ranks."""

from __future__ import annotations

import array
import time
from collections.abc import Callable, Iterable

import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.memory import arenas
from weightsync.tensors.domains import DividedLayout, Run
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.control.sockets import LOOK_UP_S
from weightsync.transports.nixl.agents import SPIN_S, WARM, Agent, Spans, spans_of
from weightsync.transports.nixl.messages import EngineAgent, NixlHandle, SendingAgent
from weightsync.transports.nixl.writing import Writer


class SendingHost:
    """The agent of a trainer's host. ``device`` is where its arenas lie; ``rank`` spreads agents over NICs."""

    def __init__(self, device: torch.device, rank: int):
        self.agent = Agent(device, rank)
        self.writer = Writer(self.agent)
        #: The engine ranks that were met, by agent.
        self.peers: dict[str, Peer] = {}
        #: The registered arenas by address.
        self._registered: dict[int, torch.Tensor] = {}

    @property
    def described(self) -> SendingAgent:
        """What engine ranks are told of the agent."""
        return SendingAgent(self.agent.name, self.agent.metadata(), arenas.host_id(), bool(self.agent.nic))

    @property
    def is_used(self) -> bool:
        """Whether any arena is registered."""
        return bool(self._registered)

    def register(self, memory: torch.Tensor) -> None:
        """Register an arena, if it is not."""
        if memory.data_ptr() not in self._registered:
            self.agent.register(memory)
            self._registered[memory.data_ptr()] = memory

    def handle(self, memory: torch.Tensor) -> NixlHandle:
        """The handle of a registered arena."""
        return self.agent.handle(memory)

    def meet(self, ranks: Iterable[EngineAgent], deadline: Deadline, check: Callable[[], None]) -> None:
        """Connect to engine ranks; returns once NIXL itself has carried a notification both ways with each.

        ``check`` is called regularly and may raise. Raises `TransferFailed` or `PushTimeout`, naming the ranks.
        """
        silent: dict[str, Peer] = {}
        for rank in ranks:
            self.peers = {agent: peer for agent, peer in self.peers.items() if peer != rank.peer}
            silent[rank.agent] = rank.peer
            self.writer.reconnect(rank.agent)  # an older connection has lost its other end
            self.agent.add_peer(rank.agent, rank.metadata, str(rank.peer))
        self.peers.update(silent)
        checked = time.monotonic()
        while silent:
            deadline.check(f"{', '.join(sorted(map(str, silent.values())))} to be reached over NIXL")
            if time.monotonic() - checked > LOOK_UP_S:
                checked = time.monotonic()
                check()
            for agent in self.agent.notifications().keys() & silent.keys():
                self.agent.notify(agent, WARM, str(silent.pop(agent)))
            time.sleep(SPIN_S)

    def end(self) -> None:
        """End the agent: it could still serve a READ of a failed push, see `Agent.close`. Idempotent."""
        self.writer.forget()
        self.agent.close(list(self._registered.values()))
        self._registered.clear()


def writes_of(subset: Subset, bucket_bytes: int, slots: int, there: int) -> Spans:
    """What rank 0's host writes to a rank: its arena has ``slots`` buckets, and the rank's memory ``there``."""
    if isinstance(subset.layout, DividedLayout):
        return subset.layout.needed(0, subset, bucket_bytes)
    return spans_of(subset, bucket_bytes, there, slots)


def packed_runs(runs: Iterable[Iterable[Run]]) -> bytes:
    """The runs of all buckets as 64-bit numbers."""
    return array.array("q", (number for those in runs for run in those for number in run)).tobytes()


def unpacked_runs(packed: bytes, bucket_bytes: int, buckets: int) -> list[list[Run]]:
    """The runs of each bucket, from `packed_runs`. Raises `TransferFailed` for any that lie in none."""
    numbers = array.array("q")
    found: list[list[Run]] = [[] for _ in range(buckets)]
    try:
        numbers.frombytes(packed)
        for run in map(Run, numbers[::3], numbers[1::3], numbers[2::3]):
            found[run.at // bucket_bytes].append(run)
    except (ValueError, IndexError) as error:
        raise TransferFailed(f"the runs that rank 0 sent cannot be read: {error}") from error
    return found
