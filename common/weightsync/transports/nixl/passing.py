"""What an engine rank passes on to others over NIXL, each bucket once it is verified, see `suppliers`."""

from __future__ import annotations

import torch

from weightsync.errors import TransferFailed
from weightsync.protocol import control
from weightsync.protocol.control import PassOn
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Peer
from weightsync.transports.nixl.messages import HANDLE
from weightsync.transports.nixl.writing import Writer, Writing


class Passing:
    """One push as a rank passes it on from its stage, ``memory``. ``writer`` is kept from push to push."""

    def __init__(self, writer: Writer, memory: torch.Tensor, subset: Subset, request: UpdateRequest):
        self._writer, self._memory, self._subset = writer, memory, subset
        self._bucket_bytes = request.bucket_bytes
        self._count = subset.layout.buckets(request.bucket_bytes)
        self._writing = Writing(request.push)
        #: Whether a WRITE may be under way that nobody waits for.
        self.abandoned = False
        #: The ranks that cannot be reached, until the sender has another rank supply them, or this one try again.
        self._lost: set[Peer] = set()

    def told(self, message: PassOn) -> None:
        """Begin to pass on to a rank, try again if it could not be reached, or stop. Raises `TransferFailed`."""
        peer = Peer(message.engine, message.rank)
        handle = control.handle_of(message.handle, HANDLE, str(peer))
        if handle is None:
            self._lost.discard(peer)
            self._drop(peer)
            return
        if self._writing.knows(peer):
            return  # the rank is stuck, not lost
        if handle.nbytes < min(self._subset.layout.nbytes, self._count * self._bucket_bytes):
            raise TransferFailed(f"{peer} offers {handle.nbytes} bytes, fewer than the stage takes")
        if peer in self._lost:
            self._writer.reconnect(handle.agent)
        runs = self._subset.cut(self._bucket_bytes)
        try:
            made = self._writer.transfers(
                handle,
                self._memory,
                lambda: [[(at, at, nbytes) for at, nbytes in those] for those in runs],
                (self._subset.layout.nbytes, self._bucket_bytes, self._subset.name),
                peer,
            )
        except TransferFailed:
            self._lost.add(peer)
            return
        self._lost.discard(peer)
        self._writing.add(peer, made, self._count, message.first)

    def _drop(self, peer: Peer) -> None:
        self.abandoned = self.abandoned or self._writing.knows(peer)
        self._writing.drop(peer)

    def verified(self, bucket: int) -> None:
        """Note that a bucket may be passed on, with all before it."""
        self._writing.filled = bucket + 1

    def drive(self) -> bool:
        """Pass on what may be; returns whether all ranks have everything, and none is lost."""
        self._writing.drive()
        for peer in list(self._writing.failed):  # which is not this rank's failure
            self._lost.add(peer)
            self._drop(peer)
        return not self._lost and all(last + 1 == self._count for last in self._writing.arrived().values())
