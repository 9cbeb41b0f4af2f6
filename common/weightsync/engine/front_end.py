"""Engine-side driver of a whole engine, in the process that serves HTTP: lease, order, deadlines, state.

Each engine package provides an `engine_front_end.EngineFrontEnd`. `states.ENGINE` says what is legal when. Every call
to the ranks has a deadline (`rank_calls.Calls`); a commit that has begun runs to its end, whoever still waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
import time
from collections import deque
from typing import Final

import msgspec

from weightsync.deadline import Deadline
from weightsync.engine import diagnosis, first_push, refusals
from weightsync.engine.coverage import check_read
from weightsync.engine.engine_front_end import EngineFrontEnd, addressed, lora_versions
from weightsync.engine.lease import Lease
from weightsync.engine.metrics import Metrics, Report
from weightsync.engine.rank_calls import Calls, Turn, collect, exclusive
from weightsync.errors import (
    EngineRestarted,
    LeaseHeld,
    PushTimeout,
    TransferFailed,
    UnsupportedOption,
    WeightSyncError,
    changed_nothing,
)
from weightsync.memory import arenas
from weightsync.protocol import addresses, directories, http, states
from weightsync.protocol.diagnosis import DiagnoseReply, DiagnoseRequest
from weightsync.protocol.expected import ExpectedReply, ExpectedRequest
from weightsync.protocol.rank_replies import Accepted, Ready
from weightsync.transports import registry

logger = logging.getLogger(__name__)

#: Seconds that ranks get to hash their weights. Packed layers are read through the engine's kernels.
_DIGEST_S: Final = 300.0
#: Seconds between two checks that the trainer of a push is alive.
_WATCH_S: Final = 0.5
#: Least timeout, in seconds, of a commit whose turn comes late: a message cannot ask for less.
_LEAST_S: Final = 0.01
#: How many aborts are remembered, so that a rollback that arrives after its abort is refused.
_ABORTED: Final = 64
#: Seconds beyond a commit's timeout before the engine answers without it; the trainer waits longer than that.
_ANSWER_S: Final = 0.25


class FrontEnd:
    """One engine, as its routes use it. A server passes the ``metrics`` that it serves."""

    def __init__(self, front: EngineFrontEnd, metrics: Metrics | None = None):
        self.front = front
        self.instance = secrets.token_hex(8)
        self._report = Report(metrics)
        state: http.State = "unsynced" if front.waits else "serving"
        self._machine = states.Machine(states.ENGINE, state, f"this {front.engine}", self._report.moved)
        self._report.moved(state, state)
        self._call = Calls(front.call, lambda: front.busy)
        self._lease = Lease(taken=self._report.lease_taken)
        self._turn = Turn()
        self._exclusive = functools.partial(exclusive, self._turn, self._call)
        self._push = self._committed = ""
        #: The adapter that the current push brings, if it is one.
        self._lora: str | msgspec.UnsetType = msgspec.UNSET
        self._aborted: deque[str] = deque(maxlen=_ABORTED)
        #: The task that tells the ranks of the last push that failed.
        self._telling: asyncio.Future[None] | None = None
        self._detail = "it waits for its first push" if front.waits else ""
        self._watch: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> str:
        """Why the engine must not generate; empty if it may."""
        return (self._detail or self._machine.state) if states.is_stopped(self._machine.state) else ""

    async def open(self, asked: http.OpenRequest) -> http.OpenReply:
        """Describe the engine and its ranks. Raises `ProtocolMismatch` if the sender's major version differs."""
        refusals.check_protocol(asked.protocol)
        await self._introduce_ranks(asked.timeout_s)
        return http.OpenReply(
            protocol=http.PROTOCOL,
            engine=self.front.engine,
            engine_version=self.front.engine_version,
            package_version=http.package_version(),
            host=arenas.host_id(),
            model=self.front.model,
            version=await self.front.version(),
            ranks=self._call.ranks,
            pause_refused=self.front.pause_refused,
            instance=self.instance,
            user=directories.meeting(),
            network=arenas.network_id(),
            stopped=bool(self.stopped),
            lockstep=self.front.lockstep,
            adapters=lora_versions(self.front) or msgspec.UNSET,
        )

    async def expected(self, asked: ExpectedRequest) -> ExpectedReply:
        """The tensors of a complete push, in the dtypes in which the ranks hold them."""
        return await first_push.expected(asked, self._call, self._lease)

    async def _introduce_ranks(self, timeout_s: float) -> None:
        self._call.ranks = tuple(collect(await self._call("weightsync_open", b"{}", timeout_s), http.RankInfo))

    async def status(self, asked: http.StatusRequest) -> http.StatusReply:
        """Tell what the engine serves, even while its ranks do not answer."""
        detail = "" if asked.digest else self.front.busy
        ranks: list[http.RankStatus] = []
        timeout_s = asked.timeout_s or (_DIGEST_S if asked.digest else http.LOOK_S)
        try:
            # Ranks that load, or whose engine is busy, cannot answer.
            if asked.digest or not (detail or self._machine.state.endswith("applying")):
                ranks = collect(await self._call("weightsync_status", http.to_json(asked), timeout_s), http.RankStatus)
        except PushTimeout as error:
            if asked.digest:
                raise
            detail = str(error)
        version = await self.front.version()
        lapsed = await self._lease.lapsed()
        # Read after the last await, so that the reply describes one moment.
        state = self._machine.state
        return http.StatusReply(
            engine=self.front.engine,
            version=version,
            state=max((state, *(rank.state for rank in ranks)), key=states.WORST_LAST.index),
            ranks=tuple(ranks),
            instance=self.instance,
            committed=self._committed,
            holder="" if lapsed else self._lease.holder,
            detail="; ".join(filter(None, (self._detail, detail))),
            off=self.front.off,
            adapters=lora_versions(self.front) or msgspec.UNSET,
        )

    async def diagnose(self, asked: DiagnoseRequest) -> DiagnoseReply:
        """What hinders pushes, also while the ranks do not answer."""
        parts = self.instance, self.front, self._call, self._machine, self._detail, self._lease
        return await diagnosis.diagnosed(asked, *parts)

    async def join(self, asked: http.Handshake, method: str) -> http.JoinReply:
        """Take the lease, then have every rank set up a transport through its set-up ``method``.

        Raises `UnsupportedOption`, `TransferFailed`.
        """
        if asked.instance not in ("", self.instance):
            raise EngineRestarted("the engine was restarted since it was opened")
        addresses.check_host_address(asked.address)
        deadline = Deadline(asked.timeout_s)
        async with self._exclusive("joining", deadline):
            if not self._call.ranks:
                await self._introduce_ranks(deadline.left())
            registry.spec(registry.setup_methods()[method]).check_handshake(asked, len(self._call.ranks))
            await self._lease.take(asked.owner, asked.holder, asked.address)
            try:
                if self._machine.allows("abort"):
                    await self._forget("aborted", "a trainer sets up its transport", deadline)
                else:
                    # All ranks have to join together, so what still runs on one of them must end first.
                    collect(await self._call("weightsync_abort", b"{}", deadline.left()), http.Done)
                replies = await self._call(method, http.to_json(asked), deadline.left())
                return http.JoinReply(tuple(collect(replies, http.RankJoined)), self.instance)
            finally:
                self._lease.idle()

    async def prepare(self, asked: http.UpdateRequest, method: str) -> http.UpdateReply:
        """Take the lease, then have every rank check the manifest and connect to the sender."""
        if asked.instance not in ("", self.instance):
            raise EngineRestarted("the engine was restarted since it was opened")
        # Checked before the lease is taken: later the engine dials this address to see whether the sender lives.
        local = registry.spec(registry.update_methods()[method]).local
        addresses.check_address(asked.address, asked.server_key, remote=not local)
        deadline = Deadline(asked.timeout_s)
        with self._report.prepare(asked):
            asked = addressed(asked, self.front, self.stopped)
            accepted = await self._prepare(asked, method, deadline)
        record_s, kept = max(rank.record_s for rank in accepted), tuple(rank.kept for rank in accepted)
        version = await self.front.version()
        if asked.lora is not msgspec.UNSET:
            version = lora_versions(self.front).get(asked.lora, "")
        return http.UpdateReply(version, self.instance, bool(self.stopped), record_s, kept)

    async def _prepare(self, asked: http.UpdateRequest, method: str, deadline: Deadline) -> list[Accepted]:
        async with self._exclusive("prepare", deadline):
            try:
                await self._lease.take(asked.owner, asked.holder, asked.address)
            except LeaseHeld as error:
                self._as_dirty(error)
                raise
            try:
                if self._machine.allows("abort"):
                    await self._forget("aborted", f"push {asked.push} begins", deadline)
                self._machine.check("prepare")
                accepted = collect(await self._call(method, http.to_json(asked), deadline.left()), Accepted)
                check_read(accepted, asked.manifest)
                self._lease.renew(asked.owner)  # its trainer renews it from now on, and ranks may have taken long
            except BaseException as error:
                await self._forget_after_failure(asked.push, deadline)  # a rank may have begun to receive
                self._as_dirty(error)
                raise
            self._machine.move("prepare")
            self._push = asked.push
            self._lora = asked.lora
            if self._watch is None or self._watch.done():
                self._watch = asyncio.ensure_future(self._watch_trainer())
            return accepted

    async def lease(self, asked: http.LeaseRequest) -> http.Done:
        """Renew the lease: its owner is alive. Raises `LeaseHeld`, or `EngineUnreachable` if a rank has died."""
        self._lease.renew(asked.owner)
        self._call.check_alive()
        return http.Done()

    async def commit(self, asked: http.CommitRequest) -> http.CommitReply:
        """Serve a prepared push, or roll back to the kept version. Errors say what the engine serves afterwards."""
        if reason := self.front.pause_refused.get(asked.pause):
            raise UnsupportedOption(f"{self.front.engine} cannot pause with {asked.pause!r}: {reason}")
        # Once begun it runs to its end, even if the trainer disconnects or dies.
        run = asyncio.ensure_future(self._commit(asked))
        run.add_done_callback(lambda run: run.cancelled() or run.exception())  # nobody may be waiting for it any more
        await asyncio.wait({run}, timeout=asked.timeout_s + _ANSWER_S)
        if not run.done():
            raise PushTimeout(
                f"the commit is still under way after {asked.timeout_s:g} s{self._call.dead_ranks()}", weights="unknown"
            )
        return run.result()

    async def _commit(self, asked: http.CommitRequest) -> http.CommitReply:
        if asked.instance not in ("", self.instance):
            raise EngineRestarted("the engine was restarted since the push was prepared", weights="unknown")
        deadline = Deadline(asked.timeout_s)
        async with self._exclusive("commit", deadline):
            self._lease.check(asked.owner)
            try:
                return await self._commit_owned(asked, deadline)
            except BaseException:
                await self.front.withdraw(asked.push)
                raise

    async def _commit_owned(self, asked: http.CommitRequest, deadline: Deadline) -> http.CommitReply:
        if not asked.rollback and asked.push != self._push:
            raise TransferFailed(f"this {self.front.engine} has not prepared push {asked.push}")
        if not asked.rollback and asked.lora != self._lora:
            raise TransferFailed(f"push {asked.push} was prepared as another adapter, or as weights")
        with self._report.commit(asked) as committed:
            if asked.rollback:
                if asked.push in self._aborted:
                    raise TransferFailed(f"its sender aborted rollback {asked.push} before it arrived")
                self._machine.check("rollback")
            reply = await self._apply(asked, deadline)
            committed(reply)
        return reply

    async def _apply(self, asked: http.CommitRequest, deadline: Deadline) -> http.CommitReply:
        try:
            ready = await self._call("weightsync_ready", http.to_json(asked), deadline.left())
            ranks = collect(ready, Ready)
            deadline.check("the ranks to be ready")
            if not asked.rollback:
                self._machine.move("staged")
            stopped = bool(self.stopped)
            self._machine.move("rollback" if asked.rollback else "commit")
        except WeightSyncError as error:
            if isinstance(error, PushTimeout):
                error.weights = "unchanged"  # the ranks were not asked to load
            await self._forget_after_failure(asked.push, deadline)
            self._as_dirty(error)
            raise
        try:
            left = msgspec.structs.replace(asked, timeout_s=max(deadline.left(), _LEAST_S))
            reply = await self.front.commit(left, self._call, stopped)
        except BaseException as error:
            unchanged = changed_nothing(error)
            self._machine.move("untouched" if unchanged else "broken")
            if not unchanged:
                self._detail = f"a push failed half-way ({error}); it does not generate until a full push commits"
                await self.front.stay_stopped(refusals.half_way(error))
            await self._forget_after_failure(asked.push, deadline)
            self._as_dirty(error)
            raise
        self._machine.move("applied")
        self._committed, self._push, self._detail = asked.push, "", ""
        self._lease.idle()
        reply.seconds["record"] = max(rank.record_s for rank in ranks)
        reply.seconds["standby"] = max(rank.standby_s for rank in ranks)
        ways = tuple(dict.fromkeys(rank.loading for rank in ranks if rank.loading))
        return msgspec.structs.replace(reply, loading=ways or msgspec.UNSET)

    async def abort(self, asked: http.AbortRequest) -> http.AbortReply:
        """Forget a push; release what is held of a sender that closes. Raises `LeaseHeld` if it is another's push."""
        # A sender that fails or closes may not wait for the answer, so its timeout is only a minimum here.
        deadline = Deadline(max(asked.timeout_s, http.LOOK_S))
        async with self._exclusive("abort", deadline):
            reply = http.AbortReply(refused=bool(asked.push))
            if asked.push:  # maybe a rollback that has not arrived yet; a commit is refused without its prepared push
                self._aborted.append(asked.push)
            if asked.owner and asked.push and asked.push != self._push:
                return reply  # the push has ended, or never began
            if asked.owner and not asked.release:
                self._lease.check(asked.owner)
            # A sender that was refused the lease must not release what belongs to its holder.
            mine = not asked.owner or asked.owner == self._lease.owner or await self._lease.lapsed()
            if not asked.release and self._machine.allows("abort"):
                await self._forget(
                    "aborted", f"{(asked.owner and 'its trainer') or '`weightsync abort`'} asked", deadline
                )
            if asked.release and mine:
                collect(await self._call("weightsync_abort", http.to_json(asked), deadline.left()), http.Done)
            if not asked.owner or (asked.release and asked.owner == self._lease.owner):
                self._lease.drop()
            elif mine:
                self._lease.idle()
        return reply

    async def _forget(self, end: str, why: str, deadline: Deadline) -> None:
        """Have the ranks forget a push that was not applied. Raises `WeightSyncError` if they cannot be reached.

        ``end`` is one of `metrics.OUTCOMES`.
        """
        push = self._push
        payload = http.to_json(http.AbortRequest(push=push))
        collect(await self._call("weightsync_abort", payload, deadline.left()), http.Done)
        self._report.dropped(end, why)
        self._machine.move("abort")
        self._push = ""

    def _as_dirty(self, error: BaseException) -> None:
        """Report "dirty", not "unchanged", for an engine that did not generate before the push either."""
        if self.stopped and isinstance(error, WeightSyncError) and changed_nothing(error):
            error.weights = "dirty"

    async def _forget_after_failure(self, push: str, deadline: Deadline) -> None:
        """As `_forget`, but never raises: the error that the push failed with is the one to report."""
        self._push = ""
        self._report.dropped("aborted", f"push {push} failed while its place was taken")
        if self._machine.allows("abort"):
            self._machine.move("abort")
        self._lease.idle()
        self._telling = asyncio.ensure_future(self._notify_abort(push))  # kept: the event loop does not
        await asyncio.wait({self._telling}, timeout=deadline.left())  # the next call to the ranks waits for it anyway

    async def _notify_abort(self, push: str) -> None:
        """Tell the ranks, again and again until they come or have another push.

        A rank that was asked to be ready waits ten minutes for its commit.
        """
        while not self._push:
            try:
                await self._call("weightsync_abort", http.to_json(http.AbortRequest(push=push)), http.LOOK_S)
                return
            except Exception as error:
                logger.warning("the ranks could not be told that push %s was aborted: %s", push, error)
                if not isinstance(error, PushTimeout):
                    return  # they drop it by their own deadline

    async def _watch_trainer(self) -> None:
        """Forget the current push if its trainer is gone."""
        while self._push:
            began = time.monotonic()
            await asyncio.sleep(_WATCH_S)
            self._lease.excuse(time.monotonic() - began - _WATCH_S)
            if not await self._lease.lapsed() or not self._machine.allows("abort"):
                continue
            try:
                deadline = Deadline(http.LOOK_S)
                async with self._exclusive("abort", deadline):
                    if await self._lease.lapsed() and self._machine.allows("abort"):
                        holder = self._lease.holder or "its trainer"
                        await self._forget("abandoned", f"{holder} is gone", deadline)
            except Exception as error:
                logger.warning("push %s could not be forgotten yet: %s", self._push, error)
