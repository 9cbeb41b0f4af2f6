"""How pushes get into one rank's part of the model, as plain data: the field ``model`` of `http.RankStatus`."""

from __future__ import annotations

import msgspec


class Comparison(msgspec.Struct, frozen=True):
    """The last comparison of ``what`` with the load plan, in push ``push``; ``fault`` is empty if both agreed."""

    what: str
    push: str = ""
    fault: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """What the manifest that one rank accepted last loads into its part of the model.

    ``parameters`` is the number of its parameters and ``written`` how many of them are loaded in full; both are 0 if
    the loader could not be recorded. ``unwritten`` names a few of the other parameters, ``unread`` a few of the
    ``unread_tensors`` tensors that this rank does not read. ``pushes`` is how many pushes the load plan has loaded
    since it was recorded, ``compared`` what was last compared with it.
    """

    parameters: int = 0
    written: int = 0
    unwritten: tuple[str, ...] = ()
    unread_tensors: int = 0
    unread: tuple[str, ...] = ()
    pushes: int = 0
    compared: tuple[Comparison, ...] = ()
