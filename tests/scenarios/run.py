"""Runs the state machine for a number of steps or seconds and collects the violations."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers import keen
from tests.scenarios.machine import Scenario
from tests.scenarios.play import Interrupts, Tally
from tests.scenarios.truth import Lag
from tests.scenarios.world import World
from tools import servers
from weightsync import Sender
from weightsync.transports import registry

#: Marks lines of a sequence that carry no information.
_SAYS_NOTHING = Scenario.engines_serve_what_they_say.__name__
#: Steps of one scenario; many, so that faults can combine.
_STEPS = 50


@dataclass
class Run:
    """The outcome of a run. ``violations`` are the smallest sequences that were found, each with its violation."""

    engine: str
    seed: int
    asked: int
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    violations: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The outcome as it is written to the results folder."""
        return {
            "engine": self.engine,
            "seed": self.seed,
            "asked": self.asked,
            "steps": self.tally.steps,
            "seconds": round(self.seconds, 1),
            "violations": self.violations,
            "first_seen_after_steps": {kind: steps for kind, (steps, _) in self.tally.found.items()},
            "rules": dict(sorted(self.tally.rules.items())),
            "outcomes": dict(sorted(self.tally.outcomes.items())),
            "commit": _commit(),
            "torch": torch.__version__,
        }


@contextlib.contextmanager
def prepared(kind: str) -> Iterator[type[Scenario]]:
    """A state machine with its own world."""
    world = World(kind)
    try:
        for transport in registry.available():  # allocates what a process allocates once, before anything is counted
            with Sender([engine.url for engine in world.engines], transport=transport) as sender:
                sender.push(world.mapping, version="first")
        lag, interrupts, raised, hook = Lag(), Interrupts(), list[str](), threading.excepthook
        threading.excepthook = lambda told: raised.append(f"{told.exc_type.__name__}: {told.exc_value} ({told.thread})")
        try:
            shared = {"world": world, "lag": lag, "interrupts": interrupts, "raised": raised}
            with keen():
                yield type("Scenario", (Scenario,), shared)
        finally:
            threading.excepthook = hook
            interrupts.close()
            lag.close()
    finally:
        world.close()


def run(
    kind: str,
    number: int,
    *,
    steps: int,
    limit_s: float = float("inf"),
    grace_s: float | None = None,
    known: tuple[str, ...] = (),
    shrink: bool = True,
) -> Run:
    """Run scenarios from the seed ``number`` for ``steps`` steps or ``limit_s`` seconds, or until a violation.

    ``grace_s``: seconds by which calls may outlast their deadlines; violations of the ``known`` kinds are only counted.
    """
    found, begin = Run(kind, number, steps), time.monotonic()
    tally = found.tally
    tally.known = known

    with prepared(kind) as machine:
        since = time.monotonic()

        def over(_: Scenario) -> bool:
            # Hypothesis repeats one step in the first scenario. Shrinking a violation may take any time.
            enough = tally.steps >= steps or time.monotonic() - since > limit_s
            return tally.scenarios == 1 or (enough and not tally.found)

        machine.tally, machine.over = tally, over
        machine.world.grace_s = machine.world.grace_s if grace_s is None else grace_s
        chosen = settings(
            max_examples=max(2, -(-2 * steps // _STEPS)),
            stateful_step_count=_STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        )
        try:
            run_state_machine_as_test(seed(number)(machine), settings=chosen)
        except Exception as error:
            # Several violations come as an exception group.
            found.violations = [_told(one, tally) for one in getattr(error, "exceptions", [error])]
    found.seconds = time.monotonic() - begin
    return found


def _told(error: BaseException, tally: Tally) -> dict[str, Any]:
    """A violation with its sequence; if it could not be reproduced, the sequence in which it was first seen."""
    notes = [
        line for note in getattr(error, "__notes__", ()) for line in note.splitlines() if _SAYS_NOTHING not in line
    ]
    kind = type(error).__name__
    if kind in tally.found and not any("state." in line for line in notes):
        notes = ["not again; at first after:", *tally.found[kind][1]]
    return {"kind": kind, "untrue": str(error), "sequence": notes}


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=servers.ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip()
