"""Several ranks of a trainer broadcast side by side: each has a group of its own with all engines' ranks, a lane.

Lane 0 is rank 0's. Bucket k travels in lane k modulo their number, where the ranks share the memory that holds the
stream.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed
from weightsync.protocol.http import Message
from weightsync.transports.control.sockets import LOOK_UP_S, local_address
from weightsync.transports.nccl.groups import FAILED, JOINED, MADE, Group, Joining, all_there
from weightsync.transports.nccl.messages import InitNcclGroup

#: Broadcasts of a lane that have been posted and whose end was not seen yet.
IN_FLIGHT: Final = 2
#: How often a broadcast is looked at.
LOOK_S: Final = 0.001
#: How long a thread that joins may take to notice that it is over.
_END_S: Final = 1.0


class Make(Message, frozen=True, tag="make"):
    """rank 0 -> rank: join the lane that is yours."""

    asked: InitNcclGroup


class Send(Message, frozen=True, tag="send"):
    """rank 0 -> rank: broadcast your buckets of the stream."""

    nbytes: int
    bucket_bytes: int
    timeout_s: float


class Place(NamedTuple):
    """Where a bucket lies in the stream."""

    number: int
    start: int
    end: int


def places(lane: int, lanes: int, nbytes: int, bucket_bytes: int) -> list[Place]:
    """The buckets that travel in a lane, in order; one of no bytes travels in none."""
    step = lanes * bucket_bytes
    starts = range(lane * bucket_bytes, nbytes, step)
    return [Place(start // bucket_bytes, start, min(start + bucket_bytes, nbytes)) for start in starts]


def group_of(asked: InitNcclGroup, lane: int) -> InitNcclGroup:
    """What is asked of a rank for one of the lanes."""
    return msgspec.structs.replace(asked, group_name=f"{asked.group_name}-{lane}") if lane else asked


def make(
    store: Any, asked: InitNcclGroup, here: str, names: Sequence[str], deadline: Deadline, look: Callable[[], None]
) -> Group:
    """Rank 0: its own lane, once the engines' ranks are in every one. ``names`` are theirs, in order.

    Raises `TransferFailed` or `PushTimeout`, by name, and what ``look``, which is called now and then, raises.
    """

    def wait(lane: int, kind: str) -> None:
        ours, looked = dist.PrefixStore(group_of(asked, lane).group_name, store), time.monotonic()

        def check(missing: Sequence[int]) -> None:
            nonlocal looked
            for number in missing:
                if ours.check([f"{FAILED}/{number}"]):
                    said = ours.get(f"{FAILED}/{number}").decode(errors="replace")
                    raise TransferFailed(f"{names[number - 1]} could not join the group: {said}")
            if time.monotonic() - looked > LOOK_UP_S:
                looked = time.monotonic()
                look()
            deadline.check(f"{', '.join(names[number - 1] for number in missing)} to join the group")

        all_there(ours, kind, range(1, asked.world_size), check)

    own = dist.PrefixStore(asked.group_name, store)
    own.set(f"{JOINED}/0", "1")
    wait(0, JOINED)
    try:
        group = Group(store, asked, 0, here, max(deadline.left(), 0.1))
    except RuntimeError as error:
        raise TransferFailed(f"the group could not be made: {error}") from error
    own.set(f"{MADE}/0", "1")
    try:
        for lane in range(asked.senders):
            wait(lane, MADE)
    except BaseException:
        group.drop()
        raise
    return group


class BroadcastHelper:
    """What a rank of the trainer, not rank 0, does for a broadcast. See `base.RankHelper`."""

    def __init__(self, rank: int):
        self._rank = rank
        self._joining: Joining | None = None
        self._lanes = 1

    def help(self, body: bytes, stream: torch.Tensor | None, check: Callable[[], None]) -> None:
        """Join a lane, or send what is to go there. Raises `TransferFailed`, `PushTimeout`."""
        message: Make | Send = msgspec.json.decode(body, type=Make | Send)
        if isinstance(message, Make):
            self.close()
            asked = group_of(message.asked, self._rank)
            here, deadline = local_address(asked.master_address), Deadline(asked.timeout_s)
            self._joining, self._lanes = Joining(asked, 0, here), asked.senders
            try:
                while not self._joining.done.wait(LOOK_UP_S):
                    check()
                    # The thread that joins cannot tell where a store's process is frozen.
                    deadline.check(f"the group {asked.group_name} to be made")
                self._joining.wait(deadline, self._joining.cancelled)
            except BaseException:
                self.close()
                raise
            return
        if stream is None or self._joining is None:
            raise TransferFailed(f"trainer rank {self._rank} has no lane, or nothing to send")
        works: deque[Any] = deque()
        try:
            self._send(message, stream, check, works)
        except BaseException:
            self.close(works)  # a group with a broadcast half-way is of no use any more
            raise

    def _send(self, message: Send, stream: torch.Tensor, check: Callable[[], None], works: deque[Any]) -> None:
        assert self._joining is not None
        deadline = Deadline(message.timeout_s)
        group = self._joining.wait(deadline, self._joining.cancelled)
        looked = time.monotonic()

        def end(number: int) -> None:
            nonlocal looked
            while not works[0].is_completed():
                deadline.check(f"bucket {number} to be broadcast by trainer rank {self._rank}")
                if time.monotonic() - looked > LOOK_UP_S:
                    looked = time.monotonic()
                    check()
                time.sleep(LOOK_S)
            try:
                works.popleft().wait()
            except RuntimeError as error:
                raise TransferFailed(
                    f"bucket {number} could not be broadcast by trainer rank {self._rank}: {error}"
                ) from error

        own = places(self._rank, self._lanes, message.nbytes, message.bucket_bytes)
        for index, place in enumerate(own):
            if len(works) == IN_FLIGHT:
                end(own[index - IN_FLIGHT].number)
            works.append(group.broadcast(stream[place.start : place.end], deadline.left()))
        while works:
            end(own[-len(works)].number)

    def close(self, works: Sequence[Any] = ()) -> None:
        """Leave the lane; idempotent."""
        if self._joining is not None:
            self._joining.leave(list(works))
            # A thread that is in torch while the interpreter ends would take the process down.
            self._joining.done.wait(_END_S)
            self._joining = None
