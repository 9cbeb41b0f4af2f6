"""Runs one fault after another and judges each outcome."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from tests.faults.harness import PUSH_S, Asker, Harness, Outcome
from tests.faults.plan import COMMITTED, DIRTY, UNCHANGED, Fault

#: Seconds to wait for a trainer, which may be dead or frozen: little more than its push may take.
OUTCOME_S = PUSH_S + 6.0


def suffer(harness: Harness, fault: Fault) -> Outcome:
    """Inject one fault, examine the engine, and repair it with a full push."""
    outcome = Outcome(harness.engine, fault)
    if fault.special == "fresh engine":
        harness.start_afresh()
    before = harness.serving
    wanted = "A" if before == "B" else "B"
    if fault.options.get("keep_previous") or harness.changes:
        # Only pushes of a sender with keep_previous are kept, so the version before must be such a push; and what has
        # changed is sent of a version that the same sender has pushed.
        harness.push_clean(before, fault.options)
    restarts = harness.restarts
    instance, bystander = harness.instance, harness.bystander.process.pid
    undo = _order(harness, fault)
    asker = Asker(harness)
    began = time.monotonic()
    version = harness.order(wanted, fault)
    if fault.victim:
        _signal_later(harness, fault)
    said = harness.trainer.outcome(OUTCOME_S) if not _kills_trainer(fault) else _wait_for_death(harness)
    _detected(harness, outcome, said, began)
    _aside(harness, fault, outcome)
    if undo:
        undo()
    harness.thaw()
    status = harness.settled()
    if status is None:
        outcome.left = "dead"
        harness.restart()
    else:
        outcome.left = _left(harness, status, before, wanted, version, outcome)
        outcome.restarted = int(status.instance != instance)
    outcome.restarted += int(harness.bystander.process.pid != bystander or harness.bystander.process.poll() is not None)
    seen = asker.stop()
    outcome.mixed = sum(count for name, count in seen.items() if name.startswith("mixed"))
    outcome.answers = sum(count for name, count in seen.items() if name != "none")
    _judge(harness, fault, outcome, restarts)
    _mend(harness, fault, outcome, before)
    return outcome


def _order(harness: Harness, fault: Fault):
    fired = harness.fault_file.with_suffix(".json.fired")
    fired.unlink(missing_ok=True)
    if fault.order:
        draft = harness.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps(fault.order))
        draft.rename(harness.fault_file)
    if fault.special == "full disk":
        return harness.full_disk()
    return None


def _kills_trainer(fault: Fault) -> bool:
    return "trainer" in fault.what and fault.what.startswith("SIG")


def _signal_later(harness: Harness, fault: Fault) -> None:
    time.sleep(fault.delay_s)
    pid = {"trainer": harness.trainer.process.pid, "front end": harness.front_end, "worker": harness.workers[-1]}[
        fault.victim
    ]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, fault.signal))
    harness.fault_file.with_suffix(".json.fired").touch()


def _wait_for_death(harness: Harness):
    """Wait until the fault has hit; a trainer that finished before it still reports."""
    end = time.monotonic() + OUTCOME_S
    while time.monotonic() < end:
        if (said := harness.trainer.outcome(0.2)) is not None:
            return said
        if harness.trainer.process.poll() is not None:
            return None
        status = harness.status()
        fired = harness.fault_file.with_suffix(".json.fired").exists()
        if fired and status is not None and status.state in ("serving", "dirty"):
            return None
    return None


def _detected(harness: Harness, outcome: Outcome, said, began: float) -> None:
    """Record how long after the fault the survivors knew of it."""
    if said is None:
        harness.settled(OUTCOME_S)  # only the engine can notice
    now = time.time()
    fired = harness.fault_file.with_suffix(".json.fired")
    since = now - fired.stat().st_mtime if fired.exists() else time.monotonic() - began
    outcome.detect_s = max(0.0, since)
    if said is not None:
        outcome.error = said["error"]
        outcome.claimed = said["engines"].get(harness.url, "")
        if said["error"] and not said["message"]:
            outcome.wrong = "an error without a message"


def _aside(harness: Harness, fault: Fault, outcome: Outcome) -> None:
    """Let a second trainer push, if the fault is that there is one."""
    if fault.special == "second trainer":
        from tests.faults.harness import Trainer

        second = Trainer(harness.fault_file.with_name("none.json"))
        second.order(
            urls=[harness.url],
            model=str(harness.folders["A"]),
            version="intruder",
            options={"timeout_s": PUSH_S},
            spoil="",
        )
        said = second.outcome(180)  # includes the start of its process
        second.close()
        if said is None or said["error"] != "LeaseHeld" or str(harness.trainer.process.pid) not in said["message"]:
            outcome.wrong = f"the second trainer was told {said}"


def _left(harness, status, before, wanted, version, outcome) -> str:
    if status.state == "dirty":
        found = harness.which(2.0)
        if found != "none":
            outcome.wrong = f"a dirty engine answered from {found}"
        return DIRTY
    found = harness.which(30.0)
    label = harness.label(status)
    if found == wanted and label == version:
        return COMMITTED
    if found == before and label != version:
        return UNCHANGED
    outcome.wrong = f"it serves {found} under the label {label}"
    return f"{found} as {label}"


def _judge(harness: Harness, fault: Fault, outcome: Outcome, restarts: int) -> None:
    killed = outcome.left == "dead"
    if killed and not (fault.what.startswith("SIGKILL") and "trainer" not in fault.what):
        outcome.wrong = "the engine died"
    if not killed and outcome.left not in fault.may:
        outcome.wrong = outcome.wrong or f"expected {' or '.join(fault.may)}"
    if outcome.claimed and not killed and outcome.claimed not in ("unknown", outcome.left):
        outcome.wrong = f"the trainer was told {outcome.claimed}"
    if outcome.mixed:
        outcome.wrong = "mixed weights were served"
    if outcome.restarted:
        outcome.wrong = "a survivor was restarted"


def _mend(harness: Harness, fault: Fault, outcome: Outcome, before: str) -> None:
    """Push a full version, with the same trainer if it lives; the engine must serve again."""
    harness.fault_file.unlink(missing_ok=True)
    if _kills_trainer(fault):
        harness.new_trainer()
    try:
        said = harness.push_clean(before, fault.options)
    except AssertionError as error:
        outcome.wrong = outcome.wrong or f"not mended: {error}"
        harness.new_trainer()
        if not harness.alive():
            harness.restart()
        harness.push_clean(before)
        return
    outcome.mended = harness.which(30.0) == before
    if not outcome.mended:
        outcome.wrong = outcome.wrong or "a full push did not mend it"
    # A sender that was built after the fault does not know the previous instance.
    noticed = said["built"] or any("restarted" in word for word in said["noticed"])
    if outcome.left == "dead" and not _kills_trainer(fault) and not noticed:
        outcome.wrong = outcome.wrong or "the restarted engine was not noticed"
