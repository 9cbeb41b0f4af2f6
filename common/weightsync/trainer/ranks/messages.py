"""Small messages between the processes of one trainer, through the store of its torch.distributed process group.

No collective is started: the trainer's own groups are not touched, and nobody who is missing makes the others hang.
Every message has one writer and one reader, who removes it.

They are JSON under a prefix of ours, over a connection of our own. They are waited for by polling, in a thread, since a
store whose process is frozen does not time out.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import msgspec
import torch.distributed as dist

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import SourceError, TransferFailed, Weights, WeightSyncError
from weightsync.memory.processes import ENDED, process_state
from weightsync.protocol.handles import ShmHandle
from weightsync.protocol.http import Message
from weightsync.tensors.held import HeldShards
from weightsync.trainer.ranks.assembly import Orders, Work

_PREFIX: Final = "weightsync"
#: Between two looks at the store, at first and at most.
_FIRST_S, _MOST_S = 0.0005, 0.02
#: How often the processes of those who are missing are looked at.
_LOOK_UP_S: Final = 0.5
#: From a process's last closed connection until it is seen to have ended.
_ENDS_S: Final = 0.1
#: torch's store takes values of up to 8 MB; what is longer goes in parts.
_PART_CHARS: Final = 4 << 20

_T = TypeVar("_T")
_Calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class RemoteError(Message, frozen=True):
    """An error as another rank raises it again."""

    error: str
    message: str
    weights: Weights
    engines: dict[str, Weights]


class Greeting(Message, frozen=True):
    """rank -> 0: this rank was called, to do ``what``; ``nonce`` names its side of the conversation.

    It waits until ``moment``, by its host's `time.monotonic`. ``held`` is what it holds; None where that is what it
    held in the last push, or where nothing is to be sent.
    """

    nonce: str
    what: str
    pid: int
    host: str
    space: str
    moment: float
    held: tuple[HeldShards, ...] | None = None
    failure: RemoteError | None = None


class Welcome(Message, frozen=True, tag="welcome"):
    """0 -> rank: the name of the conversations to come, and who rank 0 is."""

    session: str
    pid: int
    space: str


class Fill(Message, frozen=True, tag="fill"):
    """0 -> rank: write into the arena; ``orders`` are those of the last push where absent.

    ``alive`` are the arenas that are still in use, ``algorithm`` the digest.
    """

    arena: str
    handle: ShmHandle
    alive: tuple[str, ...]
    algorithm: str
    orders: Orders | None = None


class Hash(Message, frozen=True, tag="hash"):
    """0 -> rank: all have written."""


class Assist(Message, frozen=True, tag="assist"):
    """0 -> rank: help a transport; ``body`` is its own message."""

    transport: str
    body: msgspec.Raw


class Outcome(Message, frozen=True, tag="over"):
    """0 -> rank: how it ended."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: RemoteError | None = None


class WorkDone(Message, frozen=True):
    """rank -> 0: what was asked for is done."""

    work: Work | None = None
    failure: RemoteError | None = None


ToRank = Welcome | Fill | Hash | Assist | Outcome


class Messages:
    """The messages of this process; ``pids`` are those of the others whose processes can be seen from here, by rank."""

    def __init__(self) -> None:
        self._theirs: Any = dist.distributed_c10d._get_default_store()
        self._ours: Any = None
        self.pids: dict[int, int] = {}
        self._calls: _Calls = queue.SimpleQueue()
        # In a thread, for a store whose process is frozen does not even time out.
        threading.Thread(target=_serve, args=(self._calls,), name="weightsync-store", daemon=True).start()
        #: Ends the thread; also runs when this is forgotten.
        self.close = weakref.finalize(self, self._calls.put, None)

    @property
    def _store(self) -> Any:
        if self._ours is None:
            # A connection of our own: while one waits for a reply, nobody else can ask over it.
            theirs = self._theirs.clone() if hasattr(self._theirs, "clone") else self._theirs
            self._ours = dist.PrefixStore(_PREFIX, theirs)
        return self._ours

    def put(self, key: str, body: bytes, deadline: Deadline, to: str) -> None:
        """Leave a message. Raises `TransferFailed`, `PushTimeout`."""
        text = body.decode()
        parts = [text[at : at + _PART_CHARS] for at in range(0, len(text), _PART_CHARS)]

        def put() -> None:
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, str(len(parts)))  # last: whoever finds this finds all

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
        """Remove a message that may not have been read."""
        self._call(lambda: self._remove(key), deadline, "the store of the process group")

    def unread(self, key: str, deadline: Deadline) -> bool:
        """Whether a message has not been read yet."""
        there: bool = self._call(lambda: self._store.check([key]), deadline, "the store of the process group")
        return there

    def take(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> None:
        """Wait for one message from each rank, by its key, until all are ``found``.

        Raises `TransferFailed` or `PushTimeout`, naming those who are missing, and what they were ``to`` do.
        """
        pause_s, looked = _FIRST_S, time.monotonic()
        while missing := self.look(keys, found, deadline, to):
            deadline.check(f"{self.named(missing)} {to}")
            if time.monotonic() - looked > _LOOK_UP_S:
                looked = time.monotonic()
                self.check(keys, found, deadline, to)
            time.sleep(min(pause_s, deadline.left()))
            pause_s = min(pause_s * 1.5, _MOST_S)

    def look(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> list[int]:
        """As `take`, of the messages that are there; the ranks whose is not."""
        missing = [rank for rank in keys if rank not in found]

        def look() -> None:
            for rank in missing:
                if (body := self._remove(keys[rank])) is not None:
                    found[rank] = body

        self._call(look, deadline, f"{self.named(missing)} {to}")
        return [rank for rank in missing if rank not in found]

    def check(self, keys: Mapping[int, str], found: dict[int, bytes], deadline: Deadline, to: str) -> None:
        """As `look`. Raises `TransferFailed` where a rank that is missing has ended."""
        ended = [rank for rank in keys if rank not in found and self.ended(rank)]
        if ended:
            missing = self.look(keys, found, deadline, to)  # it may have ended after its last word
            if ended := [rank for rank in ended if rank in missing]:
                raise TransferFailed(f"{self.named(ended)}: it was {to}")

    def named(self, ranks: list[int]) -> str:
        """Ranks as errors show them, with what can be seen of their processes."""
        return ", ".join(self._named(rank) for rank in ranks) or "the store of the process group"

    def _named(self, rank: int) -> str:
        if rank not in self.pids:
            return f"trainer rank {rank}"
        seen = self._fault(rank)
        return f"trainer rank {rank} (process {self.pids[rank]}{f', which {seen}' if seen else ''})"

    def runs(self, rank: int) -> bool:
        """Whether nothing is known against a rank's process."""
        return not self._fault(rank)

    def ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return self._fault(rank) == ENDED

    def _fault(self, rank: int) -> str:
        return process_state(self.pids[rank]) if rank in self.pids else ""

    def _call(self, call: Callable[[], _T], deadline: Deadline, waiting_for: str) -> _T:
        answer: Future[_T] = Future()
        self._calls.put((answer, call))
        while True:
            try:
                return answer.result(min(max(deadline.left(), 0.05), _LOOK_UP_S))
            except FutureTimeout:
                which = "" if self.runs(0) else f"; {self._named(0)}, may have it"
                deadline.check(f"the store of the process group, for {waiting_for}{which}")
            except RuntimeError as error:  # what torch raises where the process that has the store is gone
                time.sleep(_ENDS_S)
                ended = f"; {self._named(0)}" if self._fault(0) == ENDED else ""
                raise TransferFailed(
                    f"the store of the process group does not answer, waiting for {waiting_for}: {error}{ended}"
                ) from error


def _serve(calls: _Calls) -> None:
    while (asked := calls.get()) is not None:
        answer, call = asked
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)
        del asked, answer, call  # nothing is kept alive by waiting for the next


def remote_error_of(error: BaseException) -> RemoteError:
    """What another rank is told of an error."""
    if isinstance(error, WeightSyncError):
        return RemoteError(type(error).__name__, str(error), error.weights, error.engines)
    kind = SourceError if isinstance(error, Exception) else TransferFailed
    return RemoteError(kind.__name__, f"{type(error).__name__}: {error}", "unchanged", {})


def raised(failure: RemoteError, who: str = "") -> WeightSyncError:
    """The error that another rank told of, as an exception of this one."""
    kind = errors.named(failure.error)
    return kind(f"{who}{failure.message}", weights=failure.weights, engines=failure.engines)
