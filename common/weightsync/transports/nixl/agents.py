"""NIXL agents, their transfers, which are prepared once and posted in every push, and errors with hints."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import itertools
import logging
import os
import secrets
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, Literal

import torch

from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.tensors.subset import Subset
from weightsync.transports.nixl.messages import NixlHandle
from weightsync.transports.nixl.nics import nic_for

#: Seconds between two polls of the transfers under way; polling is also what drives them.
SPIN_S: Final = 0.0001
#: Transfers from or to one host under way at once: enough to hide the latency of one message.
IN_FLIGHT: Final = 2
#: The notification that both sides send to establish the connection.
WARM: Final = b"warm"

_LOCAL: Final = "NIXL_INIT_AGENT"
_CHECKSUM_BYTES: Final = 16
_GET_OVER_CUDA_IPC: Final = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
#: Seconds between two polls of the WRITEs that an agent is to end after.
_PENDING_S: Final = 0.05
#: Seconds that a thread has to notice that it was stopped.
_END_S: Final = 1.0
_HINTS: Final = {
    "REMOTE_DISCONNECT": "the peer has ended, or the network to it is down",
    "BACKEND": "the transport below NIXL failed; run with UCX_LOG_LEVEL=info on both sides, and check that a device of "
    "UCX_NET_DEVICES reaches the peer, and that no memory comes from an allocator with expandable segments",
    "NOT_FOUND": "the memory or the agent is not registered; push again",
    "INVALID_PARAM": "the addresses lie outside of the registered memory; push again",
    "NOT_ALLOWED": "the metadata is from before the peer restarted; push again",
    "CANCELED": "the transfer was cancelled",
}


def available() -> bool:
    """Whether NIXL is installed here."""
    return importlib.util.find_spec("nixl") is not None


@contextlib.contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn an error of NIXL raised inside into `TransferFailed`; ``what`` names the peer and the bytes."""
    try:
        yield
    except Exception as error:
        of_nixl = type(error).__module__.partition(".")[0].startswith("nixl")
        if not of_nixl and not isinstance(error, RuntimeError | ValueError | KeyError):
            raise
        traceback.clear_frames(error.__traceback__)  # those of NIXL hold its agent, which must end with `Agent.close`
        raise TransferFailed(f"{what}: {explained(error)}") from error


def explained(error: BaseException) -> str:
    """The text of an error of NIXL, with a hint at the remedy if one is known."""
    return hinted(f"{type(error).__name__}: {error}")


def hinted(text: str) -> str:
    """What NIXL says, with a hint at the remedy if one is known."""
    return text + next((f" ({hint})" for mark, hint in _HINTS.items() if mark in text.upper()), "")


def sealed(metadata: bytes) -> bytes:
    """An agent's metadata, after a checksum: NIXL does not validate them, and damaged bytes crash the process."""
    return hashlib.blake2b(metadata, digest_size=_CHECKSUM_BYTES).digest() + metadata


def unsealed(received: bytes, who: str) -> bytes:
    """The metadata of ``who`` that `sealed` was given. Raises `TransferFailed` if they are damaged."""
    metadata = received[_CHECKSUM_BYTES:]
    if received != sealed(metadata) or not metadata:
        raise TransferFailed(
            f"the NIXL metadata of {who} is damaged, or comes from another version of weightsync; install the same "
            "version on both sides"
        )
    return metadata


def _parameters(device: torch.device, nic: str) -> dict[str, str]:
    """The parameters of NIXL's UCX backend."""
    found = {"device_list": nic} if nic else {}
    if device.type == "cuda" and _GET_OVER_CUDA_IPC not in os.environ:
        # By default UCX reads from other processes' GPU memory over TCP unless the GPU has NVLink.
        found["engine_config"] = f"{_GET_OVER_CUDA_IPC.removeprefix('UCX_')}=on"
    return found


class Agent:
    """One NIXL agent. ``device`` is that of its memory; ``rank`` spreads agents over the network devices.

    It has no progress thread, which would spin for ever on a core of the engine: whoever waits drives the transfers.
    """

    def __init__(self, device: torch.device, rank: int):
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise UnsupportedOption(f"nixl is not installed here ({error}): pip install 'weightsync[nixl]'") from error
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to stdout, which belongs to the application
        self.name = f"weightsync-{os.getpid()}-{secrets.token_hex(6)}"
        self.nic = nic_for(device, rank)
        self.memory = "VRAM" if device.type == "cuda" else "DRAM"
        self._device_id = (device.index or 0) if device.type == "cuda" else 0
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        on = f" on {self.nic}" if self.nic else ""
        with translated(f"a NIXL agent could not be made{on}"):
            config = nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
            self.nixl: Any = nixl_agent(self.name, config)
            self.nixl.create_backend("UCX", _parameters(device, self.nic))
        #: Released WRITEs that are still under way.
        self.unfinished: list[Transfers] = []

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.nixl is None

    def close(self, held: Sequence[torch.Tensor] = ()) -> None:
        """End the agent, with its registrations: it no longer touches memory, for itself or for another agent.

        Idempotent. Call it before registered memory is freed that another agent may still use: without shared memory or
        RDMA, UCX emulates the READs and WRITEs of others, and an agent makes them whenever it is driven, even if the
        memory is gone. If a WRITE of its own is still under way, the agent ends after that, in a background thread that
        keeps the memory of the WRITE and ``held`` until then.
        """
        if self.nixl is not None:
            if self.unfinished:
                _LateEnd(self.nixl, self.unfinished, held)
            self.nixl, self.unfinished = None, []

    def metadata(self) -> bytes:
        """A checksum, followed by what others need to reach this agent and its registered memory."""
        return sealed(bytes(self.nixl.get_agent_metadata()))

    def register(self, memory: torch.Tensor) -> Any:
        """Register ``memory`` (1-D uint8) and return what `deregister` takes."""
        with translated(f"{memory.numel()} bytes on {memory.device} could not be registered"):
            return self.nixl.register_memory([(memory.data_ptr(), memory.numel(), self._device_id, "")], self.memory)

    def deregister(self, registered: Any) -> None:
        """Undo `register`."""
        with contextlib.suppress(Exception):  # anything left goes with the agent
            self.nixl.deregister_memory(registered)

    def handle(self, memory: torch.Tensor) -> NixlHandle:
        """The handle with which another agent reads or writes ``memory``, which is registered."""
        return NixlHandle(
            agent=self.name,
            metadata=self.metadata(),
            address=memory.data_ptr(),
            nbytes=memory.numel(),
            device_id=self._device_id,
            memory="VRAM" if self.memory == "VRAM" else "DRAM",
        )

    def add_peer(self, agent: str, metadata: bytes, who: str) -> None:
        """Load another agent's metadata, beside any loaded before, and connect. Raises `TransferFailed`."""
        metadata = unsealed(metadata, who)
        with translated(f"{who} could not be reached over NIXL"):
            found = self.nixl.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != agent:
                raise TransferFailed(f"{who} gave its agent as {agent!r}, but its metadata is that of {found!r}")
            self.nixl.make_connection(agent)

    def notifications(self) -> dict[str, list[bytes]]:
        """The notifications received since the last call, by agent; the call also drives transfers."""
        with translated("NIXL cannot continue"):
            found: dict[str, list[bytes]] = self.nixl.get_new_notifs()
            return found

    def notify(self, agent: str, notification: bytes, who: str) -> None:
        """Send a notification of a few bytes to another agent."""
        with translated(f"{who} could not be reached over NIXL"):
            self.nixl.send_notif(agent, notification)

    def forget(self, agent: str) -> None:
        """Drop another agent's metadata and the connection to it."""
        with contextlib.suppress(Exception):  # it was unknown
            self.nixl.remove_remote_agent(agent)


Spans = Sequence[Sequence[tuple[int, int, int]]]
"""For every bucket, the spans to transfer: (remote offset, local offset, bytes)."""


def spans_of(subset: Subset, bucket_bytes: int, there: int, here: int) -> Spans:
    """The spans of ``subset``, where buckets lie in ``there`` remote slots and in ``here`` local ones."""
    return [
        [
            (at + (number % there - number) * bucket_bytes, at + (number % here - number) * bucket_bytes, nbytes)
            for at, nbytes in runs
        ]
        for number, runs in enumerate(subset.cut(bucket_bytes))
    ]


class Transfers:
    """Transfers of spans of ``memory`` from or to another agent's memory: prepared once, posted in every push.

    Unusable after `release`.
    """

    def __init__(
        self,
        operation: Literal["READ", "WRITE"],
        agent: Agent,
        remote: NixlHandle,
        memory: torch.Tensor,
        spans: Spans,
    ):
        self._operation, self._agent, self.remote = operation, agent, remote
        self.memory = memory
        #: The buckets whose transfer was posted and has not ended.
        self._posted: set[int] = set()
        self._sides: list[Any] = []
        #: One for each bucket; None if nothing of the bucket is transferred.
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
        """Whether anything of a bucket is transferred."""
        return self._requests[bucket] is not None

    def post(self, bucket: int, notification: bytes) -> None:
        """Start the transfer of a bucket; ``notification`` reaches the other agent when it has ended."""
        if not self.moves(bucket):
            return
        if self._agent.nixl.transfer(self._requests[bucket], notification) == "ERR":
            raise RuntimeError("NIXL_ERR_BACKEND when posting")
        self._posted.add(bucket)

    def done(self, bucket: int) -> bool:
        """Whether the posted transfer of a bucket has ended. Raises the errors of NIXL."""
        if not self.moves(bucket):
            return True
        return self._ended(bucket, self._agent.nixl)

    def _ended(self, bucket: int, nixl: Any) -> bool:
        state = "ERR"
        try:
            state = nixl.check_xfer_state(self._requests[bucket])
        finally:
            if state != "PROC":
                self._posted.discard(bucket)
        if state == "ERR":
            raise RuntimeError("NIXL_ERR_BACKEND")
        return bool(state == "DONE")

    def under_way(self, nixl: Any) -> bool:
        """Whether any transfer has been posted and has neither arrived nor failed; ``nixl`` is NIXL's own agent."""
        for bucket in list(self._posted):
            with contextlib.suppress(Exception):  # it has failed
                self._ended(bucket, nixl)
        return bool(self._posted)

    def release(self) -> None:
        """Release all requests. READs under way are cancelled; WRITEs under way remain with the agent."""
        if self._operation == "WRITE" and self.under_way(self._agent.nixl):
            self._agent.unfinished.append(self)
        else:
            self.drop()

    def drop(self) -> None:
        """Release all requests, including those under way."""
        for held in (*self._requests, *self._sides):
            with contextlib.suppress(Exception):  # NIXL frees a request under way once it has ended
                held.release()
        self._requests.clear()
        self._sides.clear()


class ConnectionWarmUp(threading.Thread):
    """Sends each of a trainer's agents a notification and waits for the replies, because NIXL connects on first use."""

    #: A thread inside NIXL during interpreter shutdown would crash the process.
    running: ClassVar[set[ConnectionWarmUp]] = set()

    def __init__(self, agent: Agent, trainers: Sequence[str], timeout_s: float):
        super().__init__(name="weightsync-warm-up", daemon=True)
        self._agent, self._silent, self._cancelled = agent, set(trainers), threading.Event()
        self._until = time.monotonic() + timeout_s
        #: Notifications by agent: the replies, and what comes before the last of them, such as those of the first push.
        self.received: dict[str, list[bytes]] = {}
        self.running.add(self)
        self.start()

    def run(self) -> None:
        """Run until all replies are there, the time is up or `end` is called."""
        with contextlib.suppress(WeightSyncError):  # the trainer, which waits too, reports it
            for trainer in self._silent:
                self._agent.notify(trainer, WARM, "the trainer")
            while self._silent and time.monotonic() < self._until and not self._cancelled.is_set():
                for agent, notifications in self._agent.notifications().items():
                    self._silent.discard(agent)
                    self.received.setdefault(agent, []).extend(notifications)
                time.sleep(SPIN_S)
        self.running.discard(self)

    def end(self) -> None:
        """Stop the thread."""
        self._cancelled.set()
        self.join(_END_S)


class _LateEnd(threading.Thread):
    """Ends an agent once none of its WRITEs is under way.

    UCX completes a WRITE over TCP, at the latest when the agent ends. The completion uses the registration of the
    memory, which NIXL frees first when an agent ends: the process would crash, at once or later.
    """

    running: ClassVar[set[_LateEnd]] = set()

    def __init__(self, nixl: Any, unfinished: list[Transfers], held: Sequence[torch.Tensor]):
        super().__init__(name="weightsync-nixl-end", daemon=True)
        self._nixl, self._unfinished, self._held = nixl, unfinished, held
        self._exit = threading.Event()
        self.running.add(self)
        self.start()

    def run(self) -> None:
        """Drive the WRITEs until the last has arrived or failed, or the process exits."""
        while any(writes.under_way(self._nixl) for writes in self._unfinished):
            if self._exit.wait(_PENDING_S):
                return
        for writes in self._unfinished:
            writes.drop()
        self._unfinished, self._held, self._nixl = [], (), None
        self.running.discard(self)

    def end(self) -> None:
        """Stop the thread at exit, and leave the agent to the operating system."""
        self._exit.set()
        self.join(_END_S)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))


@atexit.register
def _end_threads() -> None:
    threads: list[ConnectionWarmUp | _LateEnd] = [*ConnectionWarmUp.running, *_LateEnd.running]
    for thread in threads:
        thread.end()
