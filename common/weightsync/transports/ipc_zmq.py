"""Same host: the bytes lie in an arena that both sides map, host memory or that of a GPU they share.

Nobody copies anything out where the whole stream fits the arena: it is the stage then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationFailed, TransferFailed, UnsupportedOption
from weightsync.memory import arenas, shared_parameters
from weightsync.memory.arenas import Arena
from weightsync.protocol import control, directories, http
from weightsync.protocol.control import Offer
from weightsync.protocol.handles import CudaHandle, SharedParametersHandle, ShmHandle
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import Scattered, Stream
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Bucket, Peer, PeerRanks, TransportSpec
from weightsync.transports.control.engine import EngineControl, RankSession
from weightsync.transports.control.trainer import PushSession, TrainerControl

_Handle = ShmHandle | CudaHandle | SharedParametersHandle | None
_HANDLE: Final[msgspec.msgpack.Decoder[_Handle]] = msgspec.msgpack.Decoder(_Handle)


class IpcZmqTrainerEnd:
    """Trainer end, see `base.TrainerEnd`."""

    def __init__(self, device: torch.device, _: PeerRanks | None = None, address: str = ""):
        self._control = TrainerControl(remote=False)
        self.address, self.request = self._control.address, self._control.request

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """There is nothing to prepare."""
        return {}

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> MappedSending:
        """See `base.TrainerEnd`."""
        return MappedSending(PushSession(self._control, plan.push, layout, peers, deadline), plan, layout, arenas)

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`."""

    def forget(self) -> None:
        """See `base.TrainerEnd`; the ranks learn with the next offer which arenas are left."""

    def close(self) -> None:
        """Release socket and directory; idempotent."""
        self._control.close()


class MappedSending:
    """See `base.Sending`; ranks map the first of ``arenas``."""

    def __init__(self, session: PushSession, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena]):
        self._session, self._plan, self._arenas = session, plan, arenas
        self._last = layout.buckets(plan.bucket_bytes) - 1

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        alive, arena = tuple(arena.name for arena in self._arenas), self._arenas[0]

        def offer(mapped: tuple[str, ...]) -> Offer:
            handle = control.raw_handle(None if arena.name in mapped else arena.handle())
            return Offer(push=self._plan.push, arena=arena.name, handle=handle, alive=alive)

        self._session.await_ranks(offer)
        if self._plan.stream:
            self._session.all_prepared("the ranks to map the arena")

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        self._session.all_taken(bucket - self._plan.slots)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests) -> None:
        """See `base.Sending`."""
        self._session.announce(bucket, digests)

    def finish(self) -> float:
        """See `base.Sending`."""
        if self._plan.stream:
            self._session.all_taken(self._last)
        return self._session.all_prepared("the ranks to hold and verify everything")

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`."""
        self._session.cancel(error)


class IpcZmqEngineEnd:
    """Engine end, one a rank. Keeps its socket and its mapping of the arena from push to push.

    Used by one thread after another, never by two at once: `receiver.Receiver` sees to that.
    """

    def __init__(self, device: torch.device):
        self._control = EngineControl(remote=False)
        self.check, self.confirm, self.fail = self._control.check, self._control.confirm, self._control.fail
        #: Mapped arenas of the sender by name: one, or two where it keeps the version before.
        self._arenas: dict[str, Stream] = {}

    def join(self, asked: Handshake, rank: int) -> http.RankJoined:
        """No route leads here."""
        raise UnsupportedOption(f"ipc_zmq has no use for {type(asked).__name__}")

    def open(self, request: UpdateRequest, parts: Subset, rank: int, cancelled: Event) -> MappedIncoming:
        """See `base.EngineEnd`."""
        if request.address != self._control.address:
            self._arenas.clear()
        layout = parts.layout
        call, offer = self._control.open(request, parts, rank, tuple(self._arenas), cancelled)
        nbytes = min(layout.nbytes, request.slots * request.bucket_bytes)
        try:
            return MappedIncoming(call, request, layout, self._map(offer, nbytes), offer.arena)
        except (OSError, RuntimeError) as error:
            raise TransferFailed(f"the arena could not be mapped: {type(error).__name__}: {error}") from error

    def _map(self, offer: Offer, nbytes: int) -> Stream:
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]  # unmap what is old before mapping what is new
        handle = control.handle_of(offer.handle, _HANDLE, "the sender")
        if isinstance(handle, SharedParametersHandle):
            self._arenas[offer.arena] = shared_parameters.attach(handle)
        elif handle is not None:
            self._arenas[offer.arena] = arenas.attach(handle)
        arena = self._arenas.get(offer.arena)
        if arena is None:
            raise TransferFailed(f"the arena {offer.arena} was never mapped here; push again")
        if arena.numel() < nbytes:
            raise TransferFailed(f"the arena holds {arena.numel()} bytes, its buckets take {nbytes}")
        return arena

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._arenas.clear()
        return True

    def close(self) -> None:
        """Release socket and mappings; idempotent."""
        self._arenas.clear()
        self._control.close()


class MappedIncoming:
    """See `base.Incoming`."""

    def __init__(self, call: RankSession, request: UpdateRequest, layout: Layout, memory: Stream, arena: str):
        self._call, self._request, self._layout, self._memory, self.arena = call, request, layout, memory, arena
        self.whole: Stream | None = None
        if layout.nbytes <= memory.numel():
            self.whole = memory if isinstance(memory, Scattered) else memory[: layout.nbytes]

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        size = self._request.bucket_bytes
        for index in range(self._layout.buckets(size)):
            filled = self._call.filled(index)
            slot = (index % self._request.slots) * size
            nbytes = 0 if isinstance(self._memory, Scattered) else min(size, self._layout.nbytes - index * size)
            data = self._memory[slot : slot + nbytes]
            if stage is not None:
                place = stage[index * size : index * size + data.numel()]
                arenas.copy(place, data)
                arenas.synchronize(place.device)
                self._call.taken(index)
                yield Bucket(index, place, filled.digests)
            else:
                yield Bucket(index, data, filled.digests)
                self._call.taken(index)


def _apart(hello: http.OpenReply) -> tuple[str, str]:
    """Why an engine cannot be reached through memory, and what can be done about it; empty if it can."""
    if hello.host != arenas.host_id():
        return "another host", (
            " (or in a container with its own /dev/shm): transport ipc_zmq needs engine and trainer to share one; run "
            "containers with --ipc=host"
        )
    try:
        directories.directory()
    except AuthenticationFailed as error:
        return f"the same host, but {error}", " (on the trainer's side)"
    ours, theirs = directories.meeting(), hello.user
    if theirs in ("", ours):  # an engine of before it said so refuses by itself what it must not dial
        return "", ""
    uid, own = theirs.partition(" ")[0], ours.partition(" ")[0]
    if uid != own:
        return f"the same host, but user {uid}'s and not user {own}'s", (
            ": transport ipc_zmq needs engine and trainer to be of one user; run both as the same"
        )
    return "the same host, but in another user namespace", (
        ": transport ipc_zmq needs a directory that both sides can trust; run containers with --userns=host"
    )


SPEC: Final = TransportSpec(
    name="ipc_zmq",
    label="shared memory",
    trainer_end=IpcZmqTrainerEnd,
    engine_end=IpcZmqEngineEnd,
    local=True,
    preference=10,
    reason="the same host: the ranks read the trainer's memory where it is",
    apart=_apart,
)
