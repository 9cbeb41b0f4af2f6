"""Calls from an engine's front end to its ranks: one at a time, each with a deadline; and the outcome of their replies.

A call is never abandoned: its late reply could be taken for that of the next call. A call that takes too long goes on
by itself, its caller gets an error, and the next call waits until it has ended. The error says which ranks' processes
have stopped or ended. Only processes on the front end's host and in its process namespace can be checked, and only
while their start time is still that of the rank.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal, TypeVar

import msgspec

from weightsync import errors
from weightsync.deadline import Deadline
from weightsync.errors import SEVERITY, ApplyFailed, EngineUnreachable, PushTimeout, WeightSyncError
from weightsync.memory import arenas
from weightsync.memory.processes import ENDED, process_state
from weightsync.protocol.http import Done, RankInfo, from_json
from weightsync.protocol.rank_replies import RankReply

Replies = Sequence[bytes | str]
_R = TypeVar("_R")

#: Seconds for the calls of a commit: after an abandoned call that may still load, it is unknown what the engine serves.
COMMIT_CALL_S: Final = 600.0
#: Seconds between two checks of the ranks' processes during a long call.
_LOOK_UP_S: Final = 1.0
#: Seconds before a busy rank is asked again.
_AGAIN_S: Final = 0.05
#: With fewer seconds left ranks are not asked again: their last answer says more than a timeout would.
_ASKING_S: Final = 1.0


class Turn:
    """A lock of an event loop. To take it while it is free costs next to nothing."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0
        self.release = self._lock.release

    async def acquire(self, timeout_s: float) -> None:
        """Take it. Raises `asyncio.TimeoutError` if that takes more than ``timeout_s`` seconds."""
        if not (self._waiting or self._lock.locked()):
            await self._lock.acquire()  # at once
            return
        self._waiting += 1
        try:
            await asyncio.wait_for(self._lock.acquire(), timeout_s)  # makes a task, and a timer
        finally:
            self._waiting -= 1


@asynccontextmanager
async def exclusive(turn: Turn, calls: Calls, what: str, deadline: Deadline) -> AsyncIterator[None]:
    """Serialise the requests that change an engine's state. Raises `PushTimeout` if the turn does not come in time."""
    try:
        await turn.acquire(deadline.left())
    except asyncio.TimeoutError as error:
        raise PushTimeout(
            f"{what}: another request has kept this engine busy for {deadline.seconds:g} s{calls.dead_ranks()}"
        ) from error
    try:
        yield
    finally:
        turn.release()


class Calls:
    """Calls to all ranks. ``raw(method, payload)`` makes one by the engine's own means, without a deadline.

    ``busy()`` says what the engine is busy with, if calls have to wait for it.
    """

    def __init__(self, raw: Callable[[str, bytes], Awaitable[Replies]], busy: Callable[[], str] = str):
        self._raw, self._busy = raw, busy
        self._turn = Turn()
        self._running = ""
        self._since = 0.0
        #: The ranks, as of the last `weightsync_open`.
        self.ranks: tuple[RankInfo, ...] = ()

    async def __call__(self, method: str, payload: bytes, timeout_s: float) -> Replies:
        """Call ``method`` on every rank; returns their `RankReply`. Raises `PushTimeout`, and engine errors.

        If a rank replies that it is busy, or has done a part, all are called again; they generate in between.
        """
        end = time.monotonic() + timeout_s
        while True:
            replies = await self._once(method, payload, max(end - time.monotonic(), 0.0))
            again = _again(replies)
            if again is None or (again == "later" and time.monotonic() + _ASKING_S >= end):
                return replies
            if time.monotonic() >= end:
                raise PushTimeout(f"the ranks did not finish {method} within {timeout_s:g} s{self._hindrance()}")
            await asyncio.sleep(_AGAIN_S if again == "later" else 0.0)

    async def _once(self, method: str, payload: bytes, timeout_s: float) -> Replies:
        start = time.monotonic()
        try:
            await self._turn.acquire(timeout_s)
        except asyncio.TimeoutError as error:
            raise PushTimeout(
                f"the ranks do not come to {method}: they are in {self._running} for "
                f"{time.monotonic() - self._since:.0f} s{self._hindrance()}"
            ) from error
        self._running, self._since = method, time.monotonic()
        call = asyncio.ensure_future(self._raw(method, payload))
        call.add_done_callback(self._ended)
        while not call.done() and (left_s := timeout_s - (time.monotonic() - start)) > 0:
            await asyncio.wait({call}, timeout=min(left_s, _LOOK_UP_S))
            if not call.done():
                self.check_alive()
        if not call.done():
            raise PushTimeout(
                f"the ranks did not answer {method} within {round(timeout_s, 1):g} s{self._hindrance()}",
                weights="unknown",
            )
        return call.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not call.cancelled():
            call.exception()  # retrieved, so that asyncio does not report it; the caller gets it too

    def check_alive(self) -> None:
        """Raise `EngineUnreachable` if a rank's process has ended, which engines notice much later."""
        if any(_seen(rank) == ENDED for rank in self.ranks):
            raise EngineUnreachable(f"the engine cannot go on{self.dead_ranks()}", weights="unknown")

    def _hindrance(self) -> str:
        busy = self._busy()
        return self.dead_ranks() or (f": {busy}" if busy else "")

    def dead_ranks(self) -> str:
        """Ranks whose processes are dead or stopped, as a suffix for an error message; empty if none."""
        seen = [f"rank {rank.rank} (process {rank.pid}) {found}" for rank in self.ranks if (found := _seen(rank))]
        return f": {', '.join(seen)}" if seen else ""


def _again(replies: Replies) -> Literal["at once", "later"] | None:
    """Whether, and when, a call is to be repeated."""
    try:
        found = [from_json(reply, RankReply) for reply in replies]
    except msgspec.MsgspecError:
        return None  # `collect` reports what is wrong
    asked = [reply for reply in found if reply.later]
    if not all(reply.at_once for reply in asked):
        return "later"
    failed = any(reply.error is not None and not reply.later for reply in found)
    return "at once" if asked and not failed else None


def _seen(rank: RankInfo) -> str:
    """As `process_state`, for a rank; empty if it is on another host or in another container."""
    here = (arenas.host_id(), arenas.process_space())
    return process_state(rank.pid, rank.started) if (rank.host, rank.process_space) == here else ""


def collect(replies: Sequence[bytes | str], kind: type[_R]) -> list[_R]:
    """Decode the replies of all ranks. Raises the worst error that a rank reported, with the messages of all."""
    decoded = [from_json(reply, RankReply) for reply in replies]
    errors_of = [(reply.error, reply.at_once) for reply in decoded if reply.error is not None]
    # A rank that has only done a part when another one fails has no error of its own.
    if failed := [error for error, at_once in errors_of if not at_once] or [error for error, _ in errors_of]:
        worst = max(failed, key=lambda reply: SEVERITY.index(reply.weights))
        messages = dict.fromkeys(reply.message for reply in failed)
        raise errors.named(worst.error)("; ".join(messages), weights=worst.weights)
    return [from_json(reply.body, kind) for reply in decoded]


def any_failed(replies: Sequence[bytes | str]) -> bool:
    """Whether any rank reports an error."""
    return any(from_json(reply, RankReply).error is not None for reply in replies)


def all_unchanged(replies: Sequence[bytes | str]) -> bool:
    """Whether every rank failed without writing anything."""
    errors_of_all = [from_json(reply, RankReply).error for reply in replies]
    return all(error is not None and error.weights == "unchanged" for error in errors_of_all)


def settle(replies: Sequence[bytes | str]) -> None:
    """Raise `ApplyFailed` unless every rank applied; its ``weights`` are dirty unless no rank wrote anything."""
    try:
        collect(replies, Done)
    except WeightSyncError as error:
        if all_unchanged(replies):
            raise
        raise ApplyFailed(str(error), weights="dirty") from error


async def restored(error: WeightSyncError, call: Calls, payload: bytes) -> WeightSyncError:
    """After a commit that failed on some rank, load the kept version on all: the error to raise.

    That is ``error``, or, if every rank serves the version before again, one with ``weights="unchanged"``.

    Engines call it while generation is stopped; ``payload`` is the `http.CommitRequest` that failed.
    """
    if error.weights == "unchanged":
        return error
    try:
        collect(await call("weightsync_restore", payload, COMMIT_CALL_S), Done)
    except WeightSyncError as second:
        return ApplyFailed(f"{error}; {second}", weights="dirty")
    return went_back(error)


def went_back(error: WeightSyncError) -> ApplyFailed:
    """``error`` of a commit, after which every rank has loaded the version before again."""
    return ApplyFailed(f"{error}; the version before was loaded again on every rank", weights="unchanged")
