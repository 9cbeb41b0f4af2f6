"""What a front end tells of its pushes: the engine's metrics, a line of the log for each outcome, and spans.

The metrics are on the engine's own ``/metrics``. Only servers have one: an engine in the trainer's process has none of
its own, and the trainer's metrics count its pushes. All labels are from tables of this package, so the number of series
never grows, and every series exists from the start, so that counting cannot fail a push.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec import UNSET

from weightsync import observe
from weightsync.errors import BaseUnknown, ManifestUnknown, changed_nothing
from weightsync.protocol import http, states
from weightsync.tensors.layout import DTYPES

logger = logging.getLogger(__name__)

#: How a push, or a rollback, ends in an engine. ``refused``: it was not accepted. ``aborted``: by its sender, an
#: operator, or the next push. ``abandoned``: its trainer is gone. ``failed``: the commit failed and changed nothing.
#: ``dirty``: it failed half-way, or in an engine that was dirty before.
OUTCOMES: Final = {
    "push": ("committed", "refused", "aborted", "abandoned", "failed", "dirty"),
    "rollback": ("committed", "failed", "dirty"),
}
PHASES: Final = ("prepare", "transfer", "commit")
#: The steps of a commit, see `http.CommitReply`.
STEPS: Final = ("record", "standby", "pause", "apply", "caches", "resume")


class Metrics:
    """The metrics of an engine, made by ``client``, which is prometheus_client.

    Several processes of an engine may show them. Only the one with the front end sets them, so of a gauge the value
    that was set last is right.
    """

    def __init__(self, client: Any):
        gauge = functools.partial(client.Gauge, multiprocess_mode="mostrecent")
        histogram = functools.partial(client.Histogram, buckets=observe.BUCKETS_S)
        pushes = client.Counter("weightsync:pushes", "Pushes and rollbacks by their outcome.", ["kind", "outcome"])
        self.pushes = {(kind, end): pushes.labels(kind, end) for kind, ends in OUTCOMES.items() for end in ends}
        phases = histogram("weightsync:push_seconds", "Duration of the phases of a push.", ["phase"])
        self.phases = {phase: phases.labels(phase) for phase in PHASES}
        steps = histogram("weightsync:commit_step_seconds", "Duration of the steps of a commit.", ["step"])
        self.steps = {step: steps.labels(step) for step in STEPS}
        self.pause = histogram("weightsync:pause_seconds", "How long new requests waited for a commit.")
        self.nbytes = client.Counter("weightsync:pushed_bytes", "Bytes of the tensors of committed pushes.")
        self.number = gauge("weightsync:commit_number", "Number of the last commit since the engine was started.")
        self.committed_at = gauge("weightsync:commit_timestamp_seconds", "When the last commit was made.")
        state = gauge("weightsync:state", "1 for the state that the engine is in.", ["state"])
        self.states = {name: state.labels(name) for name in states.ENGINE}
        self.lease_taken_at = gauge(
            "weightsync:lease_taken_timestamp_seconds", "When the lease was taken by its holder; 0 if nobody holds it."
        )
        for each in (self.number, self.committed_at, self.lease_taken_at, *self.states.values()):
            each.set(0)  # a gauge of several processes is not shown before it is set


@functools.cache
def of_server() -> Metrics | None:
    """The metrics of the engine that this process serves; None without prometheus_client."""
    return observe.metrics(Metrics)


class _Accepted(NamedTuple):
    """The push that an engine has accepted and not ended."""

    push: str
    nbytes: int
    since: float


class Report:
    """What one front end has to tell, with its id, of each push; it tells each outcome once."""

    def __init__(self, metrics: Metrics | None):
        self._metrics = metrics
        self._accepted: _Accepted | None = None
        #: The name and the bytes of the last manifest that came in full.
        self._manifest = ("", 0)
        self._commits = 0

    def moved(self, _before: http.State, after: http.State) -> None:
        """The engine is in the state ``after``."""
        if self._metrics is not None:
            for state, gauge in self._metrics.states.items():  # all: an engine before, in this process, set its own
                gauge.set(int(state == after))

    def lease_taken(self, moment: float) -> None:
        """The lease is held since ``moment``; 0 if it is free."""
        if self._metrics is not None:
            self._metrics.lease_taken_at.set(moment)

    @contextmanager
    def prepare(self, asked: http.UpdateRequest) -> Iterator[None]:
        """Around the preparation of a push."""
        start = time.perf_counter()
        try:
            with observe.span("weightsync.engine.prepare", push=asked.push):
                yield
        except (ManifestUnknown, BaseUnknown):
            raise  # the sender sends the push again, with what is lacking
        except BaseException as error:
            logger.info("push %s: refused: %s", asked.push, error)
            self._count("push", "refused")
            raise
        now = time.perf_counter()
        self._observe("prepare", now - start)
        logger.debug("push %s: accepted after %.3f s", asked.push, now - start)
        known, nbytes = self._manifest
        if asked.manifest and self._metrics is not None:
            known, nbytes = asked.known, sum(map(_nbytes, asked.manifest))
        if asked.adapter is UNSET:  # an adapter's manifest is always sent
            self._manifest = known, nbytes
        self._accepted = _Accepted(asked.push, nbytes if known == asked.known else 0, now)

    @contextmanager
    def commit(self, asked: http.CommitRequest) -> Iterator[Callable[[http.CommitReply], None]]:
        """Around a commit; call what this returns with the reply."""
        start = time.perf_counter()
        kind = "rollback" if asked.rollback else "push"
        replies: list[http.CommitReply] = []
        accepted = None if asked.rollback else self._accepted
        if accepted is not None:
            self._observe("transfer", start - accepted.since)
            self._accepted = None
        try:
            with observe.span("weightsync.engine.commit", push=asked.push, version=asked.version):
                yield replies.append
        except BaseException as error:
            end = "failed" if changed_nothing(error) else "dirty"
            log = logger.info if end == "failed" else logger.error
            log("%s %s: version %r was not committed (%s): %s", kind, asked.push, asked.version, end, error)
            self._count(kind, end)
            raise
        finally:
            self._observe("commit", time.perf_counter() - start)
        (reply,) = replies
        self._commits += 1
        self._count(kind, "committed")
        self._served(reply, accepted.nbytes if accepted is not None else 0)
        logger.info(
            "%s %s: version %r is served, commit number %d; it took %.3f s, and requests waited %.3f s",
            kind,
            asked.push,
            asked.version,
            self._commits,
            time.perf_counter() - start,
            reply.pause_s,
        )

    def dropped(self, end: str, why: str) -> None:
        """The push that the engine has accepted, if any, ended without a commit."""
        if self._accepted is not None:
            logger.warning("push %s: %s: %s", self._accepted.push, end, why)
            self._accepted = None
            self._count("push", end)

    def _count(self, kind: str, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.pushes[kind, outcome].inc()

    def _observe(self, phase: str, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.phases[phase].observe(seconds)

    def _served(self, reply: http.CommitReply, nbytes: int) -> None:
        if self._metrics is None:
            return
        self._metrics.pause.observe(reply.pause_s)
        for step, seconds in reply.seconds.items():
            if step in self._metrics.steps:
                self._metrics.steps[step].observe(seconds)
        self._metrics.nbytes.inc(nbytes)
        self._metrics.number.set(self._commits)
        self._metrics.committed_at.set_to_current_time()


def _nbytes(spec: http.TensorSpec) -> int:
    return math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
