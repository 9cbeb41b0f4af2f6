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
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from threading import Event

import msgspec
import torch
import zmq

from weightsync import errors, security, staging, wire
from weightsync.errors import TransferFailed
from weightsync.layout import Entry, Layout
from weightsync.transports.base import Deadline, Peer, Progress
from weightsync.wire import Failed, Filled, Hello, IpcPrepare, Offer, Prepared, Taken

#: How long an engine rank sleeps at most before it looks whether its push was aborted.
_CANCEL_POLL_S = 0.1
#: Ranks wait this much longer than the sender, which knows who is missing and should be the one to say so.
_GRACE_S = 2.0
#: A message to a sender is a few bytes; if it cannot be queued at once, nobody is there.
_SEND_TIMEOUT_MS = 5000
SLOTS = 2


def _named_error(failed: Failed, who: str) -> errors.WeightSyncError:
    """The error that the other side reported, as an exception of this side."""
    kind = getattr(errors, failed.error, TransferFailed)
    if not (isinstance(kind, type) and issubclass(kind, errors.WeightSyncError)):
        kind = TransferFailed
    return kind(f"{who}: {failed.message}")


def _translated(error: Exception) -> TransferFailed:
    """What torch, ZMQ or the system said, as an error of ours."""
    return TransferFailed(f"the bytes could not be received: {type(error).__name__}: {error}")


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
        self._socket.bind(self.address)
        self._arena: staging.Arena | None = None
        self._bucket_bytes = 0
        self._push = ""
        self._secrets: dict[str, str] = {}
        self._close = weakref.finalize(self, _close_trainer, self._context, str(directory), os.getpid())

    def free_bytes(self) -> int:
        """See `base.TrainerEnd`."""
        return staging.free_bytes(self.device) if self.device.type == "cuda" else staging.free_shared_bytes()

    def request(self, push: str, engine: str, layout: Layout, bucket_bytes: int, timeout_s: float) -> IpcPrepare:
        """The message that makes an engine's ranks dial this sender; makes the arena on the way."""
        self._provide_arena(bucket_bytes)
        if push != self._push:
            self._push, self._secrets = push, {}  # those of a push that was refused before it began
        secret = secrets.token_urlsafe(24)
        self._secrets[secret] = engine
        manifest = tuple(entry.spec for entry in layout.entries)
        return IpcPrepare(
            push=push,
            address=self.address,
            secret=secret,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            manifest=manifest,
        )

    def _provide_arena(self, bucket_bytes: int) -> None:
        if self._arena is not None and self._bucket_bytes == bucket_bytes:
            return
        if self._arena is not None:
            self._arena.close()
        self._arena = None
        nbytes = SLOTS * bucket_bytes
        cuda = self.device.type == "cuda"
        self._arena = staging.CudaArena(nbytes, self.device) if cuda else staging.ShmArena(nbytes)
        self._bucket_bytes = bucket_bytes

    def transfer(
        self,
        push: str,
        layout: Layout,
        tensors: Iterable[torch.Tensor],
        peers: set[Peer],
        deadline: Deadline,
        progress: Progress | None,
    ) -> float:
        """See `base.TrainerEnd`."""
        run = _Transfer(self, push, layout, peers, deadline)
        try:
            run.meet()
            for sent in run.fill(tensors):
                if progress is not None:
                    progress(sent)
            run.finish()
        except BaseException as error:
            run.call_off(error)
            raise
        return run.gather_s

    def close(self) -> None:
        """Release socket, directory and arena; idempotent."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None
        self._close()


def _close_trainer(context: zmq.Context[zmq.Socket[bytes]], directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child, of a data loader say, that forgets what is its parent's
    context.destroy(linger=0)
    shutil.rmtree(directory, ignore_errors=True)


class _Transfer:
    """One push through the trainer end."""

    def __init__(self, end: TrainerIpcZmq, push: str, layout: Layout, peers: set[Peer], deadline: Deadline):
        assert end._arena is not None, "request() comes before transfer()"
        self._end, self._push, self._layout, self._peers, self._deadline = end, push, layout, peers, deadline
        self._arena, self._bucket_bytes = end._arena, end._bucket_bytes
        self._identity: dict[Peer, bytes] = {}
        self._peer: dict[bytes, Peer] = {}
        self._mapped: dict[Peer, str] = {}
        self._taken = dict.fromkeys(peers, -1)
        self._prepared: set[Peer] = set()
        self.gather_s = 0.0

    def meet(self) -> None:
        """Wait until every rank has said hello, and tell each how to map the arena."""
        self._wait(lambda: self._peers - self._identity.keys(), "the ranks to come for the bytes")
        for peer in self._identity:
            handle = None if self._mapped[peer] == self._arena.name else self._arena.handle()
            self._send(peer, Offer(push=self._push, arena=self._arena.name, handle=handle))

    def fill(self, tensors: Iterable[torch.Tensor]) -> Iterable[int]:
        """Pack the stream bucket by bucket; yields the bytes announced so far after each."""
        bucket, size = -1, self._bucket_bytes
        for entry, tensor in zip(self._layout.entries, tensors, strict=True):
            if tensor.shape != torch.Size(entry.spec.shape) or tensor.dtype != entry.dtype:
                raise errors.SourceError(
                    f"{entry.spec.name} changed while it was sent: {entry.spec.dtype} {entry.spec.shape} became "
                    f"{tensor.dtype} {tuple(tensor.shape)}"
                )
            done = 0
            if not tensor.is_contiguous() and entry.offset // size != (entry.offset + entry.nbytes - 1) // size:
                tensor = tensor.contiguous()  # noqa: PLW2901 - once, not for each bucket it lies in
            while done < entry.nbytes:
                wanted = (entry.offset + done) // size
                if wanted != bucket:
                    if bucket >= 0:
                        yield self._announce(bucket)
                    bucket = wanted
                    self._acquire(bucket)
                done = self._copy(entry, tensor, done)
        yield self._announce(max(bucket, 0))

    def _acquire(self, bucket: int) -> None:
        needed = bucket - SLOTS
        self._wait(lambda: {p for p in self._peers if self._taken[p] < needed}, f"bucket {needed} to be taken")

    def _copy(self, entry: Entry, tensor: torch.Tensor, done: int) -> int:
        """Copy the tensor, or as much of it as the bucket still holds; returns the bytes of it copied so far."""
        start = time.perf_counter()
        position = entry.offset + done
        room = self._bucket_bytes - position % self._bucket_bytes
        at = position % (SLOTS * self._bucket_bytes)
        with torch.no_grad():
            if room >= entry.nbytes and done == 0:
                target = self._arena.bytes[at : at + entry.nbytes].view(entry.dtype).view(entry.spec.shape)
                staging.copy(target, tensor)
                done = entry.nbytes
            else:
                raw = tensor.view(-1).view(torch.uint8)
                part = raw[done : done + room]
                staging.copy(self._arena.bytes[at : at + part.numel()], part)
                done += part.numel()
        self.gather_s += time.perf_counter() - start
        return done

    def _announce(self, bucket: int) -> int:
        staging.synchronize(self._arena.bytes.device)
        self._deadline.check(f"bucket {bucket} to be packed")
        for peer in self._peers:
            self._send(peer, Filled(push=self._push, index=bucket))
        return min((bucket + 1) * self._bucket_bytes, self._layout.nbytes)

    def finish(self) -> None:
        """Wait until every rank holds the whole stream."""
        self._wait(lambda: self._peers - self._prepared, "the ranks to hold everything")

    def call_off(self, error: BaseException) -> None:
        """Tell the ranks that are listening that no more will come."""
        for peer in self._identity:
            message = str(error) or type(error).__name__
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
            if not self._end._socket.poll(int(self._deadline.left() * 1000)):
                self._deadline.check(f"{what}; still missing: {', '.join(sorted(map(str, absent)))}")
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
            self._prepared.add(sender)
        else:
            raise _named_error(message, str(sender))


class EngineIpcZmq:
    """Engine end, one a rank. Keeps its socket and its mapping of the arena from push to push."""

    def __init__(self, device: torch.device):
        self._device = device
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._address = ""
        self._arena: torch.Tensor | None = None
        self._arena_name = ""
        self._stage: torch.Tensor | None = None
        # The thread of one push confirms while that of the next may already dial.
        self._turn = threading.Lock()
        self._close = weakref.finalize(self, self._context.destroy, linger=0)

    def close(self) -> None:
        """Release socket, mapping and stage; idempotent."""
        self._arena = self._stage = None
        self._close()

    def receive(self, request: IpcPrepare, layout: Layout, rank: int, cancelled: Event) -> torch.Tensor:
        """See `base.EngineEnd`."""
        with self._turn:
            try:
                return self._receive(request, layout, rank, cancelled)
            except Exception as error:
                known = error if isinstance(error, errors.WeightSyncError) else _translated(error)
                self._tell(Failed(push=request.push, error=type(known).__name__, message=str(known)))
                raise known from error

    def _receive(self, request: IpcPrepare, layout: Layout, rank: int, cancelled: Event) -> torch.Tensor:
        socket = self._dial(request.address)
        deadline = Deadline(request.timeout_s + _GRACE_S)
        hello = Hello(push=request.push, secret=request.secret, rank=rank, mapped=self._arena_name)
        socket.send(wire.pack(hello))
        return self._take(socket, request, layout, deadline, cancelled)

    def _tell(self, message: wire.FromRank) -> None:
        # A sender that cannot be reached any more has nothing to be told.
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send(wire.pack(message))

    def release(self, address: str) -> None:
        """See `base.EngineEnd`."""
        with self._turn:
            if address == self._address:
                self._hang_up()
                self._arena, self._arena_name, self._stage = None, "", None

    def confirm(self, push: str) -> None:
        """See `base.EngineEnd`."""
        with self._turn:
            self._tell(Prepared(push=push))

    def _dial(self, address: str) -> zmq.Socket[bytes]:
        security.check_ipc_address(address)
        if self._socket is None or address != self._address:
            self._hang_up()
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            self._socket, self._address = socket, address
        return self._socket

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket, self._address = None, ""

    def _next(
        self, socket: zmq.Socket[bytes], push: str, deadline: Deadline, cancelled: Event, what: str
    ) -> wire.FromSender:
        while True:
            if cancelled.is_set():
                raise TransferFailed("the push was aborted")
            if not socket.poll(int(min(deadline.left(), _CANCEL_POLL_S) * 1000)):
                deadline.check(what)
                continue
            try:
                message = wire.unpack_from_sender(socket.recv(zmq.DONTWAIT))
            except msgspec.MsgspecError as error:
                raise TransferFailed(f"the sender's message cannot be read: {error}") from error
            if message.push != push:
                continue  # left over from a push that was called off
            if isinstance(message, Failed):
                raise _named_error(message, "the sender")
            return message

    def _take(
        self, socket: zmq.Socket[bytes], request: IpcPrepare, layout: Layout, deadline: Deadline, cancelled: Event
    ) -> torch.Tensor:
        offer = self._next(socket, request.push, deadline, cancelled, "the sender's arena")
        if not isinstance(offer, Offer):
            raise TransferFailed(f"the sender announced {type(offer).__name__} before its arena")
        arena = self._map(offer, SLOTS * request.bucket_bytes)
        held = layout.nbytes <= arena.numel()
        stage = arena if held else self._provide_stage(layout.nbytes)
        for index in range(layout.buckets(request.bucket_bytes) or 1):
            filled = self._next(socket, request.push, deadline, cancelled, f"bucket {index}")
            if not isinstance(filled, Filled) or filled.index != index:
                raise TransferFailed(f"expected bucket {index}, got {filled}")
            if not held:
                start = index * request.bucket_bytes
                end = min(start + request.bucket_bytes, layout.nbytes)
                slot = (index % SLOTS) * request.bucket_bytes
                staging.copy(stage[start:end], arena[slot : slot + end - start])
                staging.synchronize(stage.device)
            socket.send(wire.pack(Taken(push=request.push, index=index)))
        return stage[: layout.nbytes]

    def _map(self, offer: Offer, nbytes: int) -> torch.Tensor:
        if offer.handle is not None:
            self._arena, self._arena_name = None, ""  # unmap the old one first
            self._arena = staging.attach(offer.handle)
            self._arena_name = offer.arena
        if self._arena is None or offer.arena != self._arena_name:
            raise TransferFailed(f"the arena {offer.arena} was never mapped here; push again")
        if self._arena.numel() < nbytes:
            raise TransferFailed(f"the arena holds {self._arena.numel()} bytes, two buckets take {nbytes}")
        return self._arena

    def _provide_stage(self, nbytes: int) -> torch.Tensor:
        if self._stage is None or self._stage.numel() < nbytes:
            self._stage = None
            free = staging.free_bytes(self._device)
            if nbytes > free:
                raise TransferFailed(
                    f"the stage takes {nbytes} bytes and {free} are free on {self._device}; "
                    "pass a bucket_bytes of at least half the model, or free memory"
                )
            self._stage = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        return self._stage
