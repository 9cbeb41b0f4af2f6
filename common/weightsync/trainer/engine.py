"""What a sender knows of one engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightsync.errors import Weights
from weightsync.protocol import http
from weightsync.trainer.client import EngineClient
from weightsync.transports.base import Peer


@dataclass
class Engine:
    """One engine: what it said when it was opened, and the version it served when it was last heard of.

    ``transport``: how it is reached, and ``reason`` why so. ``stopped``: it served none, being dirty or never synced.
    ``leased``: it has answered the prepare of this push. ``noticed``: what the next result is to tell of it.
    ``interfaces``: what its ranks said they will use. ``manifest``: the name of the one it was sent last.
    ``committed``: which instance of it was the last to commit what this sender pushed. ``record_s``: how long it stood
    still to find out what its loader does with that. ``unsettled``: the push or rollback that it was asked to commit,
    until its outcome is known.
    """

    client: EngineClient
    hello: http.OpenReply
    version: str
    transport: str
    reason: str
    stopped: bool = False
    leased: bool = False
    noticed: list[str] = field(default_factory=list)
    interfaces: str = ""
    manifest: str = ""
    committed: str = ""
    record_s: float = 0.0
    unsettled: str = ""

    @property
    def weights(self) -> Weights:
        """What it serves, if nothing has changed it since it was last heard of."""
        return "unknown" if self.unsettled else "dirty" if self.stopped else "unchanged"

    @property
    def peers(self) -> set[Peer]:
        """Its ranks."""
        return {Peer(self.client.url, rank.rank) for rank in self.hello.ranks}
