"""What a sender tells of its pushes: metrics in prometheus_client's default registry, and the span of each call.

Labels are from the tables here and in `states`, so the number of series never grows, and every series exists from the
start, so that counting cannot fail a push.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

from weightsync import observe
from weightsync.errors import WeightSyncError
from weightsync.protocol.states import PUSH
from weightsync.trainer.results import EngineResult

KINDS: Final = ("push", "rollback", "catch_up")
#: How a call ends. ``partial``: it raised, and an engine serves the pushed version all the same. ``interrupted``: it
#: raised something else than a `WeightSyncError`, such as Ctrl-C. The others are those of `WeightSyncError.weights`.
OUTCOMES: Final = ("committed", "unchanged", "partial", "unknown", "dirty", "interrupted")
#: The keys of `results.PushResult.seconds`.
PHASES: Final = ("plan", "arena", "prepare", "record", "transfer", "gather", "digest", "verify", "commit", "total")

#: Numbers the commits of this process.
_numbers: Final = itertools.count(1)


class Metrics:
    """The metrics of all senders of this process, made by ``client``, which is prometheus_client."""

    def __init__(self, client: Any):
        gauge = functools.partial(client.Gauge, multiprocess_mode="mostrecent")
        histogram = functools.partial(client.Histogram, buckets=observe.BUCKETS_S)
        pushes = client.Counter(
            "weightsync:trainer_pushes", "Calls of senders by what the engines serve after them.", ["kind", "outcome"]
        )
        self.pushes = {(kind, end): pushes.labels(kind, end) for kind in KINDS for end in OUTCOMES}
        phases = histogram("weightsync:trainer_push_seconds", "Duration of the phases of committed pushes.", ["phase"])
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        self.pause = histogram("weightsync:trainer_pause_seconds", "How long new requests waited, in each engine.")
        self.nbytes = client.Counter("weightsync:trainer_pushed_bytes", "Bytes of the tensors of committed pushes.")
        self.number = gauge("weightsync:trainer_commit_number", "Number of the last commit of this process.")
        self.committed_at = gauge("weightsync:trainer_commit_timestamp_seconds", "When the last commit was made.")
        senders = client.Gauge(
            "weightsync:trainer_senders", "Senders that are in a state.", ["state"], multiprocess_mode="livesum"
        )
        self.senders = {state: senders.labels(state) for state in PUSH if state != "closed"}
        for each in (self.number, self.committed_at):
            each.set(0)  # a gauge of several processes is not shown before it is set


@functools.cache
def _metrics() -> Metrics | None:
    return observe.metrics(Metrics)


def moved(before: str, after: str) -> None:
    """A sender has gone from one state to another; ``before`` is empty for a new one."""
    if (metrics := _metrics()) is not None:
        if before:
            metrics.senders[before].dec()
        if after in metrics.senders:
            metrics.senders[after].inc()


def committed() -> int:
    """Every engine has committed; the number of this commit."""
    number = next(_numbers)
    if (metrics := _metrics()) is not None:
        metrics.number.set(number)
        metrics.committed_at.set_to_current_time()
    return number


class Done(Protocol):
    """To be called with the result of a call that succeeded."""

    def __call__(self, seconds: Mapping[str, float], engines: Iterable[EngineResult], nbytes: int) -> None:
        """``seconds`` by phase, what each engine did, and the bytes of the tensors."""


@contextmanager
def counted(kind: str) -> Iterator[Done]:
    """Around a call that pushes, of a ``kind`` in `KINDS`; a call that neither raises nor is done was none."""
    metrics = _metrics()

    def done(seconds: Mapping[str, float], engines: Iterable[EngineResult], nbytes: int) -> None:
        if metrics is None:
            return
        metrics.pushes[kind, "committed"].inc()
        for phase, value in seconds.items():
            if phase in metrics.phases:
                metrics.phases[phase].observe(value)
        for engine in engines:
            metrics.pause.observe(engine.pause_s)
        metrics.nbytes.inc(nbytes)

    with observe.span(f"weightsync.{kind}"):
        try:
            yield done
        except BaseException as error:
            if metrics is not None:
                metrics.pushes[kind, _outcome(error)].inc()
            raise


def _outcome(error: BaseException) -> str:
    if not isinstance(error, WeightSyncError):
        return "interrupted"
    return "partial" if error.weights == "committed" else error.weights
