"""The transport for one host: both sides map one arena, in host memory or on a GPU that they share.

Where the arena holds the whole stream it is also the stage, and ranks copy nothing out of it. So are, together, the
arenas of several memory domains, and the parameters of several trainer processes that are read in place: ranks map what
every domain provides.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Final

import msgspec
import torch

from weightsync.deadline import Deadline
from weightsync.errors import AuthenticationFailed, TransferFailed, UnsupportedOption
from weightsync.memory import arenas, shared_parameters
from weightsync.memory.arenas import Arena
from weightsync.protocol import codec, control, directories, http
from weightsync.protocol.control import Offer
from weightsync.protocol.diagnosis import Finding
from weightsync.protocol.expected import Lent
from weightsync.protocol.handles import Handle, SharedParametersHandle
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.divided import Divided
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Layout
from weightsync.tensors.scattered import Scattered, Stream
from weightsync.tensors.subset import Digests, Subset
from weightsync.transports.base import Bucket, Peer, PeerRanks, TransportSpec
from weightsync.transports.control.engine import EngineControl, RankSession
from weightsync.transports.control.trainer import PushSession, TrainerControl

_HANDLE: Final[msgspec.msgpack.Decoder[Handle | None]] = codec.msgpack_decoder(Handle | None)


class IpcZmqTrainerEnd:
    """Trainer end, see `base.TrainerEnd`."""

    def __init__(self, device: torch.device, helpers: PeerRanks | None = None, address: str = ""):
        self._helpers = helpers
        self._control = TrainerControl(remote=False)
        self.address, self.request = self._control.address, self._control.request

    def connect(self, engines: Mapping[str, http.OpenReply], timeout_s: float) -> dict[str, Handshake]:
        """No engine needs a handshake."""
        return {}

    def connected(self, replies: Mapping[str, http.JoinReply], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""

    def begin(
        self, plan: UpdateRequest, layout: Layout, arenas: Sequence[Arena], peers: set[Peer], deadline: Deadline
    ) -> MappedSending:
        """See `base.TrainerEnd`."""
        session = PushSession(self._control, plan.push, layout, peers, deadline)
        return MappedSending(session, plan, layout, arenas, self._helpers if layout.table else None)

    def disconnect(self, engine: str) -> None:
        """See `base.TrainerEnd`."""

    def forget(self) -> None:
        """See `base.TrainerEnd`; the next offer tells the ranks which arenas are left."""

    def close(self) -> None:
        """Release the socket and its directory; idempotent."""
        self._control.close()


class MappedSending:
    """See `base.Sending`; ranks map the first of ``arenas``, and what other memory domains provide, by ``helpers``."""

    def __init__(
        self,
        session: PushSession,
        plan: UpdateRequest,
        layout: Layout,
        arenas: Sequence[Arena],
        helpers: PeerRanks | None,
    ):
        self._session, self._plan, self._arenas, self._helpers = session, plan, arenas, helpers
        self._last = layout.buckets(plan.bucket_bytes) - 1

    def await_ranks(self) -> None:
        """See `base.Sending`."""
        alive, arena = tuple(arena.name for arena in self._arenas), self._arenas[0]

        def offer(mapped: tuple[str, ...]) -> Offer:
            if arena.name in mapped:
                return Offer(push=self._plan.push, arena=arena.name, alive=alive)
            lent = self._helpers.lend(arena.name, self._session.deadline) if self._helpers is not None else ()
            others = tuple(map(control.raw_handle, lent))
            return Offer(self._plan.push, arena.name, control.raw_handle(arena.handle()), alive, others)

        self._session.await_ranks(offer)
        if self._plan.stream:
            self._session.all_prepared("the ranks to map the arena")

    def acquire(self, bucket: int) -> None:
        """See `base.Sending`."""
        self._session.all_taken(bucket - self._plan.slots)

    def needs(self) -> Iterable[Subset]:
        """See `base.Sending`."""
        return self._session.needs.values()

    def announce(self, bucket: int, digests: Digests, begins: tuple[int, ...] = ()) -> None:
        """See `base.Sending`."""
        self._session.announce(bucket, digests, begins=begins)

    def finish(self) -> float:
        """See `base.Sending`."""
        if self._plan.stream:
            self._session.all_taken(self._last)
        return self._session.all_prepared("the ranks to hold and verify everything")

    def cancel(self, error: BaseException) -> None:
        """See `base.Sending`."""
        self._session.cancel(error)


class IpcZmqEngineEnd:
    """Engine end of one rank, see `base.EngineEnd`. Keeps its socket and its mapping of the arena between pushes.

    Not thread-safe: `receiver.Receiver` calls it from one thread at a time.
    """

    bytes_per_s = 0.0

    def __init__(self, device: torch.device):
        self._control = EngineControl(remote=False)
        self.check, self.confirm, self.fail = self._control.check, self._control.confirm, self._control.fail
        #: Arenas by name that the sender at this address lent, who has not pushed since.
        self._lent: tuple[str, dict[str, list[Stream | None]]] = "", {}
        #: Mapped arenas of the sender, by name: one, or two if it keeps the previous version. Each has the memory of
        #: every memory domain, or of the only one.
        self._arenas: dict[str, list[Stream | None]] = {}
        #: The streams of arenas of several domains, and the names of their layouts, by arena.
        self._divided: dict[str, tuple[str, Divided]] = {}

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """Unsupported: ipc_zmq has no set-up route."""
        raise UnsupportedOption(f"ipc_zmq takes no handshake, but was sent {type(handshake).__name__}")

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> MappedIncoming:
        """See `base.EngineEnd`."""
        if request.address != self._control.address:
            self._forget()
        self.give_back(but=request.address)
        self._arenas |= self._lent[1]
        self._lent = "", {}
        layout = subset.layout
        session, offer = self._control.open(request, subset, rank, tuple(self._arenas), cancelled)
        nbytes = min(layout.nbytes, request.slots * request.bucket_bytes)
        try:
            self._map(offer)
            return MappedIncoming(session, request, layout, self._stream(offer.arena, layout, nbytes), offer.arena)
        except (OSError, RuntimeError) as error:
            raise TransferFailed(f"rank {rank} could not map the arena: {type(error).__name__}: {error}") from error

    def borrow(self, lent: Lent) -> None:
        """See `base.Borrower`."""
        self._lent = lent.address, {Path(handle.path).name: [_attach(handle)] for handle in lent.arenas}

    def give_back(self, but: str = "") -> None:
        """See `base.Borrower`."""
        if self._lent[0] != but:
            self._lent = "", {}

    def _map(self, offer: Offer) -> None:
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]  # unmap old arenas before mapping a new one
            self._divided.pop(name, None)
        handles = [control.handle_of(raw, _HANDLE, "the sender") for raw in (offer.handle, *offer.others)]
        if any(handles):
            self._divided.pop(offer.arena, None)
            self._arenas[offer.arena] = [None if handle is None else _attach(handle) for handle in handles]
        elif offer.arena not in self._arenas:
            raise TransferFailed(f"the arena {offer.arena} was never mapped here; push again")

    def _stream(self, arena: str, layout: Layout, nbytes: int) -> Stream:
        """The stream, or as much of it as a mapped arena has. Raises `TransferFailed` if that is too little."""
        memories = self._arenas[arena]
        sizes = [layout.domain_bytes(domain) for domain in range(len(layout.table))] or [nbytes]
        held = [0 if memory is None else memory.numel() for memory in memories]
        if len(held) != len(sizes) or any(map(operator.lt, held, sizes)):
            raise TransferFailed(f"the arena holds {held} bytes, but its buckets take {sizes}; push again")
        if not isinstance(layout, DividedLayout):
            memory = memories[0]
            assert memory is not None, "the first handle is that of an arena"
            return memory
        if arena not in self._divided or self._divided[arena][0] != layout.name:
            self._divided[arena] = layout.name, Divided(layout, memories)
        return self._divided[arena][1]

    def _forget(self) -> None:
        self._arenas.clear()
        self._divided.clear()

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address == self._lent[0]:
            self.give_back()
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._forget()
        return True

    def close(self) -> None:
        """Release the socket and the mappings; idempotent."""
        self.give_back()
        self._forget()
        self._control.close()


def _attach(handle: Handle) -> Stream:
    return shared_parameters.attach(handle) if isinstance(handle, SharedParametersHandle) else arenas.attach(handle)


class MappedIncoming:
    """See `base.Incoming`."""

    lingers = False

    def __init__(self, session: RankSession, request: UpdateRequest, layout: Layout, memory: Stream, arena: str):
        self._session, self._request, self._layout, self._memory, self.arena = session, request, layout, memory, arena
        self.whole: Stream | None = None
        # What several domains provide is written again by the next push: what is to be kept is copied.
        if layout.nbytes <= memory.numel() and not (layout.table and request.keep):
            self.whole = memory if isinstance(memory, Scattered) else memory[: layout.nbytes]

    def buckets(self, stage: torch.Tensor | None) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        size = self._request.bucket_bytes
        for index in range(self._layout.buckets(size)):
            filled = self._session.filled(index)
            slot = (index % self._request.slots) * size
            nbytes = min(size, self._layout.nbytes - index * size)
            if stage is not None:
                place = stage[index * size : index * size + nbytes]
                for at, data in self._held(index * size, slot, nbytes):
                    arenas.copy(place[at : at + data.numel()], data)
                arenas.synchronize(place.device)
                self._session.taken(index)
                yield Bucket(index, place, filled.digests)
            else:
                data = self._memory[slot : slot + (0 if isinstance(self._memory, Scattered) else nbytes)]
                yield Bucket(index, data, filled.digests, filled.begins)
                self._session.taken(index)

    def _held(self, start: int, slot: int, nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """What is mapped of a bucket that begins at byte ``start`` of the stream: offsets in it, and views."""
        if isinstance(self._memory, Divided):
            for at, data in self._memory.held(start, start + nbytes):
                yield at - start, data
        else:
            yield 0, self._memory[slot : slot + nbytes]


def _far(hello: http.OpenReply) -> str:
    """Where the processes of an engine run that are not on this host; empty if all are on it."""
    here = arenas.host_id()
    ranks = [str(rank.rank) for rank in hello.ranks if rank.host not in ("", here)]  # an older engine does not say
    if 0 < len(ranks) < len(hello.ranks):
        return f"several hosts, with {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(ranks)} on another"
    return "another host" if ranks or hello.host != here else ""


def _apart(hello: http.OpenReply) -> tuple[str, str]:
    """Where an engine runs that shared memory cannot reach, and what to do about it; empty if it can be reached."""
    if far := _far(hello):
        return far, (
            " (or in a container with its own /dev/shm): transport ipc_zmq needs engine and trainer to share one; run "
            "containers with --ipc=host"
        )
    try:
        directories.directory()
    except AuthenticationFailed as error:
        return f"the same host, but {error}", " (on the trainer's side)"
    ours, theirs = directories.meeting(), hello.user
    if theirs in ("", ours):  # an older engine does not report its user; it refuses addresses it must not dial itself
        return "", ""
    uid, own = theirs.partition(" ")[0], ours.partition(" ")[0]
    if uid != own:
        return f"the same host, but user {uid}'s and not user {own}'s", (
            ": transport ipc_zmq needs one user on both sides; run both as the same user"
        )
    return "the same host, but in another user namespace", (
        ": transport ipc_zmq needs a directory that both sides can trust; run containers with --userns=host"
    )


def _findings(_device: torch.device, _rank: int) -> list[Finding]:
    try:
        return [Finding(_NAME, "ok", f"private sockets are in {directories.directory()}")]
    except AuthenticationFailed as error:
        return [Finding(_NAME, "wrong", str(error), f"ls -ld {directories.SHM_DIRECTORY}/{directories.PREFIX}*")]


_NAME: Final = "ipc_zmq"
SPEC: Final = TransportSpec(
    name=_NAME,
    label="shared memory",
    trainer_end=IpcZmqTrainerEnd,
    engine_end=IpcZmqEngineEnd,
    local=True,
    preference=10,
    reason="the same host: the ranks read the trainer's memory where it is",
    apart=_apart,
    findings=_findings,
)
