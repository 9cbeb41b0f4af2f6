"""A small model checker: explores every joint state of trainers, engines and the messages between them."""

from collections.abc import Callable
from typing import NamedTuple

from tests.unit.protocol_model import ANY, FAIR, FAULT, Model, Words, World, ordered, pruned


class Explored(NamedTuple):
    """``fair``: targets of fair steps from each world; ``moves``: state changes; ``trace``: the steps to ``fault``."""

    worlds: list[World]
    transitions: int
    fair: list[list[int]]
    moves: set[tuple[str, str]]
    fault: str
    trace: list[str]


def explore(model: Model, check: Callable[[Model, World], str]) -> Explored:
    """Explore every world breadth first, mirror images once; stops at the first fault that ``check`` reports."""
    worlds = [model.first()]
    number, parents = {worlds[0]: 0}, [(0, ())]
    fair: list[list[int]] = []
    moves: set[tuple[str, str]] = set()
    transitions = 0
    for at, world in enumerate(worlds):  # grows as it goes
        fair.append([])
        for kind, what, after in model.steps(world):
            bounded = kind == FAULT and model.faults != ANY
            if bounded and world.faults == model.faults:
                continue
            transitions += 1
            reached = pruned(after._replace(faults=world.faults + 1) if bounded else after)
            reached = reached if model.wrong else ordered(reached)  # a trace must not swap the engines
            new = reached not in number
            if (new or after.trainers is not world.trainers) and (fault := check(model, after)):
                return Explored(worlds, transitions, fair, moves, fault, _trace(parents, at, what))
            if new:
                number[reached] = len(worlds)
                worlds.append(reached)
                parents.append((at, what))
                both = zip(world.engines + world.trainers, after.engines + after.trainers, strict=True)
                moves.update((old.state, new.state) for old, new in both)
            if kind == FAIR:
                fair[-1].append(number[reached])
    return Explored(worlds, transitions, fair, moves, "", [])


def _trace(parents: list[tuple[int, Words]], at: int, last: Words) -> list[str]:
    steps = [last]
    while at:
        at, what = parents[at]
        steps.append(what)
    return [" ".join(map(str, what)) for what in reversed(steps)]
