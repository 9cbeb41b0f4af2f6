"""The work on a standby, which is done in slices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import torch

from weightsync.engine.adapter import StandbyHooks
from weightsync.engine.exchange.copied import Copied
from weightsync.engine.exchange.pairs import Pairs, Rules, compared
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
) -> Made:
    """Load ``weights`` into ``model``, or make a second model of them; ``check`` may refuse it. In a thread of its own.

    Raises what the engine or ``check`` raises, and `Unlike`.
    """
    with arenas.selected(device):
        found = hooks.make(weights()) if model is None else model
        if model is not None:
            hooks.load(model, weights())
        check(found)
        paired = Copied if hooks.stays else Pairs
        pairs = compared(lambda: paired(hooks.model, found, hooks.rules))
        arenas.trim(device)  # loaders allocate and free as much as the model takes
        return found, pairs


def filled(
    plan: LoadPlan, rules: Rules, made: Planned | None, staged: Staged | None, arrived: Arriving | None
) -> Generator[None, None, Made]:
    """Fill what was ``made`` for ``plan``, or make it first, from ``staged``; without that only provide its memory.

    Raises as `Planned` and `Staged.check`.
    """
    planned = made or compared(lambda: Planned(plan, rules))
    if staged is None:
        yield from planned.touch()
    else:
        yield from planned.fill(staged.data, arrived)
        staged.check()
    return None, planned
