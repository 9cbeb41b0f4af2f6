"""Small messages between the processes of one trainer, through the store of its torch.distributed process group.

No collective is started: the trainer's own groups are not touched, and a missing rank does not make the others hang.
Every message has one writer and one reader, which removes it.

Messages are JSON, under a prefix and over a connection that only weightsync uses. The store is polled from a thread,
since a request to a store whose process is frozen does not time out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from weightsync import errors
from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.errors import SourceError, TransferFailed, Weights, WeightSyncError
from weightsync.memory.processes import ENDED, process_state
from weightsync.protocol.handles import ShmHandle
from weightsync.protocol.http import Message
from weightsync.tensors.held import HeldShards
from weightsync.trainer.ranks.assembly import Orders, Work
from weightsync.trainer.ranks.assignment import Assignment
from weightsync.transports.control.sockets import local_address

_PREFIX: Final = "weightsync"
#: Seconds between two polls of the store, at first and at most.
_FIRST_S, _MOST_S = 0.0005, 0.02
#: Seconds between two checks of the processes of missing ranks.
_CHECK_S: Final = 0.5
#: Seconds from the last connection that a process closes until its end is visible.
_ENDS_S: Final = 0.1
#: torch's store takes values of up to 8 MB; longer messages are sent in parts of this many characters.
_PART_CHARS: Final = 4 << 20

_T = TypeVar("_T")


class RemoteError(Message, frozen=True):
    """An error of one rank, which another rank raises again."""

    error: str
    message: str
    weights: Weights
    engines: dict[str, Weights]
    phase: str = ""


class Greeting(Message, frozen=True):
    """rank -> 0: this rank has been called to do ``what``; ``nonce`` names its conversation.

    Its deadline is ``moment``, by its host's `time.monotonic`, ``left_s`` seconds after the greeting. ``held`` is what
    it holds; None if that is the same as in the last push, or if the call sends nothing. ``options`` are those of a
    sender that is being built, and ``address`` is that of its host on the way to the store.
    """

    nonce: str
    what: str
    pid: int
    host: str
    space: str
    moment: float
    held: tuple[HeldShards, ...] | None = None
    failure: RemoteError | None = None
    options: dict[str, str] = msgspec.field(default_factory=dict)
    left_s: float = 0.0
    address: str = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """0 -> rank: the session that names later conversations, and rank 0's process."""

    session: str
    pid: int
    space: str


class Provide(Message, frozen=True, tag="provide"):
    """0 -> lowest rank of another host: make an arena for its ranks. It has the name of rank 0's, see `Fill`."""

    arena: str
    nbytes: int
    alive: tuple[str, ...]


class Fill(Message, frozen=True, tag="fill"):
    """0 -> rank: write into the arena; without ``orders``, those of the last push hold.

    ``arena`` is the name of rank 0's; ``handle`` is that of the arena on the rank's host, None if that host provides
    nothing. ``alive`` names the arenas that are still in use, ``algorithm`` is the digest, empty for none.
    """

    arena: str
    handle: ShmHandle | None
    alive: tuple[str, ...]
    algorithm: str
    orders: Orders | None = None


class Hash(Message, frozen=True, tag="hash"):
    """0 -> rank: all ranks have written; hash."""


class Compare(Message, frozen=True, tag="compare"):
    """0 -> rank: hash ``copies``, which other ranks hold too, with the digest ``algorithm``."""

    algorithm: str
    copies: tuple[Assignment, ...]


class Iterate(Message, frozen=True, tag="iterate"):
    """0 -> rank: read everything that the iterator yields, so that rank 0's can yield it."""


class Release(Message, frozen=True, tag="release"):
    """0 -> rank: the tensors of all ranks are read; whoever waits for that in `sender.Sender.push_async` may go on."""


class Assist(Message, frozen=True, tag="assist"):
    """0 -> rank: help ``transport``; ``body`` is that transport's own message."""

    transport: str
    body: msgspec.Raw


class Outcome(Message, frozen=True, tag="over"):
    """0 -> rank: how the call ended."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: RemoteError | None = None


class WorkDone(Message, frozen=True):
    """rank -> 0: the request is done, or has failed. ``left_s`` is what is left of the rank's deadline.

    ``body`` is a transport's own message, see `Assist`.
    """

    work: Work | None = None
    failure: RemoteError | None = None
    handle: ShmHandle | None = None
    left_s: float | None = None
    body: msgspec.Raw = msgspec.Raw(b"null")


ToRank = Welcome | Provide | Fill | Hash | Compare | Iterate | Release | Assist | Outcome


class Messages:
    """Sends and receives this process's messages; ``pids``: the other ranks' processes that are visible from here.

    ``group`` names the process group, empty for the default one.
    """

    def __init__(self, group: str) -> None:
        self._prefix = f"{_PREFIX}/{group}" if group else _PREFIX
        self._group_store: Any = dist.distributed_c10d._get_default_store()
        self._own_store: Any = None
        self.pids: dict[int, int] = {}
        # In a thread, since a request to a store whose process is frozen does not time out.
        self._thread = DaemonThread("weightsync-store")
        #: Ends the thread.
        self.close = self._thread.close

    def address(self) -> str:
        """The address of this host on the way to the store; empty if that is unknown, or not on the network."""
        store = self._group_store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        try:
            return local_address(store.host)
        except (AttributeError, TransferFailed):
            return ""

    @property
    def _store(self) -> Any:
        if self._own_store is None:
            # Separate connections: while one waits for a reply, no other request can use it.
            group_store = self._group_store.clone() if hasattr(self._group_store, "clone") else self._group_store
            self._own_store = dist.PrefixStore(self._prefix, group_store)
        return self._own_store

    def put(self, key: str, body: bytes, deadline: Deadline, to: str) -> None:
        """Write a message; ``to`` is what an error says was waited for. Raises `TransferFailed` or `PushTimeout`."""
        text = body.decode()
        parts = [text[at : at + _PART_CHARS] for at in range(0, len(text), _PART_CHARS)]

        def put() -> None:
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, str(len(parts)))  # last: a reader that finds this finds every part

        self._call(put, deadline, to)

    def _remove(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        body = b"".join(self._store.get(name) for name in names)
        for name in (key, *names):
            self._store.delete_key(name)
        return body

    def drop(self, key: str, deadline: Deadline) -> None:
        """Remove a message, whether it was read or not."""
        self._call(lambda: self._remove(key), deadline, "the store of the process group")

    def unread(self, key: str, deadline: Deadline) -> bool:
        """Whether a message is there and has not been read yet."""
        there: bool = self._call(lambda: self._store.check([key]), deadline, "the store of the process group")
        return there

    def take(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> None:
        """Wait for one message from each rank, by its key, and add them to ``found``.

        Raises `TransferFailed` or `PushTimeout` that names the missing ranks, and what each was ``to`` do.
        """
        pause_s, checked = _FIRST_S, time.monotonic()
        while missing := self.poll(keys, found, deadline, to):
            deadline.check(f"{self.describe(missing)} {to}")
            if time.monotonic() - checked > _CHECK_S:
                checked = time.monotonic()
                self.check(keys, found, deadline, to)
            time.sleep(min(pause_s, deadline.left()))
            pause_s = min(pause_s * 1.5, _MOST_S)

    def poll(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> list[int]:
        """As `take`, without waiting; return the ranks whose message is missing."""
        missing = [rank for rank in keys if rank not in found]

        def read() -> None:
            for rank in missing:
                if (body := self._remove(keys[rank])) is not None:
                    found[rank] = body

        self._call(read, deadline, f"{self.describe(missing)} {to}")
        return [rank for rank in missing if rank not in found]

    def check(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> None:
        """As `poll`. Raises `TransferFailed` if the process of a missing rank has ended."""
        ended = [rank for rank in keys if rank not in found and self.ended(rank)]
        if ended:
            missing = self.poll(keys, found, deadline, to)  # it may have ended after its last message
            if ended := [rank for rank in ended if rank in missing]:
                raise TransferFailed(f"{self.describe(ended)}: it was {to}")

    def describe(self, ranks: list[int]) -> str:
        """Ranks for an error message, with the state of their processes as far as visible."""
        return ", ".join(self._describe(rank) for rank in ranks) or "the store of the process group"

    def _describe(self, rank: int) -> str:
        if rank not in self.pids:
            return f"trainer rank {rank}"
        fault = self._fault(rank)
        return f"trainer rank {rank} (process {self.pids[rank]}{f', which {fault}' if fault else ''})"

    def runs(self, rank: int) -> bool:
        """Whether a rank's process is not known to have ended or to be frozen."""
        return not self._fault(rank)

    def ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return self._fault(rank) == ENDED

    def _fault(self, rank: int) -> str:
        return process_state(self.pids[rank]) if rank in self.pids else ""

    def _call(self, call: Callable[[], _T], deadline: Deadline, waiting_for: str) -> _T:
        answer = self._thread.submit(call)
        while True:
            try:
                return answer.result(min(max(deadline.left(), 0.05), _CHECK_S))
            except FutureTimeout:
                which = "" if self.runs(0) else f"; {self._describe(0)} may hold the store"
                deadline.check(f"the store of the process group, for {waiting_for}{which}")
            except RuntimeError as error:  # torch raises it if the process that has the store is gone
                time.sleep(_ENDS_S)
                ended = f"; {self._describe(0)}" if self._fault(0) == ENDED else ""
                raise TransferFailed(
                    f"the store of the process group does not answer, waiting for {waiting_for}: {error}{ended}"
                ) from error


def remote_error_of(error: BaseException) -> RemoteError:
    """An error in the form in which it is sent to another rank."""
    if isinstance(error, WeightSyncError):
        return RemoteError(type(error).__name__, error.message, error.weights, error.engines, error.phase)
    kind = SourceError if isinstance(error, Exception) else TransferFailed
    return RemoteError(kind.__name__, f"{type(error).__name__}: {error}", "unchanged", {})


def as_exception(failure: RemoteError, prefix: str = "") -> WeightSyncError:
    """The error that another rank sent, as an exception to raise here."""
    kind = errors.named(failure.error)
    error = kind(f"{prefix}{failure.message}", weights=failure.weights, engines=failure.engines)
    error.phase = failure.phase
    return error
