"""Whether the ranks of a trainer send what they hold together, or rank 0 alone sends all of it."""

from __future__ import annotations

from typing import Final

from weightsync.deadline import Deadline
from weightsync.sources import Source
from weightsync.sources.checkpoint import CheckpointSource
from weightsync.sources.drafted import parts_of
from weightsync.sources.weight_source import WeightSourceAdapter
from weightsync.trainer.ranks.assembly import CheckReplicas
from weightsync.trainer.ranks.assignment import Plan
from weightsync.trainer.ranks.coordinator import Coordinator

#: All ranks read the same files; the ranks of a `WeightSource` need not hold the same values.
_NOT_COMPARED: Final = (CheckpointSource, WeightSourceAdapter)


def together(
    ranks: Coordinator | None, source: Source, how: CheckReplicas, deadline: Deadline, *, again: bool = False
) -> Plan | None:
    """Which rank sends what of ``source``; None if this process sends all of it.

    What several ranks hold is compared as ``how`` says, but not ``again`` in the same call. Raises as
    `Coordinator.planned` and `Coordinator.compare`.
    """
    if ranks is None:
        return None
    split = ranks.planned(source)
    if not again and not any(isinstance(part, _NOT_COMPARED) for part in parts_of(source)):
        ranks.compare(source, how, deadline)
    # Every rank is needed to make the tensors of a `WeightSource`.
    suffices = not any(split.pieces[1:]) and split.manifest == source.specs
    return None if suffices and not any(isinstance(part, WeightSourceAdapter) for part in parts_of(source)) else split
