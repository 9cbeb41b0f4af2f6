"""What a sender knows of one engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from weightsync.errors import Weights
from weightsync.protocol import http
from weightsync.protocol.expected import ExpectedReply
from weightsync.trainer.client import EngineClient
from weightsync.transports.base import Peer

#: The replies of engines to a commit, by URL.
Commits = dict[str, http.CommitReply]


@dataclass
class Engine:
    """One engine: its reply when it was opened, and what this sender has learned of it since.

    ``version``: what it served by its last reply. ``transport`` and ``reason``: how it is reached, and why so.
    ``stopped``: it serves no version, being dirty or never synced. ``leased``: it has accepted the current push.
    ``noticed``: remarks for its next result. ``interfaces``: the network interfaces that its ranks use. ``manifest``:
    the name of the last manifest sent to it. ``committed``: the instance of it that last committed a push of this
    sender, of each adapter by its name, and of weights by an empty one. ``record_s``: seconds that it generated nothing
    in the last prepare, while its loader was recorded. ``unsettled``: the push or rollback that it was asked to commit,
    until the outcome is known. ``expected``: what it said a complete push is, once it was asked. ``adapters``: the
    versions of the adapters that it served, by name. ``content``: the bytes that its ranks have of this sender's last
    push to it, see `UpdateRequest.content`.
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
    committed: dict[str, str] = field(default_factory=dict)
    record_s: float = 0.0
    unsettled: str = ""
    expected: ExpectedReply | None = None
    adapters: dict[str, str] = field(default_factory=dict)
    content: str = ""

    def __post_init__(self) -> None:
        self.adapters |= self.hello.adapters or {}

    def serves(self, lora: str | UnsetType) -> str:
        """The version that it served by its last reply, of its weights or of an adapter; empty if there is none."""
        return self.version if lora is UNSET else self.adapters.get(lora, "")

    def now_serves(self, committed: http.CommitRequest) -> None:
        """It has committed a push of this sender, or a rollback."""
        if committed.lora is not UNSET:
            self.adapters[committed.lora] = committed.version
        else:
            self.version, self.stopped = committed.version, False
        self.committed[committed.lora or ""] = self.hello.instance

    def missing(self, pushed: Mapping[str, str]) -> list[str]:
        """What it did not serve by its last reply of what this sender ``pushed`` last, by the keys of ``committed``."""
        served = {**self.adapters, "": self.version}
        return [name for name, version in pushed.items() if served.get(name) != version]

    def lacks(self, pushed: Mapping[str, str], status: http.StatusReply) -> list[str]:
        """What it does not serve as this sender ``pushed`` it last, by the keys of ``committed``."""
        served = {**(status.adapters or {}), "": "" if self.stopped else status.version}
        instance = status.instance
        return [n for n, version in pushed.items() if (served.get(n), self.committed.get(n)) != (version, instance)]

    @property
    def weights(self) -> Weights:
        """What it serves, if no push has changed it since it last replied."""
        return "unknown" if self.unsettled else "dirty" if self.stopped else "unchanged"

    @property
    def peers(self) -> set[Peer]:
        """Its ranks."""
        return {Peer(self.client.url, rank.rank) for rank in self.hello.ranks}
