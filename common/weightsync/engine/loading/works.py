"""The work on a standby, which is done in slices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from weightsync.engine.adapter import StandbyHooks
from weightsync.engine.exchange.copied import Copied
from weightsync.engine.exchange.pairs import Pairs, Rules, Unlike, compared
from weightsync.engine.exchange.slices import Sliced, beside, stop, stop_if_over
from weightsync.engine.exchange.swap import Swap
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.planned import Arriving, Planned
from weightsync.engine.stage import Staged
from weightsync.memory import arenas

#: The second model, if the standby is one; and what is exchanged.
Made = tuple[torch.nn.Module | None, Swap]


def loaded(
    hooks: StandbyHooks,
    model: torch.nn.Module | None,
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    check: Callable[[torch.nn.Module], None],
    device: torch.device,
    together: AbstractContextManager[object],
) -> Made:
    """Load ``weights`` into ``model``, or make a second model of them; ``check`` may refuse it. In a thread of its own.

    ``together`` is the context of what the engine's loader asks of all ranks. Raises what the engine or ``check``
    raises, and `Unlike`.
    """
    with arenas.selected(device):
        with together:
            found = hooks.make(weights()) if model is None else model
            if model is not None:
                hooks.load(model, weights())
        check(found)
        paired = Copied if hooks.stays else Pairs
        pairs = compared(lambda: paired(hooks.model, found, hooks.rules))
        arenas.trim(device)  # loaders allocate and free as much as the model takes
        return found, pairs


def provided(plan: LoadPlan, rules: Rules, made: Planned | None) -> Sliced[Made]:
    """Work that makes what is filled by ``plan``, unless it is ``made``, and provides its memory. It raises as
    `Planned`."""

    def work() -> Made:
        planned = made or compared(lambda: Planned(plan, rules))
        planned.touch()
        return None, planned

    return Sliced(work)


def filled(
    plan: LoadPlan, rules: Rules, made: Planned | None, staged: Staged, arrived: Arriving | None
) -> Generator[None, None, Made]:
    """Fill what was ``made`` for ``plan``, or is made first, from a stage. Raises as `Planned` and `Staged.check`."""
    planned = made or compared(lambda: Planned(plan, rules))
    yield from planned.fill(staged.data, arrived)
    staged.check()
    return None, planned


def proving(
    plan: LoadPlan,
    rules: Rules,
    made: Planned | None,
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    weights: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    staged: Staged,
    check: Callable[[torch.nn.Module], None],
) -> Sliced[Made]:
    """Work that has the engine's own loader load ``staged``, as ``weights``, into what was ``made`` for ``plan``, or is
    made first. That is compared with what the plan would do.

    The work raises what the loader or ``check`` raises, `Unlike` for a difference, and as `Planned` and `Staged.check`.
    """
    begun: list[Planned] = []

    @contextmanager
    def turned() -> Iterator[None]:
        """Between two slices the engine serves what it did."""
        for planned in begun:
            planned.turn(True)
        try:
            yield
        finally:
            for planned in begun:
                planned.turn(False)

    def work() -> Made:
        planned = made or compared(lambda: Planned(plan, rules))
        of_standby = planned.plans[1]
        begun.append(planned)
        stop()  # until a slice begins, with the memory turned
        with torch.inference_mode(False), torch.no_grad():
            load(weights())
        check(plan.memory.model)
        with beside():
            name = of_standby.differs(staged.data, stop_if_over)
        if name:
            raise Unlike(f"{name} is not what was recorded: it is processed after loading")
        staged.check()
        return None, planned

    return Sliced(work, around=turned)
