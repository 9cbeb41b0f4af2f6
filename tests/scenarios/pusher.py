"""Trainers in other processes."""

from __future__ import annotations

import json
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.scenarios.nursery import Child, Nursery
from tests.scenarios.suspect import PATIENCE_S, Suspect
from tests.scenarios.trainer import describe_shared
from tests.scenarios.weights import CONTENTS, TinyWeights
from tools import servers

#: Ranks of the trainer that is on two hosts.
RANKS = 3
#: Seconds between two looks for ranks that have stopped.
_LOOK_S = 0.05


class Pusher:
    """A trainer in other processes: a single one that maps our parameters, or ranks with shards."""

    def __init__(self, nursery: Nursery, scratch: Path, size: int):
        self._nursery = nursery
        self.ranks = [Suspect(scratch / f"pusher-{size}-{rank}") for rank in range(size)]
        self.children: list[Child] = []
        self.channels: list[socket.socket] = []

    def start(self, weights: TinyWeights, shared: dict[str, torch.Tensor]) -> None:
        """Fork the processes unless they are alive."""
        if self.children and all(child.alive() for child in self.children):
            return
        self.kill()
        port, size = servers.free_port(), len(self.ranks)
        for rank, suspect in enumerate(self.ranks):
            suspect.cancel()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self.children.append(self._nursery.start("trainer", suspect.fault_file, [theirs.fileno()]))
            self.channels.append(ours)
            if size == 1:
                described, files = describe_shared(shared)
                socket.send_fds(ours, [json.dumps({"do": "take_parameters", "tensors": described}).encode()], files)
            else:
                folders = [str(weights.folder(content)) for content in range(CONTENTS)]
                self._tell(ours, do="group", port=port, rank=rank, size=size, folders=folders)
        for channel in self.channels:
            self._hear(channel, PATIENCE_S)

    def push(self, hosts: Sequence[str] = (), *, timeout_s: float, **order: Any) -> dict[int, dict]:
        """Push, with new senders on ``hosts``, one for each rank, or those of the push before if there are none.

        Returns the outcome of each rank that has not ended. Ranks that were stopped go on when all others have ended.
        Raises `TimeoutError`.
        """
        for rank, channel in enumerate(self.channels):
            self._tell(channel, do="push", **({"host": hosts[rank]} if hosts else {}), **order)
        end, said, missing = time.monotonic() + timeout_s, dict[int, dict](), dict(enumerate(self.channels))
        while missing:
            ready, _, _ = select.select(list(missing.values()), [], [], _LOOK_S)
            for rank in [rank for rank, channel in missing.items() if channel in ready]:
                said[rank] = self._hear(missing.pop(rank), PATIENCE_S)
            if missing and all(self.children[rank].stopped() for rank in missing):
                self.go_on()  # what they were stopped in has ended without them
            if missing and time.monotonic() > end:
                raise TimeoutError(f"ranks {sorted(missing)} have not ended")
        return {rank: one for rank, one in said.items() if one}

    def go_on(self) -> None:
        """Have ranks go on that were stopped."""
        for child in self.children:
            child.send(signal.SIGCONT)

    def close(self) -> None:
        """Close the senders."""
        self._ask("close")

    def left(self) -> list[str]:
        """What each process still uses of its senders, once they are closed."""
        said = [answer.get("left", "") for answer in self._ask("left")]
        return [f"rank {rank} of {len(said)} has {one}" for rank, one in enumerate(said) if one]

    def _ask(self, do: str) -> list[dict]:
        """What each process answers, with nothing from those that have ended."""
        for channel in self.channels:
            self._tell(channel, do=do)
        return [self._hear(channel, PATIENCE_S) for channel in self.channels]

    @staticmethod
    def _tell(channel: socket.socket, **order: Any) -> None:
        with suppress(OSError):
            channel.send(json.dumps(order).encode())

    @staticmethod
    def _hear(channel: socket.socket, timeout_s: float) -> dict:
        channel.settimeout(timeout_s)
        try:
            return json.loads(channel.recv(1 << 20) or b"{}")
        except ConnectionError:
            return {}

    def kill(self) -> None:
        """Kill all processes."""
        while self.children:
            self.children.pop().close()
        while self.channels:
            self.channels.pop().close()
