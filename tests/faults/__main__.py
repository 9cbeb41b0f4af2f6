"""``python -m tests.faults``: every fault at every place, on real engines, as one table."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from tests.faults.harness import BUCKET_BYTES, Harness, Outcome
from tests.faults.plan import Fault, at_random, catalogue, of_adapters, of_changes
from tests.faults.run import suffer
from tools import servers
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout
from weightsync.transports import registry

ROW = "{:<36} {:<9} {:<8} {:<26} {:<11} {:>8} {:>6} {:>9} {:>7}  {}"
#: Large enough for both engines, small enough to be filled.
SHM_BYTES = 2 << 30


def main() -> int:
    """Run the faults; returns 1 if one of them had a forbidden outcome."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--engine", action="append", choices=["vllm", "sglang", "reference", "drafts"])
    parser.add_argument("--transport", action="append", choices=list(registry.names()), help="default: every one")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--stays", action="store_true", help="vLLM alone, whose weights stay where they are")
    parser.add_argument("--quantised", action="store_true", help="vLLM alone, which quantises what it loads")
    parser.add_argument("--adapters", action="store_true", help="pushes of an adapter; those of weights by default")
    parser.add_argument("--changes", action="store_true", help="pushes of what has changed; of everything by default")
    parser.add_argument("--rounds", type=int, default=0, help="how many faults at random instants to add, per engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only faults whose name and phase match this expression")
    parser.add_argument("--results", type=Path, help="folder for the outcomes as JSON")
    asked = parser.parse_args()
    if "OWN_SHM" not in os.environ and _own_shm():
        command = f'mount -t tmpfs -o size={SHM_BYTES} none /dev/shm && exec "$0" "$@"'
        again = ["unshare", "-m", "sh", "-c", command, sys.executable, "-m", "tests.faults", *sys.argv[1:]]
        return subprocess.call(again, env={**os.environ, "OWN_SHM": "1"})
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="ws-") as scratch:
        os.environ["WEIGHTSYNC_TOKEN"] = secrets.token_urlsafe(32)
        print(ROW.format("fault", "engine", "by", "phase", "outcome", "detected", "mixed", "restarted", "mended", ""))
        for engine in ["vllm"] if asked.stays or asked.quantised else asked.engine or ["vllm", "sglang"]:
            found = _one(engine, asked, Path(scratch) / engine)
            outcomes += found
            if asked.results and not asked.only:  # only complete results are written
                kinds = [kind for kind in ("stays", "quantised", "adapters", "changes") if getattr(asked, kind)]
                _keep(asked.results / f"faults-{'-'.join([engine, *kinds])}.json", found, asked)
    return _summary(outcomes)


def _own_shm() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


def _one(engine: str, asked: argparse.Namespace, scratch: Path) -> list[Outcome]:
    scratch.mkdir()
    reference = engine in ("reference", "drafts")
    tp = 1 if reference else asked.tp
    changes, lora = asked.changes, "policy" if asked.adapters else ""
    kinds = {"stays": asked.stays, "quantised": asked.quantised, "lora": lora, "changes": changes}
    harness = Harness(engine, tp, scratch, **kinds)
    try:
        harness.prove()
        specs = (
            *open_source(harness.base).specs,
            *(open_source(harness.drafts["A"]).specs if harness.drafts else ()),
        )
        buckets, tensors = Layout(specs).buckets(BUCKET_BYTES), len(specs)
        carry = [name for name in registry.available() if not (changes and registry.spec(name).local)]
        transports = asked.transport or carry
        every = [fault for name in transports for fault in _of(asked, tp, tensors - 1, name, not reference)]
        faults = [fault for fault in every if re.search(asked.only, f"{fault.what}, {fault.phase}")]
        # vLLM's hook is of its loader, the reference engine has none.
        if reference or (engine == "vllm" and harness.loads_by_plan()):
            faults = [fault for fault in faults if fault.phase != "post-load hook"]
        if "OWN_SHM" not in os.environ:
            print("skipped: shared-memory mount full (needs a mount namespace of its own: run as root)")
            faults = [fault for fault in faults if fault.special != "full disk"]
        if asked.rounds:
            begin = time.monotonic()
            harness.push_clean("A")
            push_s = time.monotonic() - begin
            harness.push_clean("B")
            faults += at_random(asked.seed, asked.rounds, tp, push_s, tensors, buckets, transports)
        return [_shown(suffer(harness, fault)) for fault in faults]
    finally:
        harness.close()


def _of(asked: argparse.Namespace, tp: int, last: int, transport: str, standby: bool) -> list[Fault]:
    """The faults of the kind of push that was asked for."""
    if asked.adapters:
        return of_adapters(tp, transport)
    if asked.changes:
        return of_changes(tp, last, transport, standby)
    return catalogue(tp, last, transport, standby, copies=asked.stays)


def _shown(outcome: Outcome) -> Outcome:
    fault: Fault = outcome.fault
    options = "".join(f", {name}={value}" for name, value in fault.options.items() if name == "keep_previous")
    phase = fault.phase + ("" if "kept" in fault.what else options)
    print(
        ROW.format(
            fault.what,
            outcome.engine,
            fault.transport,
            phase,
            outcome.left,
            f"{outcome.detect_s:.1f} s",
            outcome.mixed,
            outcome.restarted,
            "yes" if outcome.mended else "NO",
            f"WRONG: {outcome.wrong}" if outcome.wrong else outcome.error,
        ),
        flush=True,
    )
    return outcome


def _keep(path: Path, outcomes: list[Outcome], asked: argparse.Namespace) -> None:
    rows = [
        {
            "fault": o.fault.what,
            "transport": o.fault.transport,
            "phase": o.fault.phase,
            "options": o.fault.options,
            "outcome": o.left,
            "trainer_was_told": o.claimed,
            "error": o.error,
            "detected_s": round(o.detect_s, 2),
            "answers": o.answers,
            "mixed": o.mixed,
            "survivors_restarted": o.restarted,
            "mended": o.mended,
            "wrong": o.wrong,
        }
        for o in outcomes
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"tp": asked.tp, "seed": asked.seed, "rounds": asked.rounds, "torch": torch.__version__}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _summary(outcomes: list[Outcome]) -> int:
    left = Counter(outcome.left for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    print(
        f"{len(outcomes)} faults: {', '.join(f'{count} {name}' for name, count in left.most_common())}; "
        f"{sum(o.answers for o in outcomes)} answers looked at, {sum(o.mixed for o in outcomes)} mixed; "
        f"{sum(o.restarted for o in outcomes)} survivors restarted; {sum(o.mended for o in outcomes)} mended; "
        f"{len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.path.insert(0, str(servers.ROOT))
    sys.exit(main())
