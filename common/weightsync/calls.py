"""Calls from an engine's front end to its ranks: one at a time, each with a deadline, none ever given up half-way; and
what the ranks' replies come to.

An engine that is told to forget a call may find the late reply in the place of the next one. So a call that takes too
long is left to end by itself; who waited for it is told, and the next call waits for its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from weightsync import errors, staging
from weightsync.errors import SEVERITY, ApplyFailed, EngineUnreachable, PushTimeout, WeightSyncError
from weightsync.wire import Done, RankInfo, RankReply, from_json

Replies = Sequence[bytes | str]
_R = TypeVar("_R")

#: For calls of a commit: giving up on one that may still load leaves nobody knowing what is served.
COMMIT_CALL_S: Final = 600.0
#: How often the ranks' processes are looked at while a call takes long.
_LOOK_UP_S: Final = 1.0
ENDED: Final = "has ended"


class Calls:
    """``raw(method, payload)`` reaches every rank, over the engine's own means and without a deadline."""

    def __init__(self, raw: Callable[[str, bytes], Awaitable[Replies]]):
        self._raw = raw
        self._turn = asyncio.Lock()
        self._running = ""
        self._since = 0.0
        #: The ranks as they last introduced themselves.
        self.ranks: tuple[RankInfo, ...] = ()

    async def __call__(self, method: str, payload: bytes, timeout_s: float) -> Replies:
        """Every rank's `wire.RankReply`. Raises `PushTimeout` and whatever the engine raises."""
        start = time.monotonic()
        try:
            await asyncio.wait_for(self._turn.acquire(), timeout_s)
        except asyncio.TimeoutError as error:
            raise PushTimeout(
                f"the ranks do not come to {method}: they are in {self._running} for "
                f"{time.monotonic() - self._since:.0f} s{self.trouble()}"
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
                f"the ranks did not answer {method} within {timeout_s:g} s{self.trouble()}", weights="unknown"
            )
        return call.result()

    def _ended(self, call: asyncio.Future[Any]) -> None:
        self._turn.release()
        if not call.cancelled():
            call.exception()  # told to whoever still waits; asyncio need not complain that nobody did

    def check_alive(self) -> None:
        """Raise `EngineUnreachable` if a rank's process has ended; engines themselves notice much later."""
        if any(_seen(rank) == ENDED for rank in self.ranks):
            raise EngineUnreachable(f"the engine cannot go on{self.trouble()}", weights="unknown")

    def trouble(self) -> str:
        """What can be seen of ranks that cannot answer, to be appended to an error."""
        seen = [f"rank {rank.rank} (process {rank.pid}) {found}" for rank in self.ranks if (found := _seen(rank))]
        return f": {', '.join(seen)}" if seen else ""


def _seen(rank: RankInfo) -> str:
    """As `fault`; empty for a rank on another host or in another container, where its number is somebody else's."""
    here = (staging.host_id(), staging.process_space())
    return fault(rank.pid, rank.started) if (rank.host, rank.process_space) == here else ""


def started(pid: int) -> int:
    """When a process was started, in clock ticks since its host was; 0 if there is none of this number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # its name, in brackets, may hold spaces and brackets


def fault(pid: int, since: int = 0) -> str:
    """What can be seen of a process that does not answer; empty if it runs.

    ``since`` is when it was `started`: a process of its number that was started at another time is not the same one.
    """
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ENDED
    if status == psutil.STATUS_ZOMBIE or (since and started(pid) != since):
        return ENDED
    return "is stopped" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else ""


def collect(replies: Sequence[bytes | str], kind: type[_R]) -> list[_R]:
    """The replies of all ranks. Raises what the worst of the failed ranks reported, with every message."""
    decoded = [from_json(reply, RankReply) for reply in replies]
    failed = [reply.error for reply in decoded if reply.error is not None]
    if failed:
        worst = max(failed, key=lambda reply: SEVERITY.index(reply.weights))
        messages = dict.fromkeys(reply.message for reply in failed)
        raise errors.named(worst.error)("; ".join(messages), weights=worst.weights)
    return [from_json(reply.body, kind) for reply in decoded]


def settle(replies: Sequence[bytes | str]) -> None:
    """Return if every rank applied. Else raise; ``weights`` are dirty unless no rank wrote anything."""
    try:
        collect(replies, Done)
    except WeightSyncError as error:
        decoded = [from_json(reply, RankReply) for reply in replies]
        if all(reply.error is not None and reply.error.weights == "unchanged" for reply in decoded):
            raise
        raise ApplyFailed(str(error), weights="dirty") from error
