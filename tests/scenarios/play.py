"""Runs a step: a call, the faults during it, and other events once an engine stands still."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tests.scenarios.suspect import Fault
from tests.scenarios.truth import ForeignError, Lag, TooLate, Truth, Violation
from tests.scenarios.world import Engine, World
from weightsync import cli
from weightsync.errors import WeightSyncError

#: Seconds beyond its limit after which a call is interrupted.
_HUNG_S = 60.0
#: Seconds to wait for further engines to stand still after the first.
_SETTLE_S = 0.03
_STANDING = ("hold", "stop")
#: For how many steps a dead engine stays down.
_DOWN_STEPS = 3

Meanwhile = tuple[str, int]
"""An event during a call, and the number of its engine."""


@dataclass
class Outcome:
    """The outcome of a call."""

    result: Any = None
    error: WeightSyncError | None = None
    interrupted: bool = False


@dataclass
class Tally:
    """Counts of a run."""

    steps: int = 0
    scenarios: int = 0
    rules: collections.Counter[str] = field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    #: Kinds of violations that are only counted.
    known: tuple[str, ...] = ()
    #: By kind of violation: the number of steps before it was first seen, and the steps of its scenario.
    found: dict[str, tuple[int, list[str]]] = field(default_factory=dict)


class Interrupts:
    """Delivers Ctrl-C to calls that expect one; at any other time Ctrl-C ends the run."""

    def __init__(self) -> None:
        self._expected = self._welcome = False
        #: Whether the last interrupt was expected.
        self.ours = False
        self._before = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.ours, self._expected = self._expected, False
        if self._welcome or not self.ours:
            self._welcome = False
            raise KeyboardInterrupt

    def send(self) -> None:
        """Send an interrupt from another thread."""
        self._expected = True
        os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def welcome(self) -> Iterator[None]:
        """Let interrupts through for the duration of the block."""
        self._welcome = True
        try:
            yield
        finally:
            self._welcome = False

    def close(self) -> None:
        """Restore the previous handler."""
        signal.signal(signal.SIGINT, self._before)


class Play:
    """The steps of one scenario."""

    def __init__(self, world: World, truth: Truth, lag: Lag, interrupts: Interrupts, tally: Tally):
        self.world, self.truth, self.tally = world, truth, tally
        self._lag, self._interrupts = lag, interrupts

    def call(
        self,
        what: str,
        limit_s: float,
        act: Callable[[], Any],
        *,
        engines: Sequence[Engine] = (),
        faults: Sequence[Fault | None] = (),
        meanwhile: Sequence[Meanwhile] = (),
        others: Callable[[Meanwhile], None] | None = None,
    ) -> Outcome:
        """Run ``act``, which must end within ``limit_s``; ``faults`` are ordered for ``engines``, one each.

        ``meanwhile`` happens as soon as an engine stands still, or at once if none will; ``others`` handles its events
        that do not concern an engine. Raises `Violation`.
        """
        ordered: list[tuple[Engine, Fault]] = []
        for engine, fault in zip(engines, faults, strict=False):
            if fault is None or not engine.alive() or engine.still:
                continue
            if fault.action != "kill" or self.world.may_end(self.tally.steps):
                engine.order(fault)
                ordered.append((engine, fault))
        waits = [engine for engine, fault in ordered if fault.action in _STANDING]
        over = threading.Event()
        beside = threading.Thread(target=self._beside, args=(meanwhile, waits, over, others), name="scenarios-beside")
        if meanwhile:
            beside.start()
        try:
            with self._bounded(what, limit_s):
                outcome = self._made(what, act)
        finally:
            over.set()
            if meanwhile:
                beside.join()
            for engine, fault in ordered:
                self._after(engine, fault)
        self.tally.outcomes[f"{what}: {_name(outcome)}"] += 1
        return outcome

    def _made(self, what: str, act: Callable[[], Any]) -> Outcome:
        try:
            with self._interrupts.welcome():
                return Outcome(act())
        except WeightSyncError as error:
            return Outcome(error=error)
        except KeyboardInterrupt:
            if not self._interrupts.ours:
                raise
            return Outcome(interrupted=True)
        except Violation:
            raise
        except Exception as error:
            raise ForeignError(f"{what} raised {type(error).__name__}: {error}") from error

    @contextlib.contextmanager
    def _bounded(self, what: str, limit_s: float) -> Iterator[None]:
        """Raise `TooLate` if what is inside outlasts ``limit_s`` by more than the grace and this machine's lag."""
        start, lag_s = time.monotonic(), self._lag.total_s()
        hung = threading.Timer(limit_s + _HUNG_S, lambda: os.kill(os.getpid(), signal.SIGINT))
        hung.daemon = True
        hung.start()
        try:
            yield
        except KeyboardInterrupt as error:
            if time.monotonic() - start < limit_s + _HUNG_S:
                raise
            raise TooLate(f"{what} did not end within {limit_s:g} s, nor {_HUNG_S:g} s later") from error
        finally:
            hung.cancel()
            hung.join()
        # An engine in another process lags as much as this one.
        took_s, late_s = time.monotonic() - start, 2 * (self._lag.total_s() - lag_s)
        if took_s > limit_s + self.world.grace_s + late_s:
            raise TooLate(f"{what} took {took_s:.2f} s of {limit_s:g}, of which this machine was late for {late_s:.2f}")

    def _beside(
        self,
        meanwhile: Sequence[Meanwhile],
        waits: Sequence[Engine],
        over: threading.Event,
        others: Callable[[Meanwhile], None] | None,
    ) -> None:
        seen = 0
        while waits and not over.is_set():
            now = sum(engine.happened() for engine in waits)
            if now and now == seen:
                break
            seen = now
            over.wait(_SETTLE_S if now else 0.002)
        for what, number in meanwhile:
            if over.is_set():
                return
            engine = self.world.engines[number % len(self.world.engines)]
            if what == "interrupt":
                self._interrupts.send()
            elif what == "release":
                engine.go_on()
            elif what == "abort":
                abort(engine)
            elif what == "kill engine":
                if self.world.may_end(self.tally.steps):
                    engine.signal(signal.SIGKILL)
            elif others is not None:
                others((what, number))

    def _after(self, engine: Engine, fault: Fault) -> None:
        """Cancel a fault that did not happen; an engine that stands still does so for the fault's steps."""
        # Asked for in this order: it may happen at any moment before.
        if not engine.withdraw() and engine.happened() and engine.alive() and fault.action in _STANDING:
            engine.still = fault.steps
        else:
            engine.cancel()

    def step(self, rule: str) -> None:
        """Begin a step: continue engines that stood still long enough, and restart dead ones."""
        self.tally.steps += 1
        self.tally.rules[rule] += 1
        for engine in self.world.engines:
            if not engine.alive():
                engine.down += 1
                if engine.down > _DOWN_STEPS:
                    self.restart([engine])
            elif engine.still:
                engine.still -= 1
                if not engine.still:
                    engine.go_on()

    def restart(self, engines: Iterable[Engine]) -> None:
        """Kill the engines and start them again."""
        for engine in engines:
            self.truth.forget([engine])
            engine.kill()
            engine.start()


def abort(engine: Engine) -> int:
    """Run ``weightsync abort``."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return cli.main(["abort", engine.url, "--timeout", "1"])


def _name(outcome: Outcome) -> str:
    if outcome.interrupted:
        return "KeyboardInterrupt"
    if outcome.error is not None:
        return type(outcome.error).__name__
    return "ok, what has changed" if getattr(outcome.result, "delta", None) is not None else "ok"
