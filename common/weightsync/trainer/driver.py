"""Drives the engines from a trainer, or from its rank 0: one operation at a time, each within a deadline."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from msgspec import UNSET, UnsetType

from weightsync.deadline import Deadline
from weightsync.errors import (
    BaseUnknown,
    DigestMismatch,
    EngineRestarted,
    SourceError,
    TransferFailed,
    Weights,
    WeightSyncError,
    joined,
)
from weightsync.memory import arenas, cuda_ipc
from weightsync.protocol import http
from weightsync.protocol.draft import of_draft
from weightsync.protocol.expected import Lent
from weightsync.protocol.in_process import Target
from weightsync.protocol.states import Machine
from weightsync.sources import Source
from weightsync.sources.iterator import IteratorSource
from weightsync.sources.lora import LoraSource
from weightsync.trainer import buckets, lora_plan, metrics
from weightsync.trainer.asked import Asked
from weightsync.trainer.engine import Commits
from weightsync.trainer.engines import Engines
from weightsync.trainer.lockstep import in_lockstep
from weightsync.trainer.model_push import ModelPush, Repeated
from weightsync.trainer.outgoing import Sent
from weightsync.trainer.progress import Shown, shown
from weightsync.trainer.push import Push, Rollback, connect, release, settle
from weightsync.trainer.push_plan import Options, Planner, PushPlan
from weightsync.trainer.ranks import Coordinator
from weightsync.trainer.reading import Reading
from weightsync.trainer.results import EngineResult, PushResult
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry

logger = logging.getLogger(__name__)

#: How many times the memory of arenas must be free if they are made before the first push: that may read
#: parameters in place, and engines make their standbys.
_AMPLE: Final = 3


class Driver:
    """The engines at ``targets`` and the transfer to them; ``ranks`` coordinates the trainer's other ranks, if any.

    Building one opens every engine. Raises `WeightSyncError`.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        key: str,
        options: Options,
        ranks: Coordinator | None,
        machine: Machine[str],
        deadline: Deadline,
    ):
        several_hosts = ranks is not None and bool(ranks.addresses)
        pick = functools.partial(registry.pick, options.transport, several_hosts=several_hosts)
        self.engines = Engines(targets, key, options.pause, pick, deadline)
        self._planner = Planner(self.engines, options, ranks)
        self._options, self._ranks, self._machine = options, ranks, machine
        self._transfer: Transfer | None = None
        #: The seconds in which the push was planned.
        self._plan_s = 0.0
        #: Labels of the versions that were committed last, of adapters by their names, of the weights by an empty one.
        self.pushed: dict[str, str] = {}

    def connect(self, deadline: Deadline) -> None:
        """Do what the first push then need not: ask engines what they expect, have them make standbys, make the arenas,
        and set up process groups and connections."""
        self.engines.expected(deadline)
        if self._options.staging != "none":
            self._make_arenas(deadline)
            until = Deadline(deadline.left() / 2)  # a rank that does not answer leaves time to find that out
            lent = {url: self._lent(url, engine.transport) for url, engine in self.engines.by_url.items()}
            # What an engine could not make, the first push makes.
            futures.wait(self.engines.asked(lambda client: client.expected(until, standby=True, lent=lent[client.url])))
        if not self.engines.local:
            connect(self._open_transfer(None), self.engines, deadline)

    def _make_arenas(self, deadline: Deadline) -> None:
        """Make the arenas for all that the engines expect, if it is sure where they will be, and memory is ample."""
        if self._ranks is None and cuda_ipc.gpu_here() is None:
            transfer = self._open_transfer(None)
            nbytes, count = self._planner.arenas(transfer, deadline)
            if 0 < _AMPLE * count * nbytes < transfer.free_bytes():
                transfer.provide(nbytes, count)

    def _lent(self, url: str, transport: str) -> Lent | None:
        return None if self._transfer is None else self._transfer.lent(url, transport)

    def current_weights(self, deadline: Deadline) -> dict[str, Weights]:
        """What each engine serves now, by URL."""
        return self.engines.current_weights(deadline)

    def push(self, source: Source, asked: Asked, deadline: Deadline, start: float, reading: Reading) -> PushResult:
        """See `sender.Sender.push`; ``start`` is the time of that call, by `time.perf_counter`."""
        payload, restarted = self._planned(source, asked, deadline, reading), False
        while True:
            try:
                return self._push(payload, asked, deadline, start, reading)
            except (BaseUnknown, DigestMismatch) as error:
                if payload.changes is None:
                    raise
                logger.info("what has changed cannot be used, so everything is sent: %s", error)
                payload = self._repeated(error, payload, source, asked, deadline, reading)
            except EngineRestarted as error:
                if restarted:
                    error.args = (
                        f"{error.message} (twice within one push: if it was not, is the URL that of a router in front "
                        "of several engines? give the sender the URLs of the engines)",
                    )
                    raise
                if error.weights == "unknown":
                    raise
                restarted = True
                self.engines.reopen(deadline)
                payload = self._repeated(error, payload, source, asked, deadline, reading)

    def _repeated(
        self,
        error: WeightSyncError,
        payload: ModelPush,
        source: Source,
        asked: Asked,
        deadline: Deadline,
        reading: Reading,
    ) -> ModelPush:
        """The same push once more, of everything. Raises ``error`` if the tensors are not there any more."""
        transfer = self._transfer
        repeated = None if transfer is None or transfer.closed else payload.again(transfer)
        if repeated is None and (reading.over or (isinstance(source, IteratorSource) and source.begun)):
            raise error
        return repeated or self._planned(source, asked, deadline, reading, again=True)

    def rehearse(self, source: Source, deadline: Deadline) -> dict[str, float]:
        """Push ``source`` up to the commit, which no engine makes; the seconds of each phase, as `push` counts them."""
        start = time.perf_counter()
        payload = self._planned(source, Asked(None, None, ()), deadline, Reading())
        push = self._new_push(self._open_transfer(source), deadline)
        push.seconds["plan"] = self._plan_s
        with self._shown("rehearsal", payload.nbytes):
            sent = push.rehearse(payload)
        return _seconds(push.seconds, sent, start)

    def _planned(
        self, source: Source, asked: Asked, deadline: Deadline, reading: Reading, again: bool = False
    ) -> ModelPush:
        transfer, start = self._open_transfer(source), time.perf_counter()
        planner, patterns = self._planner, asked.allow_missing
        if isinstance(source, LoraSource):
            plan = lora_plan.of(source, planner, transfer, deadline)
        elif isinstance(source, IteratorSource):
            plan = planner.of_iterator(source, transfer, deadline, patterns)
        else:
            plan = reading.run(lambda: planner.of(source, transfer, deadline, patterns, again, reading.early))
        self._plan_s = time.perf_counter() - start
        placed = functools.partial(planner.placed, deadline=deadline, allow_missing=patterns)
        return ModelPush(plan, reading, self._ranks, deadline, placed, planner.deltas)

    def _push(self, payload: ModelPush, asked: Asked, deadline: Deadline, start: float, reading: Reading) -> PushResult:
        lora = UNSET if asked.lora is None else asked.lora
        label = self._next_version(lora) if asked.version is None else asked.version
        push = self._new_push(self._open_transfer(payload.plan.source), deadline, asked.expected)
        push.seconds["plan"] = self._plan_s
        with self._shown(f"push {label}", payload.nbytes):
            sent, commits = push.run(payload, label)
        plan = payload.plan
        try:
            payload.check_unchanged(f"the engines serve what they read as version {label!r}")
        except SourceError as error:
            error.settle(dict.fromkeys(commits, "unknown"))
            raise
        self.pushed[asked.lora or ""] = label
        choice = plan.choice
        return PushResult(
            label,
            plan.layout.payload_bytes,
            _seconds(push.seconds, sent, start),
            self._noted(self._results(commits)),
            plan.request.verify,
            choice.staging,
            choice.reason,
            sum(each.format is None for each in plan.conversions.values()),
            sum(each.format is not None for each in plan.conversions.values()),
            sent.not_finite,
            (*plan.request.kept, *(self._drafts_left(plan) if asked.lora is None else ())),
            push.unverified,
            reading.how,
            asked.lora or "",
            *payload.sent_elsewhere(),
        )

    def _drafts_left(self, plan: PushPlan) -> tuple[str, ...]:
        """Names of tensors of the engines' draft models, which a push of weights alone leaves as they are."""
        if any(of_draft(spec.name) for spec in plan.layout.specs[-1:]):  # a draft's tensors are the last ones
            return ()
        drafts = (engine.expected.draft for engine in self.engines.by_url.values() if engine.expected is not None)
        return tuple(sorted({name for draft in drafts if draft is not UNSET for name in draft.names()}))

    def _new_push(self, transfer: Transfer, deadline: Deadline, expected: str | None = None) -> Push:
        return Push(self.engines, transfer, self._machine, deadline, self._options.pause, expected=expected)

    @contextmanager
    def _shown(self, what: str, nbytes: int) -> Iterator[None]:
        """Inside the context, progress is shown if the sender's user wants that."""
        with shown(what, nbytes, self._options.progress) as bar:
            self.engines.shown = bar
            try:
                yield
            finally:
                self.engines.shown = Shown()

    def _results(self, commits: Commits) -> dict[str, EngineResult]:
        results = {}
        for url, reply in commits.items():
            engine = self.engines.by_url[url]
            noticed, engine.noticed = tuple(engine.noticed), []
            reason = "; ".join(filter(None, (engine.reason, engine.interfaces and f"over {engine.interfaces}")))
            loading = reply.loading or ()
            results[url] = EngineResult(reply.pause_s, reply.seconds, engine.transport, reason, noticed, loading)
        return results

    def _noted(self, results: dict[str, EngineResult]) -> dict[str, EngineResult]:
        """The results, with the adapters that an engine lacks."""
        for url, result in results.items():
            missing = self.engines.by_url[url].missing(self.pushed)
            lacking = [f"{name!r} version {self.pushed[name]!r}" for name in missing if name]
            if lacking:
                note = f"lacks what this sender pushed as adapter {', '.join(lacking)}: catch_up(), or push it again"
                results[url] = replace(result, noticed=(*result.noticed, note))
        return results

    def is_caught_up(self, url: str) -> bool:
        """Whether an engine serves all that this sender pushed last, by its last reply."""
        return bool(self.pushed) and not self.engines.by_url[url].missing(self.pushed)

    def add_engine(self, target: Target, deadline: Deadline) -> EngineResult | None:
        """See `sender.Sender.add_engine`."""
        added = self.engines.add(target, deadline)
        self._planner.choose_again()  # the ranks of this engine may have less memory
        try:
            return self._catch_up(added, self.pushed, deadline).get(added)
        except BaseException:
            self._release([added], deadline)
            self.engines.remove(added)
            raise

    def remove_engine(self, target: Target, deadline: Deadline) -> None:
        """See `sender.Sender.remove_engine`."""
        known = self.engines.removable(target)
        self._release([known], deadline)
        self.engines.remove(known)

    def catch_up(self, deadline: Deadline, only: str = "") -> dict[str, EngineResult]:
        """See `sender.Sender.catch_up`; ``only``: the URL of the one engine to catch up, empty for all."""
        results: dict[str, EngineResult] = {}
        outdated, failed = self.engines.find_outdated(self.pushed, deadline)
        for url, lacking in outdated.items():
            together = in_lockstep(url, self.engines.by_url)
            if absent := sorted(together.keys() & failed.keys()):
                failed[url] = failed[absent[0]]
            elif only in ("", url) and url not in results:
                try:
                    results |= self._catch_up(url, lacking, deadline)
                except WeightSyncError as error:
                    failed |= dict.fromkeys(together, error)
        if raised := {url: error for url, error in failed.items() if only in ("", url)}:
            raise joined(raised, {**self.engines.last_known(), **dict.fromkeys(results, "committed")})
        return results

    def _catch_up(self, url: str, lacking: Iterable[str], deadline: Deadline) -> dict[str, EngineResult]:
        """Catch up an engine, and those in lockstep with it; no results if no arena holds what is ``lacking``.

        The weights come first, and adapters to none that lacks them, or does not generate.
        """
        results: dict[str, EngineResult] = {}
        for name in sorted(lacking):
            if name and any(engine.stopped for engine in in_lockstep(url, self.engines.by_url).values()):
                break
            sent = self._sent_again(url, name, deadline)
            if not (name or sent):
                return {}
            for one, result in sent.items():
                first = results.setdefault(one, result)
                if first is not result:
                    results[one] = replace(first, noticed=(*first.noticed, *result.noticed))
        return self._noted(results)

    def _sent_again(self, url: str, name: str, deadline: Deadline) -> dict[str, EngineResult]:
        """Send what an arena holds of the weights, or of an adapter; no results if it does not."""
        outgoing = self._transfer.again(name or UNSET) if self._transfer is not None else None
        if self._transfer is None or outgoing is None:
            return {}
        start, label = time.perf_counter(), self.pushed[name]
        with self.engines.only(url), metrics.counted("catch_up") as done:
            push = self._new_push(self._transfer, deadline)
            with self._shown(f"catch_up {url} {label}", outgoing.layout.nbytes):
                _, commits = push.run(Repeated(outgoing), label)
            results = self._results(commits)
            done(
                {**push.seconds, "total": time.perf_counter() - start}, results.values(), outgoing.layout.payload_bytes
            )
            return results

    def rollback(self, deadline: Deadline, lora: str | None) -> PushResult:
        """See `sender.Sender.rollback`."""
        start = time.perf_counter()
        settle(self.engines, deadline)
        ranks = [rank for status in self.status(deadline).values() for rank in status.ranks]
        kept = {rank.previous if lora is None else (rank.adapters or {}).get(lora, "") for rank in ranks}
        if len(kept) != 1 or "" in kept:
            how = "pass keep_previous=True and push twice" if lora is None else f"push {lora!r} twice"
            error = TransferFailed(
                f"there is no version to go back to that every engine keeps; {how}",
                engines=self.engines.last_known(),
            )
            error.mend = ""
            raise error
        (label,) = kept
        rollback = Rollback(self.engines, self._transfer, self._machine, deadline, self._options.pause)
        with self._shown(f"rollback {label}", 0):
            commits = rollback.run(label, UNSET if lora is None else lora)
        self.pushed[lora or ""] = label
        seconds = {**rollback.seconds, "total": time.perf_counter() - start}
        results = self._results(commits)
        return PushResult(label, 0, seconds, results, "off", "full", "the engines kept it", lora=lora or "")

    def status(self, deadline: Deadline, *, digest: bool = False) -> dict[str, http.StatusReply]:
        """See `sender.Sender.status`."""
        found = self.engines.status(deadline, digest=digest)
        replies = {url: reply for url, reply in found.items() if not isinstance(reply, WeightSyncError)}
        if failed := {url: reply for url, reply in found.items() if isinstance(reply, WeightSyncError)}:
            raise joined(failed, self.engines.last_known())
        return replies

    def drop_transfer(self) -> None:
        """Close the transfer; the next push makes a new one."""
        self._planner.forget()
        if self._transfer is not None:
            self._transfer.close()

    def close(self, deadline: Deadline) -> None:
        """Give the lease back; release memory, sockets and connections."""
        self._release(self.engines.by_url, deadline)
        self.drop_transfer()
        self.engines.close()

    def _release(self, urls: Iterable[str], deadline: Deadline) -> None:
        release(self._transfer, self.engines, urls, deadline)

    def _open_transfer(self, source: Source | None) -> Transfer:
        """The transfer, which is kept until the sender closes or a push fails."""
        if self._transfer is None or self._transfer.closed:
            device = None if source is None else source.device
            ranks, others = self._ranks, self._ranks.gpus if self._ranks is not None else ()
            where = buckets.arena_device(self.engines.ranks, device, remote=not self.engines.local, others=others)
            if ranks is not None:
                apart = not arenas.is_shared(where)
                if apart and (self._options.staging == "none" or not self._planner.knows_domains):
                    where, apart = torch.device("cpu"), False
                ranks.separate(apart)
            self._transfer = Transfer(where, self._ranks, self._options.address)
            self._planner.choose_again()
        return self._transfer

    def _next_version(self, lora: str | UnsetType) -> str:
        versions = [engine.serves(lora) for engine in self.engines.by_url.values()]
        return str(max((int(v) for v in versions if v.isdecimal()), default=0) + 1)


def _seconds(phases: Mapping[str, float], sent: Sent, start: float) -> dict[str, float]:
    """See `PushResult.seconds`, of a push that began at ``start``."""
    parts = {"gather": sent.gather_s, "digest": sent.digest_s, "verify": sent.verify_s}
    return {**phases, **parts, "total": time.perf_counter() - start}
