"""What an engine answers to `weightsync doctor`: findings of its front end and of every rank."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Final, Protocol

from weightsync.daemon_thread import DaemonThread
from weightsync.engine.adapter import Adapter
from weightsync.engine.lease import Lease
from weightsync.engine.rank_calls import Calls, collect
from weightsync.errors import TransferFailed, UnsupportedOption, WeightSyncError
from weightsync.protocol import auth, http, states
from weightsync.protocol.diagnosis import DiagnoseReply, DiagnoseRequest, Finding, RankReport
from weightsync.protocol.states import Machine
from weightsync.transports import registry
from weightsync.transports.control.sockets import bracketed, interface_of, reach

#: The rank method.
METHOD: Final = "weightsync_diagnose"
#: Seconds without a renewal after which the trainer of a push counts as stuck: several renewals were due.
_SILENT_S: Final = 5.0
#: Seconds after which a commit counts as stuck: longer than loading takes.
_LOADING_S: Final = 120.0
#: Seconds for which a rank listens after it was asked to dial.
_LISTEN_S: Final = 10.0


class _Engine(Protocol):
    """As `engine_front_end.EngineFrontEnd`, which has more."""

    pause_refused: dict[str, str]
    off: dict[str, str]
    asleep: tuple[str, ...]


async def diagnosed(
    asked: DiagnoseRequest,
    instance: str,
    front: _Engine,
    call: Calls,
    machine: Machine[http.State],
    detail: str,
    lease: Lease,
) -> DiagnoseReply:
    """The reply of an engine, whose front end has these parts."""
    ranks: tuple[RankReport, ...] = ()
    hindrance: list[Finding] = []
    try:
        ranks = tuple(collect(await call(METHOD, http.to_json(asked), asked.timeout_s), RankReport))
    except UnsupportedOption as error:
        hindrance = [Finding("ranks", "wrong", f"pushes are refused: {error}", "docs/versions.md lists such settings")]
    except WeightSyncError as error:
        mend = "weightsync status URL; kill -CONT a stopped process, or restart the engine"
        hindrance = [Finding("ranks", "wrong", str(error), mend)]
    findings = (
        auth.check(),
        _of_state(machine, detail),
        await _of_lease(machine, lease),
        *_of_settings(front),
        *hindrance,
    )
    return DiagnoseReply(instance, findings, ranks)


def _of_state(machine: Machine[http.State], detail: str) -> Finding:
    state, since_s = machine.state, time.monotonic() - machine.since
    if state.endswith("applying") and since_s > _LOADING_S:
        text = f"a commit has been under way for {since_s:.0f} s"
        return Finding("state", "wrong", text, "weightsync status URL; restart the engine if it does not end")
    if state == "unsynced":
        text = "the engine waits for its first push, and /health is 503 until then"
        return Finding("state", "note", text, "sender.push(model)")
    if states.is_stopped(state):
        text = f"the engine is {state}, for {since_s:.0f} s: {detail}"
        return Finding("state", "wrong", text, "sender.push(model), with the whole model")
    return Finding("state", "ok", f"the engine is {state}")


async def _of_lease(machine: Machine[http.State], lease: Lease) -> Finding:
    if await lease.lapsed():
        return Finding("lease", "ok", "no trainer holds the lease")
    holder, silent_s, mend = lease.holder or "a trainer", lease.silent_s, "weightsync abort URL"
    if machine.allows("abort"):
        text = f"{holder} has been pushing for {time.monotonic() - machine.since:.0f} s"
        if silent_s > _SILENT_S:
            stuck = f"{text}, and nothing was heard of it for {silent_s:.0f} s: it is frozen, or cut off"
            return Finding("lease", "wrong", stuck, mend)
        return Finding("lease", "note", text, f"wait, or {mend}")
    text = f"{holder} holds the lease, last heard of {silent_s:.0f} s ago: other trainers are refused"
    return Finding("lease", "note", text, f"none is needed for that trainer; for another, close its Sender, or {mend}")


def _of_settings(front: _Engine) -> Iterator[Finding]:
    if reason := front.pause_refused.get("retract"):
        yield Finding("pause", "note", f'pause="retract", the default, is refused: {reason}', 'Sender(pause="wait")')
    for name, reason in front.off.items():
        yield Finding(name, "note", reason)
    if front.asleep:
        text = f"the memory of {', '.join(front.asleep)} sleeps, and nothing is generated"
        yield Finding("sleep", "note", text, "docs/operations.md#paused-and-sleeping-engines")


class RankDiagnosis:
    """One rank's answers. It dials in a thread, since the engine's loop must not wait for a network."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._asked: DiagnoseRequest | None = None
        self._found: Future[RankReport] | None = None
        self._listening: list[socket.socket] = []

    def answer(self, asked: DiagnoseRequest) -> RankReport | None:
        """The answer, or None if it is not there yet: ask again."""
        if self._found is not None and not self._found.done():
            return None
        if self._found is None or asked != self._asked:
            thread = DaemonThread("weightsync-diagnose")
            self._asked, self._found = asked, thread.submit(lambda: self._find(asked))
            thread.close()
            return None
        return self._found.result()

    def _find(self, asked: DiagnoseRequest) -> RankReport:
        rank, listens = self._adapter.rank, ""
        findings = list(registry.findings(self._adapter.device, rank))
        if asked.address:
            try:
                here = reach(rank, asked.address, asked.server_key)
                listens = self._listen(here) if here else ""
                way = f" from {interface_of(here)}" if here else ""
                findings.append(Finding("address", "ok", f"the trainer is reached at {asked.address}{way}"))
            except (OSError, TransferFailed) as error:
                mend = "let TCP from the engine's host to the trainer's pass, or Sender(..., address=\"its address\")"
                findings.append(Finding("address", "wrong", str(error), mend))
        return RankReport(rank, tuple(findings), listens)

    def _listen(self, here: str) -> str:
        """Listen at the address ``here`` of this host for a while; the kernel accepts connections."""
        self._hang_up()
        family = socket.AF_INET6 if ":" in here else socket.AF_INET
        self._listening.append(socket.create_server((here, 0), family=family))
        timer = threading.Timer(_LISTEN_S, self._hang_up)
        timer.daemon = True
        timer.start()
        return f"{bracketed(here)}:{self._listening[0].getsockname()[1]}"

    def _hang_up(self) -> None:
        with contextlib.suppress(IndexError):
            self._listening.pop().close()
