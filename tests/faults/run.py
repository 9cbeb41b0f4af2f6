"""One fault after another, and what came of each."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from tests.faults.plan import COMMITTED, DIRTY, UNCHANGED, Fault
from tests.faults.rig import PUSH_S, Asker, Outcome, Rig

#: A trainer that is dead or frozen is not waited for longer than its push may take.
OUTCOME_S = PUSH_S + 6.0


def suffer(rig: Rig, fault: Fault) -> Outcome:
    """Bring one fault about, look at what is left, and mend it with a full push."""
    outcome = Outcome(rig.engine, fault)
    before = rig.serving
    wanted = "A" if before == "B" else "B"
    if fault.options.get("keep_previous"):
        # What is kept is what was pushed by a sender that keeps: one version back there must be such a push.
        rig.push_clean(before, fault.options)
    restarts = rig.restarts
    instance, bystander = rig.instance, rig.bystander.process.pid
    undo = _order(rig, fault)
    asker = Asker(rig)
    began = time.monotonic()
    version = rig.order(wanted, fault)
    if fault.victim:
        _signal_later(rig, fault)
    said = rig.trainer.outcome(OUTCOME_S) if not _kills_trainer(fault) else _wait_for_death(rig)
    _detected(rig, outcome, said, began)
    _aside(rig, fault, outcome)
    if undo:
        undo()
    rig.thaw()
    status = rig.settled()
    if status is None:
        outcome.left = "dead"
        rig.restart()
    else:
        outcome.left = _left(rig, status, before, wanted, version, outcome)
        outcome.restarted = int(status.instance != instance)
    outcome.restarted += int(rig.bystander.process.pid != bystander or rig.bystander.process.poll() is not None)
    seen = asker.stop()
    outcome.mixed = sum(count for name, count in seen.items() if name.startswith("mixed"))
    outcome.answers = sum(count for name, count in seen.items() if name != "none")
    _judge(rig, fault, outcome, restarts)
    _mend(rig, fault, outcome, before)
    return outcome


def _order(rig: Rig, fault: Fault):
    fired = rig.fault_file.with_suffix(".json.fired")
    fired.unlink(missing_ok=True)
    if fault.order:
        draft = rig.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps(fault.order))
        draft.rename(rig.fault_file)
    if fault.special == "full disk":
        return rig.full_disk()
    return None


def _kills_trainer(fault: Fault) -> bool:
    return "trainer" in fault.what and fault.what.startswith("SIG")


def _signal_later(rig: Rig, fault: Fault) -> None:
    time.sleep(fault.delay_s)
    pid = {"trainer": rig.trainer.process.pid, "front end": rig.front_end, "worker": rig.workers[-1]}[fault.victim]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, fault.signal))
    rig.fault_file.with_suffix(".json.fired").touch()


def _wait_for_death(rig: Rig):
    """A trainer that is killed or frozen says nothing; one that was faster than its fate does."""
    end = time.monotonic() + OUTCOME_S
    while time.monotonic() < end:
        if (said := rig.trainer.outcome(0.2)) is not None:
            return said
        if rig.trainer.process.poll() is not None:
            return None
        status = rig.status()
        fired = rig.fault_file.with_suffix(".json.fired").exists()
        if fired and status is not None and status.state in ("serving", "dirty"):
            return None
    return None


def _detected(rig: Rig, outcome: Outcome, said, began: float) -> None:
    """How long after the fault who survived knew."""
    if said is None:
        rig.settled(OUTCOME_S)  # the engine is who has to notice
    now = time.time()
    fired = rig.fault_file.with_suffix(".json.fired")
    since = now - fired.stat().st_mtime if fired.exists() else time.monotonic() - began
    outcome.detect_s = max(0.0, since)
    if said is not None:
        outcome.error = said["error"]
        outcome.claimed = said["engines"].get(rig.url, "")
        if said["error"] and not said["message"]:
            outcome.wrong = "an error without a message"


def _aside(rig: Rig, fault: Fault, outcome: Outcome) -> None:
    """What happens beside the fault: another trainer comes, or takes over."""
    if fault.special == "second trainer":
        from tests.faults.rig import Trainer

        second = Trainer(rig.fault_file.with_name("none.json"))
        second.order(
            urls=[rig.url], model=str(rig.folders["A"]), version="intruder", options={"timeout_s": PUSH_S}, spoil=""
        )
        said = second.outcome(180)  # it has to start first
        second.close()
        if said is None or said["error"] != "LeaseHeld" or str(rig.trainer.process.pid) not in said["message"]:
            outcome.wrong = f"the second trainer was told {said}"


def _left(rig, status, before, wanted, version, outcome) -> str:
    if status.state == "dirty":
        found = rig.which(2.0)
        if found != "none":
            outcome.wrong = f"a dirty engine answered from {found}"
        return DIRTY
    found = rig.which(30.0)
    if found == wanted and status.version == version:
        return COMMITTED
    if found == before and status.version != version:
        return UNCHANGED
    outcome.wrong = f"it serves {found} under the label {status.version}"
    return f"{found} as {status.version}"


def _judge(rig: Rig, fault: Fault, outcome: Outcome, restarts: int) -> None:
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


def _mend(rig: Rig, fault: Fault, outcome: Outcome, before: str) -> None:
    """A full push, by the same trainer if it lives, makes it serve again."""
    rig.fault_file.unlink(missing_ok=True)
    if _kills_trainer(fault):
        rig.new_trainer()
    try:
        said = rig.push_clean(before, fault.options)
    except AssertionError as error:
        outcome.wrong = outcome.wrong or f"not mended: {error}"
        rig.new_trainer()
        if not rig.alive():
            rig.restart()
        rig.push_clean(before)
        return
    outcome.mended = rig.which(30.0) == before
    if not outcome.mended:
        outcome.wrong = outcome.wrong or "a full push did not mend it"
    # A sender that was built since knows of no other instance.
    noticed = said["built"] or any("restarted" in word for word in said["noticed"])
    if outcome.left == "dead" and not _kills_trainer(fault) and not noticed:
        outcome.wrong = outcome.wrong or "the restarted engine was not noticed"
