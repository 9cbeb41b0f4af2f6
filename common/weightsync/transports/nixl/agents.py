"""NIXL agents: made on a chosen device, with errors in words, memory they reach, and transfers that are reposted."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.util
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Literal

import torch

from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.tensors.subset import Subset
from weightsync.transports.nixl.messages import NixlHandle
from weightsync.transports.nixl.nics import nic_for

#: Between two looks at what is under way, which is also what keeps it going.
SPIN_S: Final = 0.0001
#: What both sides say when they connect.
WARM: Final = b"warm"

_LOCAL: Final = "NIXL_INIT_AGENT"
_CHECKSUM_BYTES: Final = 16
#: How long a thread may take to notice that it is over.
_END_S: Final = 1.0
_HINTS: Final = {
    "REMOTE_DISCONNECT": "the peer has ended, or the network between is down",
    "BACKEND": "the transport below NIXL failed; run with UCX_LOG_LEVEL=info on both sides, and see that a device of "
    "UCX_NET_DEVICES reaches the peer and that memory is not from an allocator with expandable segments",
    "NOT_FOUND": "the memory or the agent is not registered; push again",
    "INVALID_PARAM": "the addresses lie outside of what was registered; push again",
    "NOT_ALLOWED": "the peer's metadata belongs to another run of it; push again",
    "CANCELED": "the transfer was given up",
}


def available() -> bool:
    """Whether NIXL is installed here."""
    return importlib.util.find_spec("nixl") is not None


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise what NIXL raises as `TransferFailed`: ``what`` says who and which bytes."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:  # NIXL's own have no base but these
        raise TransferFailed(f"{what}: {explained(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0].startswith("nixl"):
            raise TransferFailed(f"{what}: {explained(error)}") from error
        raise


def explained(error: BaseException) -> str:
    """An error of NIXL, with what helps against it."""
    text = f"{type(error).__name__}: {error}"
    return text + next((f" ({hint})" for mark, hint in _HINTS.items() if mark in str(error).upper()), "")


def _checksum(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=_CHECKSUM_BYTES).digest()


class Agent:
    """One NIXL agent. ``device`` is where its memory is, ``rank`` spreads agents over network devices.

    It has no thread of its own, which would spin for ever on a core of the engine's: who waits keeps it going.
    """

    def __init__(self, device: torch.device, rank: int):
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise UnsupportedOption(f"nixl is not installed here ({error}): pip install 'weightsync[nixl]'") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, which is not ours
        self.name = f"weightsync-{os.getpid()}-{secrets.token_hex(6)}"
        self.nic = nic_for(device, rank)
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self._device_id = (device.index or 0) if device.type == "cuda" else 0
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        on = f" on {self.nic}" if self.nic else ""
        with translated(f"a NIXL agent could not be made{on}"):
            config = nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
            self.nixl: Any = nixl_agent(self.name, config)
            self.nixl.create_backend("UCX", {"device_list": self.nic} if self.nic else {})

    def metadata(self) -> bytes:
        """What others need to reach this agent and the memory it has registered, with a checksum before it."""
        found = bytes(self.nixl.get_agent_metadata())
        return _checksum(found) + found

    def register(self, memory: torch.Tensor) -> Any:
        """Make ``memory``, 1-D uint8, reachable; what `deregister` takes."""
        with translated(f"{memory.numel()} bytes on {memory.device} could not be registered"):
            return self.nixl.register_memory([(memory.data_ptr(), memory.numel(), self._device_id, "")], self.memory)

    def deregister(self, registered: Any) -> None:
        """Undo `register`."""
        with contextlib.suppress(Exception):  # what is left goes with the agent
            self.nixl.deregister_memory(registered)

    def handle(self, memory: torch.Tensor) -> NixlHandle:
        """What another agent needs to read ``memory``, which is registered."""
        return NixlHandle(
            agent=self.name,
            metadata=self.metadata(),
            address=memory.data_ptr(),
            nbytes=memory.numel(),
            device_id=self._device_id,
            memory="VRAM" if self.memory == "VRAM" else "DRAM",
        )

    def add_peer(self, agent: str, metadata: bytes, who: str) -> None:
        """Take another agent's metadata, beside what is known of it, and connect."""
        # NIXL takes what it is given at its word: metadata that are damaged end the process.
        checksum, metadata = metadata[:_CHECKSUM_BYTES], metadata[_CHECKSUM_BYTES:]
        if checksum != _checksum(metadata) or not metadata:
            raise TransferFailed(f"the NIXL metadata of {who} are not what NIXL made; install the same weightsync")
        with translated(f"{who} could not be reached over NIXL"):
            found = self.nixl.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != agent:
                raise TransferFailed(f"{who} said it was the agent {agent!r}, its metadata are those of {found!r}")
            self.nixl.make_connection(agent)

    def notifications(self) -> dict[str, list[bytes]]:
        """What other agents have sent since; looking keeps transfers going."""
        with translated("NIXL cannot go on"):
            found: dict[str, list[bytes]] = self.nixl.get_new_notifs()
            return found

    def notify(self, agent: str, notice: bytes, who: str) -> None:
        """Send a few bytes to another agent."""
        with translated(f"{who} could not be reached over NIXL"):
            self.nixl.send_notif(agent, notice)

    def forget(self, agent: str) -> None:
        """Drop what is known of another agent, and the connection."""
        with contextlib.suppress(Exception):  # it was not known
            self.nixl.remove_remote_agent(agent)


Spans = Sequence[Sequence[tuple[int, int, int]]]
"""Of every bucket, what is moved: (offset there, offset here, bytes)."""


def spans_of(parts: Subset, bucket_bytes: int, there: int, here: int) -> Spans:
    """What is kept of a stream whose buckets lie in so many slots there, and here."""
    return [
        [
            (at + (number % there - number) * bucket_bytes, at + (number % here - number) * bucket_bytes, nbytes)
            for at, nbytes in runs
        ]
        for number, runs in enumerate(parts.cut(bucket_bytes))
    ]


class Transfers:
    """Requests that move spans of ``memory`` to or from another agent's memory, made once and posted for every push."""

    def __init__(
        self,
        operation: Literal["READ", "WRITE"],
        agent: Agent,
        remote: NixlHandle,
        memory: torch.Tensor,
        spans: Spans,
    ):
        self._agent, self.remote = agent, remote
        self.memory = memory
        self._sides: list[Any] = []
        #: One a bucket; None for one of which nothing is moved.
        self._requests: list[Any] = []
        every = [span for those in spans for span in those]
        here = [(memory.data_ptr() + ours, nbytes, agent._device_id) for _, ours, nbytes in every]
        there = [(remote.address + theirs, nbytes, remote.device_id) for theirs, _, nbytes in every]
        ends = list(itertools.accumulate(map(len, spans)))
        if not every:
            self._requests = [None] * len(spans)
            return
        with translated(f"a {operation} with {remote.agent} could not be prepared"):
            self._sides = [
                agent.nixl.prep_xfer_dlist(_LOCAL, here, agent.memory),
                agent.nixl.prep_xfer_dlist(remote.agent, there, remote.memory),
            ]
            ours_, theirs_ = self._sides
            for end, those in zip(ends, spans, strict=True):
                at = list(range(end - len(those), end))
                made = agent.nixl.make_prepped_xfer(operation, ours_, at, theirs_, at) if at else None
                self._requests.append(made)

    def moves(self, bucket: int) -> bool:
        """Whether anything of a bucket is moved."""
        return self._requests[bucket] is not None

    def post(self, bucket: int, notice: bytes) -> None:
        """Begin to move a bucket; ``notice`` reaches the other agent when that is done."""
        if self.moves(bucket) and self._agent.nixl.transfer(self._requests[bucket], notice) == "ERR":
            raise RuntimeError("NIXL_ERR_BACKEND when posting")

    def done(self, bucket: int) -> bool:
        """Whether a bucket that was posted has been moved. Raises what NIXL raises."""
        if not self.moves(bucket):
            return True
        state = self._agent.nixl.check_xfer_state(self._requests[bucket])
        if state == "ERR":
            raise RuntimeError("NIXL_ERR_BACKEND")
        return bool(state == "DONE")

    def release(self) -> None:
        """Give the requests up, also those under way."""
        for held in (*self._requests, *self._sides):
            with contextlib.suppress(Exception):  # NIXL frees what is under way when that has ended
                held.release()
        self._requests.clear()
        self._sides.clear()


class ConnectionWarmUp(threading.Thread):
    """Sends a notice and waits for the answer: NIXL connects when it is first used."""

    #: A thread inside of NIXL when the interpreter ends would take the process down with a signal.
    running: ClassVar[set[ConnectionWarmUp]] = set()

    def __init__(self, agent: Agent, trainer: str, timeout_s: float):
        super().__init__(name="weightsync-warm-up", daemon=True)
        self._agent, self._trainer, self._over = agent, trainer, threading.Event()
        self._until = time.monotonic() + timeout_s
        self.running.add(self)
        self.start()

    def run(self) -> None:
        """Until the answer is here, or nobody waits for it any more."""
        with contextlib.suppress(WeightSyncError):  # the trainer, who waits too, tells
            self._agent.notify(self._trainer, WARM, "the trainer")
            while time.monotonic() < self._until and not self._over.is_set():
                if self._trainer in self._agent.notifications():
                    break
                time.sleep(SPIN_S)
        self.running.discard(self)

    def end(self) -> None:
        """Give it up."""
        self._over.set()
        self.join(_END_S)


@atexit.register
def _end_warm_ups() -> None:
    for thread in list(ConnectionWarmUp.running):
        thread.end()
