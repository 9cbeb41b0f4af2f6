"""The bare libraries below the transports, with which the benchmark compares the transports.

Both processes use the same classes, the trainer as rank 0 or as the owner of the memory. All on the CPU and on the
loopback interface alone; nothing but torch, NIXL and the C library is called while a clock runs.
"""

from __future__ import annotations

import base64
import ctypes
import socket
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import xxhash

#: Seconds between two polls by the process that drives an agent.
LOOK_S = 0.0001
#: Requests or broadcasts under way at once.
IN_FLIGHT = 2
_LOOPBACK = "127.0.0.1"
_LIMIT = timedelta(seconds=300)

Requests = list[Any]


def digest_of(parts: Sequence[torch.Tensor]) -> int:
    """A digest of the concatenated bytes of 1-D uint8 tensors."""
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part.numpy().data)
    return found.intdigest()


def memcpy(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of one copy by the C library, in one thread."""
    start = time.perf_counter()
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return time.perf_counter() - start


class Pieces(NamedTuple):
    """The pieces of a transfer: ``count`` pieces of ``nbytes``, ``per_request`` of them in each request.

    At the trainer they are ``stride`` bytes apart from ``start`` on, at the rank without gaps. If neither side has
    gaps, NIXL makes one descriptor of all pieces of a request.
    """

    nbytes: int
    count: int
    per_request: int
    stride: int
    start: int = 0


class Agent:
    """A NIXL agent without a progress thread, with one registered piece of memory. ``name`` is trainer or rank."""

    def __init__(self, name: Literal["trainer", "rank"], memory: torch.Tensor):
        from nixl._api import nixl_agent, nixl_agent_config

        self._name, self._memory = name, memory
        self._nixl: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._nixl.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")
        self._peer: dict[str, Any] = {}
        self._sides: list[Any] = []
        self.drive = self._nixl.get_new_notifs

    def card(self) -> dict[str, Any]:
        """What the other agent needs for `connect`, for JSON."""
        metadata = base64.b64encode(self._nixl.get_agent_metadata()).decode()
        return {"name": self._name, "metadata": metadata, "address": self._memory.data_ptr()}

    def connect(self, card: dict[str, Any]) -> None:
        """Connect to the other agent."""
        self._peer = card
        self._nixl.add_remote_agent(base64.b64decode(card["metadata"]))
        self._nixl.make_connection(card["name"])

    def prepare(self, operation: Literal["READ", "WRITE"], pieces: Pieces) -> Requests:
        """Prepare the requests that move the pieces from the trainer to the rank; they can be run repeatedly."""
        here, there = self._memory.data_ptr(), self._peer["address"]
        trainer, rank = (here, there) if self._name == "trainer" else (there, here)
        sides = {
            "trainer": [(trainer + pieces.start + n * pieces.stride, pieces.nbytes, 0) for n in range(pieces.count)],
            "rank": [(rank + n * pieces.nbytes, pieces.nbytes, 0) for n in range(pieces.count)],
        }
        ours = self._nixl.prep_xfer_dlist("NIXL_INIT_AGENT", sides[self._name], "DRAM")
        theirs = self._nixl.prep_xfer_dlist(self._peer["name"], sides[self._peer["name"]], "DRAM")
        self._sides += [ours, theirs]
        requests = []
        for first in range(0, pieces.count, pieces.per_request):
            indices = list(range(first, min(first + pieces.per_request, pieces.count)))
            requests.append(self._nixl.make_prepped_xfer(operation, ours, indices, theirs, indices))
        return requests

    def run(self, requests: Requests, look_s: float = 0.0) -> float:
        """Post the requests, two at a time, polling every ``look_s`` seconds; returns the seconds for all of them."""
        under_way: deque[Any] = deque()
        start = time.perf_counter()
        for request in requests:
            if len(under_way) == IN_FLIGHT:
                self._wait(under_way.popleft(), look_s)
            if self._nixl.transfer(request) == "ERR":
                raise RuntimeError("NIXL refused a request")
            under_way.append(request)
        while under_way:
            self._wait(under_way.popleft(), look_s)
        return time.perf_counter() - start

    def _wait(self, request: Any, look_s: float) -> None:
        while (state := self._nixl.check_xfer_state(request)) != "DONE":
            if state == "ERR":
                raise RuntimeError("a NIXL transfer failed")
            if look_s:
                time.sleep(look_s)


def listen() -> tuple[Any, int]:
    """A store for a group of two on the loopback interface, and its port."""
    listening = socket.create_server((_LOOPBACK, 0))
    port = int(listening.getsockname()[1])
    store = dist.TCPStore(
        _LOOPBACK, port, None, True, _LIMIT, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


class Broadcast:
    """A gloo group of the trainer, which is rank 0, and one rank. Construction blocks until both construct theirs."""

    def __init__(self, rank: int, port: int, store: Any = None):
        if store is None:
            store = dist.TCPStore(_LOOPBACK, port, None, False, _LIMIT, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = _LIMIT
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("bare", store), rank, 2, options)

    def run(self, memory: torch.Tensor, bucket_bytes: int) -> None:
        """Broadcast all of ``memory`` from rank 0 in buckets, two at a time."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        under_way: deque[Any] = deque()
        for bucket in torch.split(memory, bucket_bytes):
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().wait()
            under_way.append(self._group.broadcast([bucket], options))
        while under_way:
            under_way.popleft().wait()
