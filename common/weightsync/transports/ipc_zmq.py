"""Same host: control messages over a ZMQ ipc socket in a private directory, bytes in an arena that both sides map.

The sender binds a ROUTER, every engine rank connects a DEALER. The sender packs bucket k into slot k modulo two of its
arena and announces it; it packs bucket k+2 into the same slot once every rank has taken bucket k. Where the whole
stream fits the two slots nobody copies anything out: the arena is the stage.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from threading import Event

import msgspec
import torch
import zmq

from weightsync import errors, security, staging, wire
from weightsync.errors import TransferFailed
from weightsync.layout import Layout
from weightsync.transports.base import Bucket, Deadline, Peer, Progress, Sent
from weightsync.transports.packing import Packer
from weightsync.wire import Failed, Filled, Hello, IpcPrepare, Offer, Prepared, Taken

#: How long either side sleeps at most before it looks whether the push is over.
_LOOK_UP_S = 0.1
#: Ranks wait this much longer than the sender, which knows who is missing and should be the one to say so.
_GRACE_S = 2.0
#: A message to a sender is a few bytes; if it cannot be queued at once, nobody is there.
_SEND_TIMEOUT_MS = 5000
#: A sender that says nothing for so long may have died: its socket tells.
_SILENCE_S = 1.0
SLOTS = 2


def _named_error(failed: Failed, who: str) -> errors.WeightSyncError:
    """The error that the other side reported, as an exception of this side."""
    return errors.named(failed.error, TransferFailed)(f"{who}: {failed.message}")


class TrainerIpcZmq:
    """Trainer end. ``device`` is where the arena lives: the CPU, or the GPU that trainer and engines share."""

    def __init__(self, device: torch.device):
        self.device = device
        directory = security.private_directory()
        self.address = f"ipc://{directory}/{security.SOCKET_NAME}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.bind(self.address)
        #: The next push goes into the first; a second holds what is served, where engines keep that.
        self._arenas: list[staging.Arena] = []
        self._transfer: _Transfer | None = None
        self._bucket_bytes = 0
        self._push = ""
        self._secrets: dict[str, str] = {}
        self._close = weakref.finalize(self, _close_trainer, self._context, self._socket, str(directory), os.getpid())

    def free_bytes(self) -> int:
        """See `base.TrainerEnd`."""
        return staging.free_bytes(self.device) if self.device.type == "cuda" else staging.free_shared_bytes()

    def request(self, plan: IpcPrepare, engine: str) -> IpcPrepare:
        """See `base.TrainerEnd`; makes the arena on the way."""
        if plan.push != self._push:
            self._push, self._secrets = plan.push, {}  # those of a push that was refused before it began
            held = plan.keep and Layout(plan.manifest).nbytes <= SLOTS * plan.bucket_bytes
            self._provide_arenas(plan.bucket_bytes, 2 if held else 1)
        secret = secrets.token_urlsafe(24)
        self._secrets[secret] = engine
        return msgspec.structs.replace(plan, address=self.address, secret=secret)

    def _provide_arenas(self, bucket_bytes: int, count: int) -> None:
        if len(self._arenas) == count and self._bucket_bytes == bucket_bytes:
            return
        self._free_arenas()
        for _ in range(count):
            nbytes = SLOTS * bucket_bytes
            cuda = self.device.type == "cuda"
            self._arenas.append(staging.CudaArena(nbytes, self.device) if cuda else staging.ShmArena(nbytes))
        self._bucket_bytes = bucket_bytes

    def _free_arenas(self) -> None:
        self._transfer = None  # which refers to one
        while self._arenas:
            self._arenas.pop().close()

    def served(self) -> None:
        """See `base.TrainerEnd`."""
        self._transfer = None
        self._arenas.reverse()

    def meet(self, plan: IpcPrepare, layout: Layout, peers: set[Peer], deadline: Deadline) -> None:
        """See `base.TrainerEnd`."""
        self._transfer = _Transfer(self, plan, layout, peers, deadline)
        self._transfer.meet(plan.stream)

    def send(self, tensors: Iterable[torch.Tensor], progress: Progress | None) -> Sent:
        """See `base.TrainerEnd`."""
        assert self._transfer is not None, "meet() comes before send()"
        return self._transfer.send(tensors, progress)

    def call_off(self, error: BaseException) -> None:
        """See `base.TrainerEnd`."""
        if self._transfer is not None:
            self._transfer.call_off(error)
            self._transfer = None

    def close(self) -> None:
        """Release socket, directory and arena; idempotent."""
        self._free_arenas()
        self._close()


def _close_trainer(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], directory: str, owner: int
) -> None:
    if os.getpid() != owner:
        return  # a forked child, of a data loader say, that forgets what is its parent's
    _close_zmq(context, [socket])
    shutil.rmtree(directory, ignore_errors=True)


def _close_zmq(context: zmq.Context[zmq.Socket[bytes]], sockets: list[zmq.Socket[bytes]]) -> None:
    # One by one: where the garbage collector calls, the context has forgotten them and would wait for them for ever.
    for socket in sockets:
        socket.close(linger=0)
    context.term()


class _Transfer:
    """One push through the trainer end."""

    def __init__(self, end: TrainerIpcZmq, plan: IpcPrepare, layout: Layout, peers: set[Peer], deadline: Deadline):
        assert end._arenas, "request() comes before meet()"
        self._end, self._push, self._layout, self._peers, self._deadline = end, plan.push, layout, peers, deadline
        self._arena, self._alive = end._arenas[0], tuple(arena.name for arena in end._arenas)
        self._packer = Packer(layout, self._arena.bytes, plan.bucket_bytes, SLOTS, plan.digest)
        self._identity: dict[Peer, bytes] = {}
        self._peer: dict[bytes, Peer] = {}
        self._mapped: dict[Peer, tuple[str, ...]] = {}
        self._taken = dict.fromkeys(peers, -1)
        self._prepared: dict[Peer, float] = {}
        self._last = layout.buckets(plan.bucket_bytes) - 1
        self._stream = plan.stream

    def meet(self, stream: bool) -> None:
        """Wait until every rank has said hello, and tell each how to map the arena."""
        self._wait(lambda: self._peers - self._identity.keys(), "the ranks to come for the bytes")
        for peer in self._identity:
            handle = None if self._arena.name in self._mapped[peer] else self._arena.handle()
            self._send(peer, Offer(push=self._push, arena=self._arena.name, handle=handle, alive=self._alive))
        if stream:
            self._wait(lambda: self._peers - self._prepared.keys(), "the ranks to map the arena")

    def send(self, tensors: Iterable[torch.Tensor], progress: Progress | None) -> Sent:
        """Fill bucket after bucket, announcing each."""
        for packed in self._packer.fill(tensors, self._acquire):
            self._deadline.check(f"bucket {packed.number} to be packed")
            for peer in self._peers:
                self._send(peer, Filled(push=self._push, index=packed.number, digests=packed.digests))
            if progress is not None:
                progress(packed.nbytes)
        if self._stream:
            self._wait(lambda: {p for p in self._peers if self._taken[p] < self._last}, "the ranks to load everything")
        else:
            self._wait(lambda: self._peers - self._prepared.keys(), "the ranks to hold and verify everything")
        return Sent(self._packer.gather_s, self._packer.digest_s, max(self._prepared.values(), default=0.0))

    def _acquire(self, bucket: int) -> None:
        needed = bucket - SLOTS
        self._wait(lambda: {p for p in self._peers if self._taken[p] < needed}, f"bucket {needed} to be taken")

    def call_off(self, error: BaseException) -> None:
        """Tell the ranks that are listening that no more will come."""
        message = str(error) or type(error).__name__
        for peer in self._identity:
            with contextlib.suppress(TransferFailed):  # that rank is gone, which may be the very reason
                self._send(peer, Failed(push=self._push, error="TransferFailed", message=f"called off: {message}"))

    def _send(self, peer: Peer, message: wire.FromSender) -> None:
        try:
            self._end._socket.send_multipart([self._identity[peer], wire.pack(message)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            raise TransferFailed(f"{peer} is gone: {error}") from error

    def _wait(self, missing: Callable[[], set[Peer]], what: str) -> None:
        """Handle messages until ``missing()`` is empty."""
        while absent := missing():
            # Also where others keep us busy with messages of no meaning.
            self._deadline.check(f"{what}; still missing: {', '.join(sorted(map(str, absent)))}")
            # Not longer at once: somebody else may find out that waiting is in vain.
            if not self._end._socket.poll(int(min(self._deadline.left(), _LOOK_UP_S) * 1000)):
                continue
            identity, frame = self._end._socket.recv_multipart(zmq.DONTWAIT)[:2]
            try:
                self._handle(identity, wire.unpack_from_rank(frame))
            except msgspec.MsgspecError:
                continue  # not a peer of ours; a peer's silence is caught by the deadline

    def _handle(self, identity: bytes, message: wire.FromRank) -> None:
        if message.push != self._push:
            return  # left over from a push that was called off
        if isinstance(message, Hello):
            engine = self._end._secrets.get(message.secret)
            peer = Peer(engine or "", message.rank)
            if peer in self._peers and peer not in self._identity:
                self._identity[peer] = identity
                self._peer[identity] = peer
                self._mapped[peer] = message.mapped
            return
        sender = self._peer.get(identity)
        if sender is None:
            return
        if isinstance(message, Taken):
            self._taken[sender] = max(self._taken[sender], message.index)
        elif isinstance(message, Prepared):
            self._prepared[sender] = message.verify_s
        else:
            raise _named_error(message, str(sender))


class EngineIpcZmq:
    """Engine end, one a rank. Keeps its socket and its mapping of the arena from push to push.

    Used by one thread after another, never by two at once: `receiver.Receiver` sees to that.
    """

    def __init__(self, device: torch.device):
        self._context = zmq.Context()
        #: None, or the one that is connected to ``_address``.
        self._sockets: list[zmq.Socket[bytes]] = []
        self._address = ""
        #: Mapped arenas of the sender at ``_address`` by name: one, or two where it keeps the version before.
        self._arenas: dict[str, torch.Tensor] = {}
        self._close = weakref.finalize(self, _close_zmq, self._context, self._sockets)

    def close(self) -> None:
        """Release socket and mappings; idempotent."""
        self._arenas.clear()
        self._close()

    def meet(self, request: IpcPrepare, layout: Layout, rank: int, over: Event) -> IpcIncoming:
        """See `base.EngineEnd`."""
        try:
            socket = self._dial(request.address)
            incoming = IpcIncoming(socket, request, layout, Deadline(request.timeout_s + _GRACE_S), over)
            mapped = tuple(self._arenas)
            socket.send(wire.pack(Hello(push=request.push, secret=request.secret, rank=rank, mapped=mapped)))
            offer = incoming.next("the sender's arena")
            if not isinstance(offer, Offer):
                raise TransferFailed(f"the sender announced {type(offer).__name__} before its arena")
            incoming.map(self._map(offer, SLOTS * request.bucket_bytes), offer.arena)
            return incoming
        except errors.WeightSyncError:
            raise  # a timeout is an OSError too
        except (zmq.ZMQError, OSError, RuntimeError) as error:
            raise TransferFailed(f"the sender could not be met: {type(error).__name__}: {error}") from error

    def confirm(self, push: str, verify_s: float) -> None:
        """See `base.EngineEnd`."""
        self._tell(Prepared(push=push, verify_s=verify_s))

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`."""
        kind = type(error).__name__ if isinstance(error, errors.WeightSyncError) else "TransferFailed"
        self._tell(Failed(push=push, error=kind, message=str(error) or type(error).__name__))

    def _tell(self, message: wire.FromRank) -> None:
        # A sender that cannot be reached any more has nothing to be told.
        for socket in self._sockets:
            with contextlib.suppress(zmq.ZMQError):
                socket.send(wire.pack(message))

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._address:
            return False
        self._hang_up()
        return True

    def _dial(self, address: str) -> zmq.Socket[bytes]:
        security.check_ipc_address(address)
        if not self._sockets or address != self._address:
            self._hang_up()
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._sockets.append(socket)
            self._address = address
        return self._sockets[0]

    def _hang_up(self) -> None:
        while self._sockets:
            self._sockets.pop().close(linger=0)
        self._address = ""
        self._arenas.clear()

    def _map(self, offer: Offer, nbytes: int) -> torch.Tensor:
        for name in self._arenas.keys() - set(offer.alive):
            del self._arenas[name]  # unmap what is old before mapping what is new
        if offer.handle is not None:
            self._arenas[offer.arena] = staging.attach(offer.handle)
        arena = self._arenas.get(offer.arena)
        if arena is None:
            raise TransferFailed(f"the arena {offer.arena} was never mapped here; push again")
        if arena.numel() < nbytes:
            raise TransferFailed(f"the arena holds {arena.numel()} bytes, two buckets take {nbytes}")
        return arena


class IpcIncoming:
    """See `base.Incoming`."""

    def __init__(self, socket: zmq.Socket[bytes], request: IpcPrepare, layout: Layout, deadline: Deadline, over: Event):
        self._socket, self._request, self._layout, self._deadline, self._over = socket, request, layout, deadline, over
        self.arena = ""
        self.whole: torch.Tensor | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def map(self, arena: torch.Tensor, name: str) -> None:
        """The sender's memory, once it is known."""
        self._memory, self.arena = arena, name
        self.whole = arena[: self._layout.nbytes] if self._layout.nbytes <= arena.numel() else None

    def next(self, what: str) -> wire.FromSender:
        """The next message about this push."""
        looked = time.monotonic()
        while True:
            if self._over.is_set():
                raise TransferFailed("the push was aborted")
            self._deadline.check(what)
            if not self._socket.poll(int(min(self._deadline.left(), _LOOK_UP_S) * 1000)):
                if time.monotonic() - looked > _SILENCE_S:
                    looked = time.monotonic()
                    if not security.owner_lives(self._request.address):
                        raise TransferFailed(f"the sender is gone; it was to announce {what}")
                continue
            try:
                message = wire.unpack_from_sender(self._socket.recv(zmq.DONTWAIT))
            except msgspec.MsgspecError as error:
                raise TransferFailed(f"the sender's message cannot be read: {error}") from error
            if message.push != self._request.push:
                continue  # left over from a push that was called off
            if isinstance(message, Failed):
                raise _named_error(message, "the sender")
            return message

    def buckets(self) -> Iterator[Bucket]:
        """See `base.Incoming`."""
        size = self._request.bucket_bytes
        for index in range(self._layout.buckets(size)):
            filled = self.next(f"bucket {index}")
            if not isinstance(filled, Filled) or filled.index != index:
                raise TransferFailed(f"expected bucket {index}, got {filled}")
            slot = (index % SLOTS) * size
            nbytes = min(size, self._layout.nbytes - index * size)
            yield Bucket(index, self._memory[slot : slot + nbytes], filled.digests)
            try:
                self._socket.send(wire.pack(Taken(push=self._request.push, index=index)))
            except zmq.ZMQError as error:
                raise TransferFailed(f"the sender cannot be told that bucket {index} was taken: {error}") from error
