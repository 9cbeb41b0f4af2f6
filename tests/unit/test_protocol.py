"""The two tables explored together: the contract holds in every reachable state."""

import functools

import pytest

from tests.unit.explorer import explore
from tests.unit.protocol_model import ALL, FAULT, MIXED, NOBODY, NOTHING, RESTING, Model, Trainer, World
from weightsync.protocol.states import ENGINE, PUSH

MODELS = {
    "one trainer, any faults": Model(),
    "streamed": Model(stream=True),
    "restarts, kept versions, an engine that waits": Model(restarts=1, keep=True, unsynced=True, faults=3),
    "rollbacks": Model(keep=True, rollbacks=2, faults=3),
    "two trainers, one may crash": Model(trainers=2, crashes=1, restarts=1, faults=2),
}


def generates(model, engine):
    if model.wrong == "a dirty engine generates" and engine.state == "dirty":
        return True
    return not engine.state.startswith("dirty") and engine.state not in ("unsynced", "applying")


def violation(model, world):
    """The breach of the contract in this world; empty if there is none."""
    for e, engine in enumerate(world.engines):
        if generates(model, engine):
            if engine.weights == MIXED:
                return f"engine {e} generates with mixed weights"
            if engine.label != engine.weights:
                return f"engine {e} generates with weights {engine.weights} and says {engine.label}"
        elif engine.state.endswith("applying"):
            if world.ready[engine.push - 1] != ALL:
                return f"engine {e} commits push {engine.push}, which not every engine has prepared"
            if engine.lease != engine.of:
                return f"engine {e} commits for trainer {engine.of}, and trainer {engine.lease} holds the lease"
    for t, trainer in enumerate(world.trainers):
        if trainer.state in ("idle", "closed"):
            for e, engine in enumerate(world.engines):
                if not is_true(trainer, engine, e):
                    return f"trainer {t} was told {trainer.told[e]} of engine {e}: {engine}"
    return ""


def is_true(trainer, engine, e):
    """Whether the report to the user is true, unless the engine was restarted or taken over since."""
    told, before, held = trainer.told[e], trainer.before[e], trainer.before[e] != NOTHING
    dirty = engine.state.startswith("dirty")
    if told == "unchanged":
        same = engine.weights == before or (before == MIXED and dirty) or not held
        return same and engine.committed != trainer.push
    if told == "committed" and held:
        return engine.weights == engine.label == trainer.version and not dirty
    return dirty or told != "dirty" or not held


def rests(world):
    """Whether no trainer and no engine is in the middle of a step."""
    return all(trainer.state in RESTING for trainer in world.trainers) and all(
        engine.state in ("serving", "dirty", "unsynced") for engine in world.engines
    )


def go_round(fair):
    """Whether fair steps alone can continue for ever."""
    into = [0] * len(fair)
    for targets in fair:
        for target in targets:
            into[target] += 1
    free = [number for number, count in enumerate(into) if count == 0]
    for number in free:  # grows as it goes
        for target in fair[number]:
            into[target] -= 1
            if into[target] == 0:
                free.append(target)
    return len(free) != len(fair)


@functools.cache
def can_push(model, engines):
    """Whether a trainer, perhaps a new one, can make these engines serve a new version if no fault happens."""
    free = tuple(engine._replace(lease=NOBODY, lapsed=False, committed=0) for engine in engines)
    once = Model(pushes=3, keep=model.keep, stream=model.stream)
    todo = [World(free, (Trainer(),), started=2, ready=(0, 0, 0), back=(0, 0, 0))]
    seen = set(todo)
    while todo:
        at = todo.pop()
        if at.trainers[0].state == "idle" and at.trainers[0].told == ("committed",) * 2:
            return all(engine.state == "serving" and engine.weights == engine.label == 3 for engine in at.engines)
        steps = [after for kind, _, after in once.steps(at) if kind != FAULT and after not in seen]
        seen.update(steps)
        todo += steps
    return False


@pytest.mark.parametrize("name", MODELS)
def test_the_contract_holds_in_every_reachable_state_and_a_push_can_succeed(name, capsys):
    model = MODELS[name]
    found = explore(model, violation)
    with capsys.disabled():
        print(f"\n{name}: {len(found.worlds)} states, {found.transitions} transitions, ", end="")
    assert found.fault == "", found.trace
    # Fair steps end, and where they end everybody is at rest and a push can succeed.
    assert not go_round(found.fair)
    ends = [world for world, targets in zip(found.worlds, found.fair, strict=True) if not targets]
    with capsys.disabled():
        print(f"{len(ends)} of them at rest ", end="")
    assert [world for world in ends if not rests(world) or world.net] == []
    assert [world for world in ends if not can_push(model, world.engines)] == []
    assert any(engine.state == "dirty" for world in ends for engine in world.engines)


def test_the_exploration_takes_every_edge_of_both_tables():
    moves = set()
    one = {"pushes": 1, "crashes": 1}
    back = Model(keep=True, rollbacks=2, faults=2)
    for model in (Model(**one), Model(stream=True, **one), Model(faults=2, unsynced=True), back):
        moves |= explore(model, violation).moves
    for table in (ENGINE, PUSH):
        assert {(state, to) for state, edges in table.items() for to in edges.values()} <= moves


@pytest.mark.parametrize(
    ("wrong", "model", "said", "ending"),
    [
        ("a dirty engine generates", {}, "generates with mixed weights", "fails while it writes 1"),
        ("the label before the weights", {}, "generates with weights 0 and says 1", "fails before it writes 1"),
        ("a commit before all have prepared", {}, "which not every engine has prepared", "gets commit 1"),
        ("a commit without the lease", {"trainers": 2, "faults": 2}, "trainer 1 holds the lease", "gets commit 1"),
        (
            "a rollback under the old label",
            {"keep": True, "rollbacks": 1, "faults": 0},
            "generates with weights 1 and says 2",
            "has applied 3",
        ),
        ("a look without an abort", {"faults": 2}, "was told unchanged of engine", "writes 1"),
        (
            "a rollback that is left to arrive",
            {"keep": True, "rollbacks": 2, "faults": 3},
            "was told unchanged of engine",
            "done with 4",
        ),
        ("an error of the stream that hides commits", {"stream": True, "faults": 2}, "was told unchanged", "done with"),
    ],
)
def test_a_deliberately_broken_rule_is_detected(wrong, model, said, ending, capsys):
    found = explore(Model(wrong=wrong, **model), violation)
    with capsys.disabled():
        print(f"\n{wrong}: {found.fault}", *found.trace, sep="\n    ")
    assert said in found.fault
    assert ending in found.trace[-1]
    assert len(found.trace) < 45
