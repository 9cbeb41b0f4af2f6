"""The engine end of the nccl transport; `trainer` has the trainer end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any, NamedTuple

import torch

from weightsync.deadline import Deadline
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.memory.cuda_ipc import device_uuid
from weightsync.protocol import http
from weightsync.protocol.control import BucketReady
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.domains import DividedLayout, Run
from weightsync.tensors.layout import Layout
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket
from weightsync.transports.control.engine import EngineControl, RankSession
from weightsync.transports.control.sockets import LOOK_UP_S, interface_of
from weightsync.transports.nccl import groups, parallel_broadcast
from weightsync.transports.nccl.groups import Group, Joining
from weightsync.transports.nccl.messages import InitNcclGroup


class NcclEngineEnd:
    """Engine end of one rank, see `base.EngineEnd`. ``device`` is where it receives the bytes."""

    bytes_per_s = 0.0

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        #: One for each trainer rank that broadcasts.
        self._joinings: list[Joining] = []
        #: The two buffers that receive buckets when there is no stage.
        self._buckets: list[torch.Tensor] = []
        self._incoming: BroadcastIncoming | None = None

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """See `base.EngineEnd`; checks the handshake and the store, then joins the group in a thread."""
        if not isinstance(handshake, InitNcclGroup):
            raise UnsupportedOption(f"nccl takes an InitNcclGroup, but was sent {type(handshake).__name__}")
        number = handshake.rank_offset + rank
        if handshake.backend == "nccl" and self._device.type != "cuda":
            raise UnsupportedOption(f"rank {rank} is on {self._device.type}, where there is no NCCL: use gloo")
        here = groups.reach(handshake, rank)
        self._leave()
        self._joinings = [
            Joining(parallel_broadcast.group_of(handshake, sender), number, here) for sender in range(handshake.senders)
        ]
        uuid = device_uuid(self._device)
        return http.RankJoined(rank=number, device=f"{self._device} {uuid}".strip(), interface=interface_of(here))

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> BroadcastIncoming:
        """See `base.EngineEnd`."""
        if not self._joinings:
            raise TransferFailed(
                f"rank {rank} has joined no group: init_nccl_group comes before update_weights_via_nccl"
            )
        deadline = Deadline(request.timeout_s)
        joined = [joining.wait(deadline, cancelled) for joining in self._joinings]
        name = joined[0].name
        session, offer = self._control.open(request, subset, rank, (name,), cancelled)
        if offer.arena != name:
            raise TransferFailed(f"rank {rank} has joined the group {name}, but the push uses {offer.arena}")
        self._incoming = BroadcastIncoming(session, request, subset.layout, joined, self._buffers, self._device)
        return self._incoming

    def _buffers(self, nbytes: int) -> list[torch.Tensor]:
        if not self._buckets or self._buckets[0].numel() < nbytes:
            self._buckets.clear()
            self._buckets += [torch.zeros(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        return self._buckets

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; a group with an unfinished broadcast cannot be used again and is left."""
        self._control.fail(push, error)
        if self._incoming is not None and self._incoming.pending:
            self._leave()

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._leave()
        return True

    def _leave(self) -> None:
        pending = self._incoming.pending if self._incoming is not None else ()
        works = [part.work for posted in pending for part in posted.parts]
        while self._joinings:
            self._joinings.pop().leave(works)
            self._buckets.clear()  # an abandoned broadcast may still write there
        self._incoming = None

    def close(self) -> None:
        """Leave the group and release the socket; idempotent."""
        self._leave()
        self._control.close()


class _Part(NamedTuple):
    """A broadcast under way: torch's ``Work``, the memory that it writes to, and which of its bytes go where in the
    stage, if they are not there already."""

    work: Any
    place: torch.Tensor
    runs: Sequence[Run] = ()


class _Posted(NamedTuple):
    """A bucket under way: its announcement, its broadcasts, and its place."""

    announced: BucketReady
    parts: list[_Part]
    place: torch.Tensor

    @property
    def is_here(self) -> bool:
        return all(part.work.is_completed() for part in self.parts)


class BroadcastIncoming:
    """See `base.Incoming`."""

    whole: torch.Tensor | None = None
    lingers = False

    def __init__(
        self,
        session: RankSession,
        request: UpdateRequest,
        layout: Layout,
        joined: Sequence[Group],
        buffers: Callable[[int], list[torch.Tensor]],
        device: torch.device,
    ):
        self._session, self._request, self._layout = session, request, layout
        self._joined, self._buffers, self._device = joined, buffers, device
        self.arena = joined[0].name
        #: Broadcasts under way, oldest first.
        self.pending: deque[_Posted] = deque()

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`; posts broadcasts as soon as they are announced, `IN_FLIGHT` of each group at once."""
        size, count = self._request.bucket_bytes, self._layout.buckets(self._request.bucket_bytes)
        own = self._buffers(size) if stage is None else []
        # Several hosts all send parts of each bucket. Without a stage the other buffer is still being read.
        senders = 1 if self._layout.table else len(self._joined)
        ahead = parallel_broadcast.IN_FLIGHT * senders if stage is not None else 1
        announced: deque[BucketReady] = deque()
        received = posted = 0
        for number in range(count):
            while not self.pending or not self.pending[0].is_here:
                self._session.check(f"the broadcast of bucket {number}")
                while announced and len(self.pending) < ahead:
                    nbytes = min(size, self._layout.nbytes - posted * size)
                    place = own[posted % 2] if stage is None else stage[posted * size :]
                    self._post(announced.popleft(), place[:nbytes])
                    posted += 1
                message = self._session.receive(parallel_broadcast.LOOK_S if self.pending else LOOK_UP_S)
                if message is not None:
                    announced.append(self._session.expect(message, received))
                    received += 1
            ready, parts, place = self.pending[0]
            with self._session.explained():
                for part in parts:
                    self._finish(number, part, stage)
            self.pending.popleft()
            self._session.taken(number)
            yield Bucket(number, place, ready.digests, ready.begins)

    def _finish(self, number: int, part: _Part, stage: torch.Tensor | None) -> None:
        try:
            part.work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"the broadcast of bucket {number} failed: {error}") from error
        for at, there, nbytes in part.runs:
            assert stage is not None, "several hosts send into a stage"
            arenas.copy(stage[at : at + nbytes], part.place[there : there + nbytes])

    def _post(self, ready: BucketReady, place: torch.Tensor) -> None:
        """Receive a bucket, into ``place`` unless several hosts send it."""
        posted = _Posted(ready, [], place)
        self.pending.append(posted)  # first: a group is left for each broadcast that is under way
        if isinstance(self._layout, DividedLayout):
            self._post_parts(self._layout, posted)
            return
        if ready.sender >= len(self._joined):
            raise TransferFailed(
                f"bucket {ready.index} was announced by trainer rank {ready.sender}, but only {len(self._joined)} "
                "trainer ranks broadcast"
            )
        if place.numel():
            posted.parts.append(self._part(ready.sender, place))

    def _post_parts(self, layout: DividedLayout, posted: _Posted) -> None:
        """Receive what each host holds of a bucket, beside the stage."""
        if len(self._joined) != len(layout.table):
            raise TransferFailed(f"{len(layout.table)} hosts hold the push, but {len(self._joined)} broadcast it")
        bucket, size = posted.announced.index, self._request.bucket_bytes
        for domain, by_bucket in enumerate(layout.cut(size)):
            start, end = layout.span(domain, bucket, size)
            if start < end:
                runs = [Run(at, there - start, nbytes) for at, there, nbytes in by_bucket[bucket]]
                memory = torch.empty(end - start, dtype=torch.uint8, device=self._device)
                posted.parts.append(self._part(domain, memory, runs))

    def _part(self, sender: int, place: torch.Tensor, runs: Sequence[Run] = ()) -> _Part:
        return _Part(self._joined[sender].broadcast(place, self._session.deadline.left()), place, runs)
