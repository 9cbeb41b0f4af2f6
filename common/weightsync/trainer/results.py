"""What a push tells its caller."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.protocol import http
from weightsync.trainer.buckets import Staging


@dataclass(frozen=True)
class EngineResult:
    """One engine's part of a push. ``seconds``: the steps of its commit.

    ``pause_s``: how long new requests waited; with ``pause="wait"`` that includes what those in flight took to finish.
    Before the pause the engine stands still for ``record`` of these seconds, to see whether its load plan still holds.

    ``noticed`` says what the sender found out about it: that it was restarted, or served another version than expected.
    ``transport`` is how the bytes got there, and ``transport_reason`` why so.
    """

    pause_s: float
    seconds: dict[str, float]
    transport: str
    transport_reason: str
    noticed: tuple[str, ...] = ()


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    ``nbytes`` counts the tensors, without padding. ``seconds``: ``prepare`` (the engines check the manifest; of it
    ``record`` is how long the slowest engine stood still to find out what its loader does with it),
    ``transfer`` (the bytes travel while the engines serve; of it ``gather`` is packing on the trainer, ``digest`` its
    hashing, ``verify`` the hashing of the slowest rank), ``commit`` (pause to resume, slowest engine) and ``total``.
    ``verify`` is how it was checked, ``staging`` where the bytes waited, and ``staging_reason`` why there.
    """

    version: str
    nbytes: int
    seconds: dict[str, float]
    engines: dict[str, EngineResult]
    verify: http.Verify
    staging: Staging
    staging_reason: str
