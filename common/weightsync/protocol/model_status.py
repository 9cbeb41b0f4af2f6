"""What one rank knows of how pushes get into its part of the model: plain data, a part of `http.RankStatus`."""

from __future__ import annotations

import msgspec


class Comparison(msgspec.Struct, frozen=True):
    """What was compared with a load plan last, and in which push; ``fault`` is empty if it was the same."""

    what: str
    push: str = ""
    fault: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """What one rank's part of the model gets of the manifest that it accepted last, as far as its loader tells.

    ``parameters`` of which ``written`` are loaded as a whole; 0, if what the loader does could not be recorded.
    ``unwritten`` are a few names of the others, ``unread`` a few of the ``unread_tensors`` that this rank does not
    read. ``pushes`` have been loaded by the plan since it was recorded.
    """

    parameters: int = 0
    written: int = 0
    unwritten: tuple[str, ...] = ()
    unread_tensors: int = 0
    unread: tuple[str, ...] = ()
    pushes: int = 0
    compared: tuple[Comparison, ...] = ()
