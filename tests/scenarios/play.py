"""How a step is made: a call, what happens to engines during it, and what else happens once it has come to a stop."""

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

from tests.scenarios.truth import ForeignError, Lag, TooLate, Truth, Violation
from tests.scenarios.world import Engine, Fault, Suspect, World
from weightsync import cli
from weightsync.errors import WeightSyncError

#: What nobody waits for in vain: a call that takes longer by this much is ended.
_HUNG_S = 60.0
#: When an engine stands still, others may be about to.
_SETTLE_S = 0.03
_STANDING = ("hold", "stop")
#: How many steps an engine that has ended is not there.
_DOWN_STEPS = 3

Meanwhile = tuple[str, int]
"""What happens during a call, and to which engine."""


@dataclass
class Outcome:
    """What came of a call."""

    result: Any = None
    error: WeightSyncError | None = None
    interrupted: bool = False


@dataclass
class Tally:
    """What a run consisted of."""

    steps: int = 0
    scenarios: int = 0
    rules: collections.Counter[str] = field(default_factory=collections.Counter)
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    #: Kinds of violations that are counted, and no more.
    known: tuple[str, ...] = ()
    #: By kind of violation, after how many steps it was first seen, and those of its scenario.
    found: dict[str, tuple[int, list[str]]] = field(default_factory=dict)


class Interrupts:
    """Ctrl-C, while somebody is to get one; at any other time it ends the run, as it should."""

    def __init__(self) -> None:
        self._expected = self._welcome = False
        #: Whether the last one that came through was expected.
        self.ours = False
        self._before = signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.ours, self._expected = self._expected, False
        if self._welcome or not self.ours:
            self._welcome = False
            raise KeyboardInterrupt

    def send(self) -> None:
        """One is on its way, from another thread."""
        self._expected = True
        os.kill(os.getpid(), signal.SIGINT)

    @contextlib.contextmanager
    def welcome(self) -> Iterator[None]:
        """Inside, it comes through."""
        self._welcome = True
        try:
            yield
        finally:
            self._welcome = False

    def close(self) -> None:
        """As before."""
        signal.signal(signal.SIGINT, self._before)


class Play:
    """One scenario: steps in a world."""

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
        pusher: Suspect | None = None,
        others: Callable[[Meanwhile], None] | None = None,
    ) -> Outcome:
        """``act``, which is to end within ``limit_s``. ``faults`` are ordered for ``engines``, in their order.

        ``meanwhile`` happens as soon as an engine stands still, or at once where none is to; what of it is not about an
        engine is done by ``others``. Raises `Violation`.
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
        # An engine, in another process, is as late as this one.
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
        """What was ordered has happened, or is called off."""
        if engine.alive() and engine.happened() and fault.action in _STANDING:
            engine.still = fault.steps
        else:
            engine.cancel()

    def step(self, rule: str) -> None:
        """One more begins: what has stood still for long enough goes on, and what has ended is started again."""
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
        """Start them anew."""
        for engine in engines:
            self.truth.forget([engine])
            engine.kill()
            engine.start()


def abort(engine: Engine) -> int:
    """As somebody does at a terminal."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return cli.main(["abort", engine.url, "--timeout", "1"])


def _name(outcome: Outcome) -> str:
    if outcome.interrupted:
        return "KeyboardInterrupt"
    return type(outcome.error).__name__ if outcome.error is not None else "ok"
