"""What a push returns to its caller."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from weightsync.protocol import http
from weightsync.trainer.buckets import Staging
from weightsync.trainer.reading import How


@dataclass(frozen=True)
class EngineResult:
    """One engine's part of a push.

    ``pause_s``: seconds that new requests waited; with ``pause="wait"`` this includes the time that requests in flight
    took to finish. ``seconds``: duration of each step of its commit. ``record`` is the time before the pause in which
    the engine generates nothing because it compares its load plan with its loader, and ``standby`` that in which it
    loads its standby, in slices between its steps.

    ``transport``: how the bytes got there; ``transport_reason``: why that transport was chosen. ``noticed``: remarks,
    for example that the engine was restarted, or served another version than this sender had left it with. ``loading``:
    how its ranks loaded the push, which tensors went the engine's own way and why, as ``weightsync status`` says it;
    each way once, empty for adapters and rollbacks.
    """

    pause_s: float
    seconds: dict[str, float]
    transport: str
    transport_reason: str
    noticed: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeltaResult:
    """What engines on other hosts were sent in place of a whole version: what changed since the one before.

    It took ``nbytes``, and ``find_s`` seconds to find. ``changed`` tensors were sent as what differs in them, ``whole``
    ones in full, because more differs, and ``same`` ones not at all.
    """

    nbytes: int
    changed: int
    whole: int
    same: int
    find_s: float


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    ``version`` is the label that the engines now serve, ``nbytes`` the size of the tensors without padding.

    ``seconds`` holds the duration of each phase: ``prepare`` (the engines check the manifest), ``transfer`` (the bytes
    travel while the engines serve), ``commit`` (pause to resume, slowest engine) and ``total``; and of these parts:
    ``record`` (in prepare, how long the slowest engine generated nothing because its loader was recorded), ``gather``
    and ``digest`` (in transfer, packing and hashing on the trainer) and ``verify`` (in transfer, hashing at the slowest
    rank).

    ``cast`` is the number of tensors that were cast to another dtype, ``quantised`` that of weights that were
    quantised, and ``not_finite`` the number of infinite and NaN elements in these. ``kept`` are the names that
    ``allow_missing`` left as the engines have them, and those of draft models that were not pushed; those in
    ``unverified`` could not be compared between the engines.

    ``read`` is how the trainer's tensors were read: they were ``"copied"`` before any engine was asked (`push_async`),
    read while they were ``"sent"``, or read by the engines ``"in place"`` until they had committed.

    ``lora`` is the name of the adapter that was pushed, empty for weights.

    ``delta`` is what engines on other hosts were sent in place of all of it; or if it is None, ``delta_reason`` says
    why they were sent everything.

    ``engines`` has each engine's part, by URL. ``verify`` is how the push was verified, ``staging`` where the bytes
    waited for the commit, and ``staging_reason`` why there.
    """

    version: str
    nbytes: int
    seconds: dict[str, float]
    engines: dict[str, EngineResult]
    verify: http.Verify
    staging: Staging
    staging_reason: str
    cast: int = 0
    quantised: int = 0
    not_finite: int = 0
    kept: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    read: How = "sent"
    lora: str = ""
    delta: DeltaResult | None = None
    delta_reason: str = ""


class PushFuture(Future[PushResult]):
    """What `sender.Sender.push_async` returns: the future `PushResult` of a push.

    ``in_place``: the engines read the trainer's parameters in place, which must not change before the future is done.
    """

    in_place = False
