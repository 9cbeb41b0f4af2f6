"""The state machine: each rule is something that a trainer, an operator or chance may do at any time.

Neither the rules nor their strategies are derived from faults that were found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import invariant, rule

from tests.scenarios import drawn
from tests.scenarios.acting import CLOSE_S, Acting
from tests.scenarios.drawn import PLAIN, End, Push
from tests.scenarios.play import Meanwhile, Outcome, abort
from tests.scenarios.pusher import RANKS
from tests.scenarios.suspect import PATIENCE_S, Fault
from tests.scenarios.truth import NotCaughtUp, UntrueReport, Violation
from tests.scenarios.world import Engine
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.protocol.auth import sender_token
from weightsync.trainer.client import EngineClient


def step(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a step of the scenario, which does nothing once the run has ended."""

    def run(self: Scenario, **drawn: Any) -> None:
        if self.over():
            return
        self.play.step(function.__name__)
        self.made.append(f"{function.__name__}({', '.join(f'{name}={value!r}' for name, value in drawn.items())})")
        try:
            function(self, **drawn)
        except Violation as found:
            self.note(found)

    run.__name__ = function.__name__
    return run


class Scenario(Acting):
    """The rules of one sequence; see `Acting`."""

    # --- the sender

    @rule(numbers=drawn.members, options=drawn.options)
    @step
    def sender_is_built(self, numbers: Sequence[int], options: dict[str, Any]) -> None:
        self.closed()
        self.built(numbers, options)

    @rule(push=drawn.pushes)
    @step
    def push_module(self, push: Push) -> None:
        self.pushed(self.written(self.world.module), push)

    @rule(push=drawn.pushes)
    @step
    def push_mapping(self, push: Push) -> None:
        self.pushed(self.written(self.world.mapping), push)

    @rule(push=drawn.pushes)
    @step
    def push_shared(self, push: Push) -> None:
        self.pushed(self.written(self.world.shared), push)

    @rule(kind=drawn.kinds, push=drawn.pushes)
    @step
    def push_other(self, kind: str, push: Push) -> None:
        weights = self.world.weights
        makers = {"mapping anew": weights.copy, "folder": weights.folder, "iterable": weights.iterable}
        self.pushed(makers[kind], push)

    def pushed(self, model: Callable[[int], Any], push: Push) -> None:
        """Push with the current sender, then continue as ``push.then`` says."""
        if self.built() is None:
            return
        outcome = self.push_of(model, push.content, push.faults, push.meanwhile)
        if outcome.result is not None and push.adapter is not None:
            self.truth.check()
            self.adapted(push.adapter, (), ())
        if push.then is None:
            return
        if outcome.result is not None:
            model(push.then)
        elif trouble := self.in_trouble(outcome):
            for engine in trouble:
                self.removed(engine)
            self.push_of(model, push.then)

    def written(self, model: Any) -> Callable[[int], Any]:
        """Return a function that writes a content into ``model`` in place and returns it."""

        def of(content: int) -> Any:
            self.world.weights.write(model, content)
            return model

        return of

    def push_of(
        self,
        model: Callable[[int], Any],
        content: int,
        faults: Sequence[Fault | None] = (),
        meanwhile: Sequence[Meanwhile] = (),
    ) -> Outcome:
        """One push."""
        assert self.sender is not None
        label, self.holds = self.label(content), ""
        push = partial(self.sender.push, model(content), version=label)
        outcome = self.sent("push", push, label, faults=faults, meanwhile=meanwhile)
        result = outcome.result
        if result is not None and result.staging == "full" and self.keeps:
            self.holds = label if "where they are" not in result.staging_reason else ""
        return outcome

    def in_trouble(self, outcome: Outcome) -> list[Engine]:
        """The engines that a trainer would remove after this outcome; none if that would be all."""
        ours = self.engines(list(self.members))
        told = outcome.error.engines if outcome.error is not None else {}
        found = [e for e in ours if e.still or not e.alive() or told.get(e.url) in ("dirty", "unknown")]
        return found if len(found) < len(ours) else []

    @rule(faults=drawn.faults, meanwhile=drawn.meanwhile, kept=st.booleans())
    @step
    def rollback(self, faults: Sequence[Fault | None], meanwhile: list[Meanwhile], kept: bool) -> None:
        """Roll back; with ``kept``, after two pushes of a sender that keeps versions."""
        if kept and self.keeping is not self.sender:
            self.closed()
            if self.built(options={**PLAIN, "keep_previous": True}) is None:
                return
            self.keeping = self.sender
            for content in (1, 2):
                self.push_of(self.written(self.world.mapping), content)
            self.truth.check()
        if self.built() is None:
            return
        self.rolled_back(faults, meanwhile)

    @rule(content=drawn.content, faults=drawn.adapter_faults, meanwhile=drawn.meanwhile)
    @step
    def push_adapter(self, content: int, faults: Sequence[Fault | None], meanwhile: list[Meanwhile]) -> None:
        if self.built() is not None:
            self.adapted(content, faults, meanwhile)

    @rule(faults=drawn.adapter_faults)
    @step
    def rollback_adapter(self, faults: Sequence[Fault | None]) -> None:
        if self.built() is not None:
            self.adapter_rolled_back(faults)

    def rolled_back(self, faults: Sequence[Fault | None], meanwhile: list[Meanwhile]) -> None:
        """Roll back and check the report."""
        assert self.sender is not None
        kept = self.known(lambda rank: rank.previous)
        self.holds = ""
        outcome = self.sent("rollback", self.sender.rollback, "", faults=faults, meanwhile=meanwhile)
        if outcome.result is not None and not self.interrupted_or_meddled(meanwhile):
            if kept is not None and outcome.result.version not in kept:
                raise UntrueReport(f"rollback says {outcome.result.version!r}, and engines kept {kept}")
            told = dict.fromkeys(outcome.result.engines, "committed")
            self.truth.told(told, outcome.result.version, self.truth.seen, "rollback")

    @rule(number=drawn.number, fault=drawn.fault)
    @step
    def add_engine(self, number: int, fault: Fault | None) -> None:
        self.added(number, fault, lambda sender, url: sender.add_engine(url))

    @rule(number=drawn.number, fault=drawn.fault)
    @step
    def join(self, number: int, fault: Fault | None) -> None:
        def act(sender: Sender, url: str) -> object:
            self.address = self.address or sender.listen()
            trainer = EngineClient(self.address, sender_token())
            version = trainer.add_engine(url, Deadline(self.timeout_s + PATIENCE_S))
            return {url: version} if version else None

        self.added(number, fault, act)

    def added(self, number: int, fault: Fault | None, act: Callable[[Sender, str], Any]) -> None:
        """Add an engine and check what the call reports."""
        if (sender := self.built()) is None:
            return
        engine = self.engines([number])[0]
        known, label = engine.number in self.members, self.holds
        faults = [fault if other is engine else None for other in self.world.engines]
        others = [one for one in self.members if known]  # joining a known engine catches all engines up
        before = self.truth.seen[engine.number]
        outcome = self.sent(
            "add_engine",
            lambda: _result(act(sender, engine.url), engine),
            label,
            {engine.number, *others},
            faults=faults,
            lora=None,
        )
        if outcome.error is None and not known:
            self.members.setdefault(engine.number, "")
        if outcome.error is None and not outcome.interrupted and not known and label and not outcome.result:
            raise NotCaughtUp(f"{engine} was added without {label}, which the sender's memory holds")
        if outcome.error is not None and not known and before is not None:
            self.kept(outcome.error)

    @rule(number=drawn.number)
    @step
    def remove_engine(self, number: int) -> None:
        engine = self.engines([number])[0]
        if self.built() is not None and engine.number in self.members and len(self.members) > 1:
            self.removed(engine)

    def removed(self, engine: Engine) -> None:
        """Remove an engine from the sender."""
        assert self.sender is not None
        outcome = self.play.call("remove_engine", self.timeout_s, partial(self.sender.remove_engine, engine.url))
        if outcome.error is not None:
            raise UntrueReport(f"an engine cannot be removed: {outcome.error}")
        del self.members[engine.number]

    @rule(restarted=st.one_of(st.none(), drawn.number), faults=drawn.faults, again=st.booleans())
    @step
    def catch_up(self, restarted: int | None, faults: Sequence[Fault | None], again: bool) -> None:
        """Catch up, perhaps after a restart; with ``again``, once more if it failed."""
        if self.built() is None:
            return
        if restarted is not None and self.world.may_end(self.tally.steps):
            self.play.restart(self.engines([restarted]))
            self.truth.check()
        if self.caught_up(faults).error is not None and again:
            self.caught_up(())

    def caught_up(self, faults: Sequence[Fault | None]) -> Outcome:
        """Catch up and check that no engine is left behind that the sender's memory could serve."""
        assert self.sender is not None
        label, instances = self.holds, self.instances()
        behind = [n for n, served in self.members.items() if served and instances[n] not in ("", served)]
        outcome = self.sent("catch_up", self.sender.catch_up, label, faults=faults, lora=None)
        if outcome.error is not None:
            self.kept(outcome.error)
        elif label and (left := [n for n in behind if self.members[n] != instances[n]]):
            raise NotCaughtUp(f"catch_up returned, and left engines {left} without {label}, which others serve")
        return outcome

    @rule()
    @step
    def close(self) -> None:
        self.closed()

    # --- other trainers

    @rule(numbers=drawn.members, content=drawn.content, faults=drawn.faults)
    @step
    def second_sender(self, numbers: Sequence[int], content: int, faults: Sequence[Fault | None]) -> None:
        engines, label, limit_s = self.engines(numbers), self.label(content), self.world.times
        before = dict(self.truth.seen)
        self.truth.forget(engines)

        def act() -> object:
            with Sender([engine.url for engine in engines], timeout_s=limit_s) as other:
                return other.push(self.world.weights.mapping(content), version=label)

        some = [faults[engine.number] for engine in engines]
        outcome = self.play.call("second sender", 2 * limit_s + CLOSE_S, act, engines=engines, faults=some)
        told = outcome.error.engines if outcome.error else dict.fromkeys((e.url for e in engines), "committed")
        self.truth.told(told, label, before, f"a second sender's push of {label}")

    @rule(numbers=drawn.members, faults=drawn.faults, meanwhile=drawn.beside_others, end=drawn.ends, then=drawn.then)
    @step
    def other_process_pushes_shared(
        self,
        numbers: Sequence[int],
        faults: Sequence[Fault | None],
        meanwhile: list[Meanwhile],
        end: End | None,
        then: int | None,
    ) -> None:
        """Another process pushes the learner's parameters, which may change once the push has ended or failed."""
        now = self.truth_of_shared()
        self.pushed_by(self.world.pusher, numbers, now, None, PLAIN, faults, meanwhile, end)
        if then is not None:
            self.world.weights.write(self.world.shared, then)

    @rule(
        numbers=drawn.members,
        content=drawn.content,
        options=drawn.options,
        faults=drawn.faults,
        meanwhile=drawn.beside_ranks,
        end=drawn.ends_of(2),
        then=drawn.then,
    )
    @step
    def sharded_trainer_pushes(
        self,
        numbers: Sequence[int],
        content: int,
        options: dict[str, Any],
        faults: Sequence[Fault | None],
        meanwhile: list[Meanwhile],
        end: End | None,
        then: int | None,
    ) -> None:
        options = {**options, "staging": "full"}
        self.pushed_by(self.world.sharded, numbers, content, content, options, faults, meanwhile, end, then)

    @rule(
        hosts=drawn.hosts,
        numbers=drawn.members,
        content=drawn.content,
        options=drawn.far_options,
        faults=drawn.faults,
        meanwhile=drawn.beside_ranks,
        end=drawn.ends_of(RANKS),
        then=drawn.then,
    )
    @step
    def trainer_of_several_hosts_pushes(
        self,
        hosts: Sequence[str],
        numbers: Sequence[int],
        content: int,
        options: dict[str, Any],
        faults: Sequence[Fault | None],
        meanwhile: list[Meanwhile],
        end: End | None,
        then: int | None,
    ) -> None:
        options = {**options, "staging": "full"}
        self.pushed_by(self.world.spread, numbers, content, content, options, faults, meanwhile, end, then, hosts)

    @rule(content=drawn.content)
    @step
    def learner_goes_on(self, content: int) -> None:
        self.world.weights.write(self.world.shared, content)

    # --- engines

    @rule(number=drawn.number)
    @step
    def restart(self, number: int) -> None:
        if self.world.may_end(self.tally.steps):
            self.play.restart(self.engines([number]))

    @rule(number=drawn.number, steps=drawn.still)
    @step
    def freeze(self, number: int, steps: int) -> None:
        engine = self.engines([number])[0]
        if not engine.still:
            engine.freeze(steps)

    @rule()
    @step
    def all_go_on(self) -> None:
        for engine in self.world.engines:
            engine.go_on()

    @rule(number=drawn.number)
    @step
    def abort_by_hand(self, number: int) -> None:
        abort(self.engines([number])[0])

    # --- what must be so

    @invariant()
    def engines_serve_what_they_say(self) -> None:
        if self.over():
            return
        try:
            self.truth.check()
        except Violation as found:
            self.note(found)

    def teardown(self) -> None:
        """At the end nothing is left over and a new sender can push."""
        try:
            if not (self.failed or self.over()):
                self.ended()
        except Violation as found:
            self.note(found)
        finally:
            with contextlib.suppress(Violation):
                self.closed()


def _result(result: Any, engine: Engine) -> dict[str, Any]:
    """The result of adding an engine, in the form of `PushResult.engines`."""
    return result if isinstance(result, dict) else {engine.url: result} if result is not None else {}
