"""The building blocks of the rules: calls of senders, in this process and in others."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine

from tests.scenarios import truth
from tests.scenarios.adapters import NAME
from tests.scenarios.drawn import PLAIN, End
from tests.scenarios.play import Interrupts, Meanwhile, Outcome, Play, Tally
from tests.scenarios.pusher import Pusher
from tests.scenarios.resources import OpenResources, held
from tests.scenarios.suspect import PATIENCE_S, Fault
from tests.scenarios.truth import Lag, NotPushable, Truth, UntrueReport, Violation
from tests.scenarios.weights import CONTENTS
from tests.scenarios.world import Engine, World
from weightsync import Sender
from weightsync.errors import ApplyFailed, LeaseHeld, WeightSyncError
from weightsync.protocol import http

#: Seconds; a closing sender tells its engines and waits a second for each answer.
CLOSE_S = 2.0
#: Seconds; a trainer in another process has to build its sender and to report the outcome.
OTHERS_S = 1.0


class Acting(RuleBasedStateMachine):
    """One sequence. `run.prepared` sets the world and the other class attributes."""

    world: ClassVar[World]
    tally: ClassVar[Tally]
    lag: ClassVar[Lag]
    interrupts: ClassVar[Interrupts]
    raised: ClassVar[list[str]]
    over: ClassVar[Callable[[], bool]]

    def __init__(self) -> None:
        super().__init__()
        self.tally.scenarios += 1
        self.world.reset()
        self.truth = Truth(self.world, self.raised)
        self.play = Play(self.world, self.truth, self.lag, self.interrupts, self.tally)
        self.sender: Sender | None = None
        self.timeout_s = 1.0
        self.address = ""
        self.labels = 0
        self.failed = False
        #: The steps so far, to be reported with a violation that cannot be reproduced.
        self.made: list[str] = []
        #: The sender's engines by number: the instance that it last made serve a version, or "".
        self.members: dict[int, str] = {}
        #: The label that the sender's memory still holds for late engines, or ""; whether it can hold one.
        self.holds, self.keeps = "", False
        #: The sender whose engines keep a version.
        self.keeping: Sender | None = None
        self.truth.check()
        #: Resources in use before any sender exists; a violation in another scenario may have left some.
        self.before: OpenResources = held(self.world.own_files())

    def note(self, found: Violation) -> None:
        """Record a violation with the number of steps. Raises it unless its kind is known."""
        kind = type(found).__name__
        if kind in self.tally.known:
            print(f"known, after {self.tally.steps} steps: {kind}: {found}", file=sys.stderr, flush=True)
            self.tally.outcomes[f"known: {kind}"] += 1
            self.truth.forget(self.world.engines)
            return
        self.failed = True
        if kind not in self.tally.found:
            self.tally.found[kind] = self.tally.steps, list(self.made)
            print(f"after {self.tally.steps} steps: {kind}: {found}", file=sys.stderr, flush=True)
        raise found

    def engines(self, numbers: Sequence[int]) -> list[Engine]:
        """The engines with these numbers, modulo the number of engines."""
        found = {number % len(self.world.engines) for number in numbers}
        return [self.world.engines[number] for number in sorted(found)]

    def label(self, content: int, *, lora: bool = False) -> str:
        """A new label for a push of ``content``."""
        self.labels += 1
        self.truth.pushed(label := f"v{self.labels}", content, lora)
        return label

    def timed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options, with the timeout scaled for this kind of engine."""
        return {**options, "timeout_s": self.world.times * options["timeout_s"]}

    def built(self, numbers: Sequence[int] = (0, 1), options: dict[str, Any] = PLAIN) -> Sender | None:
        """The current sender, or a new one."""
        if self.sender is None:
            engines = self.engines(numbers)
            urls, options = [engine.url for engine in engines], self.timed(options)
            made = self.play.call("Sender", options["timeout_s"], lambda: Sender(urls, **options))
            self.sender, self.timeout_s, self.address, self.holds = made.result, options["timeout_s"], "", ""
            # Whether its arena holds a whole version.
            self.keeps = options["bucket_bytes"] is None
            self.members = dict.fromkeys((engine.number for engine in engines), "")
        return self.sender

    def closed(self) -> None:
        """Close the sender, if there is one."""
        if (sender := self.sender) is not None:
            self.sender = None
            self.play.call("close", CLOSE_S, sender.close)
            self.members, self.holds = {}, ""

    def sent(
        self,
        what: str,
        act: Callable[[], Any],
        label: str,
        numbers: Sequence[int] | None = None,
        *,
        faults: Sequence[Fault | None] = (),
        meanwhile: Sequence[Meanwhile] = (),
        lora: bool | None = False,
    ) -> Outcome:
        """Run a call of the sender that makes engines, by default all of its own, serve ``label``; ``lora``: `told`."""
        engines = self.engines(list(self.members) if numbers is None else numbers)
        before, instances = dict(self.truth.seen), self.instances()
        self.truth.forget(engines)
        by_number = [faults[engine.number] if faults else None for engine in engines]
        outcome = self.play.call(
            what, self.timeout_s, act, engines=engines, faults=by_number, meanwhile=meanwhile, others=self.beside
        )
        if self.interrupted_or_meddled(meanwhile):
            return outcome
        if outcome.error is not None:
            self.truth.told(
                outcome.error.engines, label, before, f"{what} of {label}: {_text(outcome.error)}", lora=lora
            )
        elif not outcome.interrupted:
            told = outcome.result if isinstance(outcome.result, dict) else getattr(outcome.result, "engines", {})
            self.truth.told(dict.fromkeys(told, "committed"), label, before, f"{what} of {label}", lora=lora)
            for engine in engines:
                if engine.url in told and not lora:
                    self.members[engine.number] = instances[engine.number]
        return outcome

    def adapted(self, content: int, faults: Sequence[Fault | None], meanwhile: Sequence[Meanwhile]) -> None:
        """Push an adapter with the current sender."""
        assert self.sender is not None
        label, held = self.label(content, lora=True), self.holds
        push = partial(self.sender.push, self.world.weights.adapter(content), version=label, lora=NAME)
        outcome = self.sent("push adapter", push, label, faults=faults, meanwhile=meanwhile, lora=True)
        # The memory that holds the weights goes with a transfer that breaks.
        result = outcome.result
        self.holds = held if result is not None and not any(e.noticed for e in result.engines.values()) else ""

    def adapter_rolled_back(self, faults: Sequence[Fault | None]) -> None:
        """Roll the adapter back and check the report."""
        assert self.sender is not None
        kept = self.known(lambda rank: (rank.adapters or {}).get(NAME))
        back = partial(self.sender.rollback, lora=NAME)
        outcome = self.sent("rollback adapter", back, "", faults=faults, lora=True)
        if outcome.error is not None:
            self.kept(outcome.error)
        elif outcome.result is not None:
            if kept is not None and outcome.result.version not in kept:
                raise UntrueReport(f"rollback says {outcome.result.version!r}, and engines kept {kept}")
            told = dict.fromkeys(outcome.result.engines, "committed")
            self.truth.told(told, outcome.result.version, self.truth.seen, "rollback adapter", lora=True)

    def known(self, of: Callable[[http.RankStatus], str | None]) -> set[str | None] | None:
        """What the ranks of the sender's engines have said last; None if one of them could not be asked."""
        found = [self.truth.seen[engine.number] for engine in self.engines(list(self.members))]
        return None if None in found else {of(rank) for status in found if status is not None for rank in status.ranks}

    def instances(self) -> dict[int, str]:
        """The instance of each engine, by number; "" if it could not be examined."""
        return {n: status.instance if status is not None else "" for n, status in self.truth.seen.items()}

    @staticmethod
    def interrupted_or_meddled(meanwhile: Sequence[Meanwhile]) -> bool:
        """Whether another trainer pushed during the call, or an engine was killed."""
        return any(what in ("second sender", "kill engine") for what, _ in meanwhile)

    def beside(self, one: Meanwhile) -> None:
        """Let another sender push in the middle of a call."""
        if one[0] == "second sender":
            engine = self.engines([one[1]])[0]
            self.truth.forget([engine])
            label = self.label(3)
            with contextlib.suppress(WeightSyncError), Sender([engine.url], timeout_s=self.world.times / 2) as other:
                other.push(self.world.weights.mapping(3), version=label)

    def kept(self, error: WeightSyncError) -> None:
        """Update ``holds`` after an error: a transfer that breaks invalidates the sender's memory."""
        if not isinstance(error, (LeaseHeld, ApplyFailed)) or "unknown" in error.engines.values():
            self.holds = ""

    def pushed_by(
        self,
        pusher: Pusher,
        numbers: Sequence[int],
        holds: int,
        content: int | None,
        options: dict[str, Any],
        faults: Sequence[Fault | None],
        meanwhile: list[Meanwhile],
        end: End | None,
        then: int | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """A push by other processes; if all live, they push ``then`` at once, and close their senders.

        They are on ``hosts`` of these names, one for each; by default all are on the engines' host.
        """
        pusher.start(self.world.weights, self.world.shared)
        engines, options = self.engines(numbers), self.timed(options)
        order = {"urls": [engine.url for engine in engines], "options": options}
        limit_s = 2 * options["timeout_s"] + OTHERS_S
        if (end is not None and end.fault.action == "stop") or any(what == "freeze pusher" for what, _ in meanwhile):
            limit_s += CLOSE_S + OTHERS_S  # it ends after the others
        if end is not None:
            pusher.ranks[end.rank].order(end.fault)
        push = partial(pusher.push, hosts or [""] * len(pusher.ranks), content=content, **order)
        go_on = self.pushed_once_by(pusher, engines, limit_s, push, holds, faults, meanwhile)
        if end is not None:
            if pusher.ranks[end.rank].happened():
                self.tally.outcomes[f"{end.fault.point}: {end.fault.action}"] += 1
            pusher.ranks[end.rank].cancel()
        if go_on and then is not None:
            self.truth.check()
            again = partial(pusher.push, content=then)
            self.pushed_once_by(pusher, engines, options["timeout_s"] + OTHERS_S, again, then)
        self.play.call(f"close by {len(pusher.ranks)}", CLOSE_S + OTHERS_S, pusher.close)

    def pushed_once_by(
        self,
        pusher: Pusher,
        engines: Sequence[Engine],
        limit_s: float,
        push: Callable[..., dict[int, dict]],
        holds: int,
        faults: Sequence[Fault | None] = (),
        meanwhile: Sequence[Meanwhile] = (),
    ) -> bool:
        """One push by other processes. Whether all have lived, and have a sender."""
        label, before, size = self.label(holds), dict(self.truth.seen), len(pusher.ranks)
        self.truth.forget(engines)

        def others(one: Meanwhile) -> None:
            pusher.children[one[1] % size].send(signal.SIGKILL if one[0] == "kill pusher" else signal.SIGSTOP)

        said = self.play.call(
            f"push by {size}",
            limit_s,
            lambda: push(timeout_s=limit_s + PATIENCE_S, label=label),
            engines=engines,
            faults=[faults[engine.number] for engine in engines] if faults else (),
            meanwhile=meanwhile,
            others=others,
        ).result
        pusher.go_on()  # one may have been frozen as late as when its push had ended
        # A sender that could not be built may have asked no engine: of a dirty one it says, too, that it is unchanged.
        clean = {
            number: None if seen is not None and seen.state == "dirty" else seen for number, seen in before.items()
        }
        for rank in range(size):
            one = said.get(rank, {"error": "ended", "message": "", "engines": {}, "has_sender": False})
            self.tally.outcomes[f"push by {rank} of {size}: {one['error'] or 'ok'}"] += 1
            why = f"{label} of rank {rank} of {size}: {one['message']}"
            self.truth.told(one["engines"], label, before if one["has_sender"] else clean, why)
        if len(said) < size:
            pusher.kill()
        return len(said) == size and all(one["has_sender"] for one in said.values())

    def truth_of_shared(self) -> int:
        """The content of the learner's parameters."""
        return next(
            c
            for c in range(CONTENTS)
            if all(one.equal(self.world.shared[name]) for name, one in self.world.weights.mapping(c).items())
        )

    def ended(self) -> None:
        for engine in self.world.engines:
            engine.go_on()
        self.closed()
        self.play.restart([engine for engine in self.world.engines if not engine.alive()])
        self.truth.check()
        label = self.label(1)
        with contextlib.ExitStack() as stack:
            try:
                fresh = stack.enter_context(Sender([e.url for e in self.world.engines], timeout_s=PATIENCE_S))
                fresh.push(self.world.weights.mapping(1), version=label)
            except WeightSyncError as error:
                raise NotPushable(f"a fresh sender cannot push: {error}") from error
        self.truth.told({e.url: "committed" for e in self.world.engines}, label, self.truth.seen, "a fresh sender")
        self.truth.check()
        truth.check_nothing_left(self.world, self.before)


def _text(error: WeightSyncError) -> str:
    return f"{type(error).__name__}({error}) {error.engines}"
