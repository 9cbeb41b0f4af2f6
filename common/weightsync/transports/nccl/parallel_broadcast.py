"""Parallel broadcast: several trainer ranks send at once, each in a process group of its own with all engine ranks.

Of n ranks that share the memory that holds the stream, rank k modulo n broadcasts bucket k. On several hosts one rank
of each broadcasts what its host holds of every bucket.
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
from weightsync.protocol import codec
from weightsync.protocol.http import Message
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Layout
from weightsync.transports.base import check_cancelled
from weightsync.transports.control.sockets import LOOK_UP_S, local_address
from weightsync.transports.nccl.groups import FAILED, JOINED, MADE, Group, Joining, await_keys
from weightsync.transports.nccl.messages import InitNcclGroup

#: Broadcasts of one trainer rank that are under way at once.
IN_FLIGHT: Final = 2
#: Seconds between two polls of a broadcast.
LOOK_S: Final = 0.001
#: Seconds that a joining thread has to notice that it was cancelled.
_END_S: Final = 1.0


class Place(NamedTuple):
    """What is broadcast of bucket ``number``: bytes ``start`` to ``end``, exclusive, of the sender's arena."""

    number: int
    start: int
    end: int


class Make(Message, frozen=True, tag="make"):
    """rank 0 -> rank: join your group, that of sender ``number``."""

    asked: InitNcclGroup
    number: int


class Send(Message, frozen=True, tag="send"):
    """rank 0 -> rank: broadcast these ``places`` of your arena, in order, within ``timeout_s``."""

    places: tuple[Place, ...]
    timeout_s: float


def places(layout: Layout, bucket_bytes: int, sender: int, senders: int) -> tuple[Place, ...]:
    """What one of several trainer ranks broadcasts, in order; nothing of a bucket of which it would be no bytes."""
    if isinstance(layout, DividedLayout):
        spans = [layout.span(sender, number, bucket_bytes) for number in range(layout.buckets(bucket_bytes))]
        return tuple(Place(number, *span) for number, span in enumerate(spans) if span[0] < span[1])
    starts = range(sender * bucket_bytes, layout.nbytes, senders * bucket_bytes)
    return tuple(Place(start // bucket_bytes, start, min(start + bucket_bytes, layout.nbytes)) for start in starts)


def group_of(init: InitNcclGroup, sender: int) -> InitNcclGroup:
    """The handshake for the group of one trainer rank: ``init`` with the name of that group."""
    return msgspec.structs.replace(init, group_name=f"{init.group_name}-{sender}") if sender else init


def make(
    store: Any, init: InitNcclGroup, here: str, names: Sequence[str], deadline: Deadline, watch: Callable[[], None]
) -> Group:
    """Make rank 0's own group, and wait until every engine rank has joined the group of every trainer rank.

    ``names`` are the engine ranks for errors, in group order; ``watch`` is called regularly and may raise. Raises
    `TransferFailed` or `PushTimeout`, naming the ranks.
    """

    def wait(sender: int, kind: str) -> None:
        group_store, watched = dist.PrefixStore(group_of(init, sender).group_name, store), time.monotonic()

        def check(missing: Sequence[int]) -> None:
            nonlocal watched
            for number in missing:
                if group_store.check([f"{FAILED}/{number}"]):
                    reason = group_store.get(f"{FAILED}/{number}").decode(errors="replace")
                    raise TransferFailed(f"{names[number - 1]} could not join the group: {reason}")
            if time.monotonic() - watched > LOOK_UP_S:
                watched = time.monotonic()
                watch()
            deadline.check(f"{', '.join(names[number - 1] for number in missing)} to join the group")

        await_keys(group_store, kind, range(1, init.world_size), check)

    own = dist.PrefixStore(init.group_name, store)
    own.set(f"{JOINED}/0", "1")
    wait(0, JOINED)
    try:
        group = Group(store, init, 0, here, max(deadline.left(), 0.1))
    except RuntimeError as error:
        raise TransferFailed(f"the group could not be made: {error}") from error
    own.set(f"{MADE}/0", "1")
    try:
        for sender in range(init.senders):
            wait(sender, MADE)
    except BaseException:
        group.drop()
        raise
    return group


class BroadcastHelper:
    """Broadcasts the buckets of a trainer rank other than rank 0, see `base.RankHelper`."""

    def __init__(self, rank: int):
        self._rank = rank
        self._joining: Joining | None = None

    def help(self, body: bytes, stream: torch.Tensor | None, interrupted: Callable[[], bool]) -> None:
        """Join this rank's group, or broadcast its buckets. Raises `TransferFailed` or `PushTimeout`."""
        message: Make | Send = codec.json_decoder(Make | Send).decode(body)
        if isinstance(message, Make):
            self.close()
            init = group_of(message.asked, message.number)
            here, deadline = local_address(init.master_address), Deadline(init.timeout_s)
            self._joining = Joining(init, 0, here)
            try:
                while not self._joining.done.wait(LOOK_UP_S):
                    check_cancelled(interrupted)
                    # The joining thread blocks in the store if the store's process is frozen.
                    deadline.check(f"the group {init.group_name} to be made")
                self._joining.wait(deadline, self._joining.cancelled)
            except BaseException:
                self.close()
                raise
            return
        if not message.places:
            return
        if stream is None or self._joining is None:
            raise TransferFailed(f"trainer rank {self._rank} was asked to broadcast without a group or a filled stream")
        works: deque[Any] = deque()
        try:
            self._send(message, stream, interrupted, works)
        except BaseException:
            self.close(works)  # a group with an unfinished broadcast cannot be used again
            raise

    def _send(self, message: Send, stream: torch.Tensor, interrupted: Callable[[], bool], works: deque[Any]) -> None:
        assert self._joining is not None
        deadline = Deadline(message.timeout_s)
        group = self._joining.wait(deadline, self._joining.cancelled)
        checked = time.monotonic()

        def finish_oldest(number: int) -> None:
            nonlocal checked
            while not works[0].is_completed():
                deadline.check(f"bucket {number} to be broadcast by trainer rank {self._rank}")
                if time.monotonic() - checked > LOOK_UP_S:
                    checked = time.monotonic()
                    check_cancelled(interrupted)
                time.sleep(LOOK_S)
            try:
                works.popleft().wait()
            except RuntimeError as error:
                raise TransferFailed(
                    f"bucket {number} could not be broadcast by trainer rank {self._rank}: {error}"
                ) from error

        own = message.places
        for index, place in enumerate(own):
            if len(works) == IN_FLIGHT:
                finish_oldest(own[index - IN_FLIGHT].number)
            works.append(group.broadcast(stream[place.start : place.end], deadline.left()))
        while works:
            finish_oldest(own[-len(works)].number)

    def forget(self) -> None:
        """See `base.RankHelper`; between two messages there is none."""

    def close(self, works: Sequence[Any] = ()) -> None:
        """Leave the group; idempotent."""
        if self._joining is not None:
            self._joining.leave(list(works))
            # A thread inside torch during interpreter shutdown would crash the process.
            self._joining.done.wait(_END_S)
            self._joining = None
