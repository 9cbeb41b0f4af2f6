"""The engine end of the rdt transport, in every rank; `trainer` is the other end."""

from __future__ import annotations

from threading import Event

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import control, http
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.nixl.agents import IN_FLIGHT
from weightsync.transports.rdt import compat
from weightsync.transports.rdt.incoming import RdtIncoming
from weightsync.transports.rdt.messages import HANDLE


class RdtEngineEnd:
    """Engine end of one rank, see `base.EngineEnd`. ``device`` is where it receives the bytes."""

    bytes_per_s = 0.0

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check, self.confirm = self._control.check, self._control.confirm
        #: Serves one sender after another, until a push fails.
        self._direct: compat.Direct | None = None
        self._incoming: RdtIncoming | None = None
        #: The two buffers that receive buckets when there is no stage.
        self._own: list[torch.Tensor] = []

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """Unsupported: rdt has no set-up route."""
        raise UnsupportedOption(f"rdt takes no handshake, but was sent {type(handshake).__name__}")

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> RdtIncoming:
        """See `base.EngineEnd`."""
        self._leave()
        session, offer = self._control.open(request, subset, rank, (), cancelled)
        if self._direct is None:  # not before: only a sender that is connected can be told of a failure
            self._direct = compat.Direct(f"rank {rank}", in_cluster=False)
        handle = control.handle_of(offer.handle, HANDLE, "the sender")
        nbytes = min(subset.layout.nbytes, request.slots * request.bucket_bytes)
        if handle is None or handle.nbytes < nbytes:
            has = "no arena" if handle is None else f"an arena of {handle.nbytes} bytes"
            raise TransferFailed(f"the sender offers {has}, but its buckets take {nbytes}; push again")
        self._incoming = RdtIncoming(self._direct, session, request, subset, offer.arena, handle, self._buffer)
        return self._incoming

    def _buffer(self, bucket_bytes: int) -> torch.Tensor:
        if not self._own or self._own[0].numel() != IN_FLIGHT * bucket_bytes:
            self._own = [arenas.plain(IN_FLIGHT * bucket_bytes, self._device)]
        return self._own[0]

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; with a READ under way the agent ends, so that nothing writes to that memory later."""
        self._control.fail(push, error)
        self._leave()

    def _leave(self) -> None:
        if self._incoming is not None:
            if held := self._incoming.leave():
                self._end()
            del held  # not before the agent has ended
            self._incoming = None

    def _end(self) -> None:
        if self._direct is not None:
            self._direct.end()
            self._direct = None
        self._own.clear()

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._leave()
        self._own.clear()
        return True

    def close(self) -> None:
        """Release everything; idempotent."""
        self._leave()
        self._end()
        self._control.close()
