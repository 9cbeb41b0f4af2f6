"""Engine-side driver of one rank: check, receive, verify, apply.

`prepare` returns at once; a thread that never touches the model receives the bytes. The engine calls `apply` from its
own loop while generation is stopped. `states.ENGINE` defines what is legal in which state.
"""

from __future__ import annotations

import logging
import threading
import time

from msgspec import UNSET

from weightsync.daemon_thread import DaemonThread
from weightsync.deadline import Deadline
from weightsync.engine.adapter import Adapter
from weightsync.engine.borrowing import Borrowing
from weightsync.engine.diagnosis import RankDiagnosis
from weightsync.engine.job import Job
from weightsync.engine.kept import Kept
from weightsync.engine.loading.loader import Loading
from weightsync.engine.loading.loadings import Loadings
from weightsync.engine.lora import LoraLoading
from weightsync.engine.rank_calls import COMMIT_CALL_S
from weightsync.engine.rank_info import rank_info
from weightsync.engine.stage import Staged, Stages, check_several_hosts
from weightsync.errors import ApplyFailed, DigestMismatch, TransferFailed, WrongState
from weightsync.memory import arenas
from weightsync.protocol import http
from weightsync.protocol.expected import ExpectedReply, StandbyRequest
from weightsync.protocol.rank_replies import Accepted, Ready
from weightsync.protocol.states import ENGINE, Machine
from weightsync.tensors.layout import listed
from weightsync.tensors.subset import Subset
from weightsync.transports import registry
from weightsync.transports.base import EngineEnd

logger = logging.getLogger(__name__)

#: Seconds that the engine waits, at most, for the thread of a cancelled push, which looks up ten times a second.
_ABORT_WAIT_S = 0.2


class Busy(WrongState):
    """The thread of a cancelled push is still running: nothing was done, ask again after an engine step."""


class Receiver:
    """One rank's side of every push. Methods are called from the engine's loop, one at a time."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._loadings = Loadings(adapter)
        self._lora = LoraLoading(adapter)
        #: By transport, each made on first use.
        self._ends: dict[str, EngineEnd] = {}
        self._stages = Stages(adapter.rank, adapter.device)
        self.diagnosis = RankDiagnosis(adapter)
        self._machine: Machine[http.State] = Machine(ENGINE, "serving", f"rank {adapter.rank}")
        self._job: Job | None = None
        #: The job whose thread used the transport last. Two threads must never use it at once.
        self._last: Job | None = None
        self._detail = self._failed = ""
        self._kept = Kept()
        #: Receives one push after the other.
        self._thread = DaemonThread("weightsync-receive")
        self._borrowing = Borrowing(self._thread, self._end)
        #: Ends that thread after what it is doing, once there will be no push any more.
        self.close = self._thread.close
        #: Guards the machine and the job against the receiving thread.
        self._lock = threading.Lock()

    @property
    def _loading(self) -> Loading:
        return self._loadings.current

    def info(self) -> http.RankInfo:
        """Describe this rank: process, device, free memory, transports."""
        return rank_info(self._adapter.rank, self._adapter.device)

    def expected(self) -> ExpectedReply:
        """This rank's part of the list of a complete push."""
        return self._loadings.expected()

    def make_standby(self, asked: StandbyRequest) -> None:
        """See `Ahead.make`; a push makes its own. Raises `Unfinished`, or `Busy`."""
        if self._job is None:
            self._borrowing.begin(asked)
            self._loading.ahead.make(asked)
            if not self._borrowing.wait(0):
                raise Busy(f"rank {self._adapter.rank} still maps the arenas of a sender")

    def status(self, digest: bool = False) -> http.RankStatus:
        """Tell what this rank does; with ``digest`` also a hash of its weights, which reads all of them."""
        return http.RankStatus(
            rank=self._adapter.rank,
            state=self._machine.state,
            push=self._job.request.push if self._job is not None else "",
            detail=self._detail,
            digest=self._loadings.digest() if digest else "",
            previous=self._kept.label or self._in_standby(),
            standby=self._in_standby() or UNSET,
            adapters=self._lora.kept() or UNSET,
            failed=self._failed,
            loading=self._loading.path,
            model=self._loading.status() or UNSET,
            stage_bytes=self._stages.nbytes or UNSET,
            longest_call=self._loading.standby.longest_call or self._loading.ahead.longest_call or UNSET,
        )

    def _end(self, transport: str) -> EngineEnd:
        if transport not in self._ends:
            self._ends[transport] = registry.spec(transport).engine_end(self._adapter.device)
        return self._ends[transport]

    def join(self, asked: http.Handshake, transport: str) -> http.RankJoined:
        """Set up a transport for a sender. Raises `UnsupportedOption`, `TransferFailed` or `Busy`."""
        self._supersede(asked.address)
        self._disown(asked.owner)
        return self._end(transport).join(asked, self._adapter.rank)

    def _disown(self, owner: str) -> None:
        if self._kept.disown(owner):
            self._loadings.keep(())

    def _supersede(self, what: str) -> None:
        """Cancel the current push: the front end has given the lease to another sender, or begun another push."""
        self._loading.standby.stop()
        self._loading.ahead.stop()
        if self._job is not None:
            logger.warning("push %s is superseded by %s", self._job.request.push, what)
            self.abort()
        self._settled()

    def prepare(self, request: http.UpdateRequest, transport: str) -> Accepted:
        """Check the manifest, then fetch the bytes in a thread. Raises `ManifestMismatch`, `TransferFailed`, `Busy`."""
        end, adapts = self._end(transport), request.lora is not UNSET
        end.check(request)
        if self._job is not None and self._job.request == request:
            # Asked again, because another rank was not ready.
            return self._lora.accepted() if adapts else self._loading.accepted()
        self._supersede(request.push)
        self._borrowing.give_back(but=request.address)
        self._disown(request.owner)
        self._machine.check("prepare")
        job = self._lora.job(request, end) if adapts else self._job_of_weights(request, end, transport)
        with self._lock:
            self._machine.move("prepare")
            self._job, self._last, self._detail = job, job, ""
        self._thread.submit(lambda: self._receive(job))
        return self._lora.accepted() if adapts else self._loading.accepted()

    def _job_of_weights(self, request: http.UpdateRequest, end: EngineEnd, transport: str) -> Job:
        layout = self._loadings.accept(request, dirty=self._machine.state.startswith("dirty"))
        check_several_hosts(layout, request, transport)
        # A kept version has to be complete: it may be loaded again without a load plan.
        some = request.parts and not request.keep and not request.any_order
        needed = self._loading.subset(layout, end.bytes_per_s) if some else Subset(layout, {})
        job = Job(request, end, self._stages.subset(request, needed), None)
        self._kept.prepare(layout if request.keep else None)
        staged = not request.stream and (request.any_order or not registry.spec(transport).local)
        if staged and not self._stages.have_room(layout.nbytes, self._kept.current):
            self._loading.standby.release()
        if not (request.stream or request.any_order):
            job.arriving = self._loading.arriving(layout, request.push, request.bucket_bytes)
        return job

    def _receive(self, job: Job) -> None:
        try:
            try:
                incoming = job.open(self._adapter.rank)
            except BaseException:
                if not job.adapts:
                    self._kept.forget(None)  # the sender may already write
                raise
            staged, verify_s = None, 0.0
            if job.adapts:
                verify_s = self._lora.receive(incoming, job)
            else:
                self._kept.forget(incoming.arena)
                if not job.request.stream:
                    how = job.request, job.subset, self._kept.current, job.arriving
                    staged, verify_s = self._stages.fill(incoming, *how)
                # Load plans bound to arenas that are no longer used are dropped, and with them the memory.
                self._loadings.keep(one.data for one in (staged, *self._kept) if one is not None)
            with self._lock:
                if job.cancelled.is_set():
                    raise TransferFailed("the push was aborted")
                job.incoming, job.staged = incoming, staged
                self._machine.move("staged")
            logger.debug("push %s: rank %d has received it", job.request.push, self._adapter.rank)
            del incoming, staged
            # Confirmed only now that the stage is in place: the commit may follow at once.
            job.transport.confirm(job.request.push, verify_s)
            while not job.cancelled.wait(job.deadline.left()):
                if job.deadline.left() == 0.0:
                    within = f"nobody committed it within {job.deadline.seconds:g} s"
                    self._cancel(job, f"push {job.request.push} expired: {within}")
        except Exception as error:
            # A thread has no caller to raise to: `ready` tells the engine, the transport tells the sender.
            logger.warning("push %s was not received: %s", job.request.push, error)
            # Load plans must not keep the memory of the failed push alive.
            self._loadings.keep(one.data for one in self._kept)
            job.transport.fail(job.request.push, error)
            self._cancel(job, _text(error))
        finally:
            job.ended.set()

    def _cancel(self, job: Job, detail: str) -> None:
        """Cancel a push that was not applied; one that is being applied runs to its end."""
        with self._lock:
            if self._job is job and self._machine.allows("abort"):
                self._machine.move("abort")
                self._job, self._detail, self._failed = None, detail, job.request.push
                job.end()

    def ready(self, request: http.CommitRequest) -> Ready:
        """Check that ``request`` can be applied. Raises `TransferFailed` without its push, `WrongState` out of turn."""
        wanted = self._wanted(request)
        if wanted is None and (request.rollback or request.lora is not UNSET):
            return Ready()
        self._loadings.take(wanted).prepare_load(wanted, request.push, request.timeout_s)
        return self._loading.ready()

    def _in_standby(self) -> str:
        """The version before the one that is served, if the standby holds it."""
        return self._kept.labels.before if self._loading.standby.holds_before() else ""

    def _wanted(self, request: http.CommitRequest) -> Staged | None:
        """The version to load, or None if it is streamed, in the standby, or of an adapter. Raises as `ready`."""
        if request.rollback:
            self._machine.check("rollback")
            if request.lora is not UNSET:
                self._lora.check_kept(request.lora, request.version)
                return None
            if request.version == self._in_standby() and request.version and self._loading.standby.is_current():
                return None
            if (previous := self._kept.previous) is None or previous.version != request.version:
                raise TransferFailed(f"rank {self._adapter.rank} keeps no version {request.version!r} to go back to")
            return previous
        job = self._job
        if job is None or job.request.push != request.push or not self._machine.allows("commit"):
            raise TransferFailed(
                f"rank {self._adapter.rank} has not prepared push {request.push}"
                + (f" ({self._detail})" if self._detail else "")
            )
        if job.staged is not None:
            job.staged.check()
        # Extended, so that it does not expire on this rank while another already loads it.
        job.deadline = Deadline(request.timeout_s + COMMIT_CALL_S)
        return job.staged

    def apply(self, request: http.CommitRequest) -> float:
        """Load the staged push, or roll back; returns the seconds it took.

        Raises `ApplyFailed`, with ``weights`` unchanged if nothing was written, else dirty.
        """
        start = time.perf_counter()
        with self._lock:
            wanted = self._wanted(request)
            self._machine.move("rollback" if request.rollback else "commit")
            job, adapts = None if request.rollback else self._job, request.lora is not UNSET
            if not adapts:
                self._kept.begin(request.push)
        try:
            if adapts:
                self._lora.apply(job, request, self._machine)
            elif job is None:
                self._load(wanted, request.push)
                self._kept.loaded(self._kept.previous if wanted is None else wanted)
            else:
                self._apply_job(job)
                if job.staged is not None:
                    job.staged.version = request.version
                self._kept.loaded(job.staged if job.request.keep else None)
        finally:
            if job is not None:
                self._job = None
                job.end()
        self._detail = ""
        if not adapts:
            self._kept.labels.applied(request.version)
        self._machine.move("applied")
        took_s, rank = time.perf_counter() - start, self._adapter.rank
        logger.info("push %s: rank %d has loaded version %r in %.3f s", request.push, rank, request.version, took_s)
        return took_s

    def _apply_job(self, job: Job) -> None:
        if job.staged is not None:
            self._load(job.staged, job.request.push, deep=job.request.verify == "deep")
            return
        try:
            self._load(job)
        except ApplyFailed as error:
            job.transport.fail(job.request.push, error)
            raise

    def _load(self, what: Staged | Job | None, push: str = "", *, deep: bool = False) -> None:
        """Load a staged version, or one that is streamed while it is loaded, or go back to that of the standby."""
        rank = self._adapter.rank
        try:
            self._quiesce()
        except Exception as error:
            self._machine.move("untouched")
            raise ApplyFailed(f"rank {rank} failed before anything was loaded: {_text(error)}") from error
        try:
            if isinstance(what, Staged):
                self._loadings.take(what).load(what, push)
            elif what is None:
                self._loading.go_back(push)
            else:
                assert what.incoming is not None
                self._loading.standby.pass_by(what.subset.layout)
                with self._loading.standby.together.loads(what.request.push):
                    self._loading.adapter.load(self._stages.stream(what.incoming, what.request, what.subset.layout))
                arenas.synchronize(self._adapter.device)
            if deep and isinstance(what, Staged) and (names := self._loading.adapter.differing(what.tensors())):
                raise DigestMismatch(
                    f"the engine does not hold what a fresh engine would load: it differs in {listed(names)}"
                )
            if self._machine.state == "dirty_applying":
                self._loading.standby.forget()  # what it holds now is no version
        except Exception as error:
            self._detail = _text(error)
            if self._loading.undo(push):
                self._machine.move("untouched")
                raise ApplyFailed(f"rank {rank} serves the version before again: {self._detail}") from error
            self._machine.move("broken")
            self._kept.labels.lost()
            raise ApplyFailed(
                f"rank {rank} failed while loading: {self._detail}; it does not generate until a full push commits",
                weights="dirty",
            ) from error

    def _quiesce(self) -> None:
        # An engine step launched before the pause may still be reading the weights.
        arenas.synchronize(self._adapter.device)

    def restore(self, request: http.CommitRequest) -> None:
        """Undo ``request``, which failed on another rank: load the version before. Raises `ApplyFailed` without it."""
        if request.lora is not UNSET:
            self._lora.restore(request.push, self._machine)
            return
        slots = self._kept.before(request.push)
        self._machine.check("rollback")
        # What a rank held that was dirty before is no version.
        undone = self._machine.state == "serving" and self._loading.undo(request.push)
        if not undone and slots[0] is None:
            raise ApplyFailed(f"rank {self._adapter.rank} keeps no version to go back to", weights="dirty")
        self._machine.move("rollback")
        if not undone:
            self._load(slots[0])
        self._machine.move("applied")
        self._kept.restored(slots)
        self._kept.labels.restored(request.push)
        self._detail = ""
        logger.info("push %s: rank %d has loaded the version before again", request.push, self._adapter.rank)

    def abort(self, push: str = "") -> None:
        """Forget a push that was not applied, whichever it is where ``push`` is empty. Raises `Busy`."""
        job = self._job
        if push in ("", self._loading.standby.push):
            self._loading.standby.stop()
        if job is not None and push in ("", job.request.push):
            self._cancel(job, f"push {job.request.push} was aborted")
        if self._last is not None and push in ("", self._last.request.push):
            self._settled()

    def _settled(self) -> None:
        if not self._borrowing.wait(_ABORT_WAIT_S):
            raise Busy(f"rank {self._adapter.rank} still maps the arenas of a sender; push again")
        if self._last is not None and not self._last.ended.wait(_ABORT_WAIT_S):
            raise Busy(
                f"rank {self._adapter.rank} is still busy with push {self._last.request.push}, which was called off; "
                "push again"
            )

    def sleep(self) -> None:
        """Give back the standby: the weights sleep next. A push that is not applied is aborted. Raises `Busy`."""
        self.abort()
        self._loading.ahead.stop()
        self._loading.standby.release()

    def release(self, address: str) -> None:
        """Give back what is held of a sender that has closed. Raises `Busy`."""
        if self._job is None:
            self._settled()
            self._loading.standby.release()
            released = [end.release(address) for end in self._ends.values()]
            if any(released):
                self._last = None
                self._kept.clear()
                self._loadings.keep(())
                self._stages.release()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
