"""The engine end of the nixl transport, in every rank; `trainer` is the other end."""

from __future__ import annotations

from threading import Event

import torch

from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.http import Handshake, UpdateRequest
from weightsync.tensors.subset import Subset
from weightsync.transports import base
from weightsync.transports.control.engine import EngineControl
from weightsync.transports.control.sockets import interface_of, way_to
from weightsync.transports.nixl.agents import Agent
from weightsync.transports.nixl.incoming import NixlIncoming
from weightsync.transports.nixl.link import Link
from weightsync.transports.nixl.messages import RegisterNixl


class NixlEngineEnd:
    """Engine end of one rank, see `base.EngineEnd`. ``device`` is where it receives the bytes."""

    def __init__(self, device: torch.device):
        self._device = device
        self._control = EngineControl(remote=True)
        self.check = self._control.check
        #: Serves one sender after another, until a push fails.
        self._agent: Agent | None = None
        self._link: Link | None = None
        self._incoming: NixlIncoming | None = None
        self.bytes_per_s = 0.0

    def join(self, handshake: Handshake, rank: int) -> http.RankJoined:
        """See `base.EngineEnd`."""
        if not isinstance(handshake, RegisterNixl):
            raise UnsupportedOption(f"nixl takes a RegisterNixl, but was sent {type(handshake).__name__}")
        here = interface_of(way_to(rank, handshake.address)) if handshake.address else ""
        self._drop()
        if self._agent is None:
            self._agent = Agent(self._device, rank)
        agent = self._agent
        self._link = Link(agent, handshake, self._device)
        return http.RankJoined(
            rank=rank,
            device=str(self._device),
            interface=agent.nic or here,
            agent=agent.name,
            metadata=agent.metadata(),
            written=self._link.ways[0].written,
        )

    def open(self, request: UpdateRequest, subset: Subset, rank: int, cancelled: Event) -> base.Incoming:
        """See `base.EngineEnd`."""
        if self._link is None:
            raise TransferFailed(f"rank {rank} knows no NIXL agent: register_nixl comes before update_weights_via_nixl")
        session, offer = self._control.open(request, subset, rank, self._link.known(), cancelled)
        self._link.take(session, offer, request, subset.layout)
        self._incoming = NixlIncoming(self._link, session, request, subset, offer.arena, rank)
        return self._incoming

    def confirm(self, push: str, verify_s: float) -> None:
        """See `base.EngineEnd`; before the stage is used or written again, no transfer may be under way."""
        if self._incoming is not None:
            self.bytes_per_s = self._incoming.bytes_per_s or self.bytes_per_s
        if self._link is not None and self._incoming is not None and self._incoming.lingers:
            self._end()  # the trainer sends its handshake again
        self._control.confirm(push, verify_s)

    def fail(self, push: str, error: BaseException) -> None:
        """See `base.EngineEnd`; the agent ends before its memory is freed, so that no transfer writes there later."""
        self._control.fail(push, error)
        if self._link is not None and self._link.moving:  # otherwise the trainer does not send its handshake again
            self._end()

    def _drop(self) -> None:
        if self._link is not None:
            held = self._link.held()
            self._link.close()
            self._link = None
            if self._agent is not None and self._agent.unfinished:
                self._agent.close(held)
                self._agent = None

    def release(self, address: str) -> bool:
        """See `base.EngineEnd`."""
        if address != self._control.address:
            return False
        self._control.disconnect()
        self._drop()
        return True

    def _end(self) -> None:
        held = self._link.held() if self._link is not None else []
        self._drop()
        if self._agent is not None:
            self._agent.close()
            self._agent = None
        del held  # not before the agent has ended

    def close(self) -> None:
        """Release everything; idempotent."""
        self._end()
        self._control.close()
