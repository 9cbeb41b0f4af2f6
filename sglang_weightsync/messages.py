"""The typed request that reaches every scheduler rank. Imports SGLang."""

from __future__ import annotations

# msgspec reads the annotations at run time: SGLang decodes these structs by name.
from typing import TYPE_CHECKING, Final, List  # noqa: UP035

import msgspec

if TYPE_CHECKING:
    from msgspec import Struct as BaseReq  # which SGLang's derives from; types are checked where SGLang is not
else:
    from sglang.srt.managers.io_struct import BaseReq


#: Methods of a commit into several groups of ranks (``--dp-size``, ``--pp-size``), or behind several tokenizer workers,
#: step by step: stop; load what was prepared; set the version, or go back to the one before; all still stopped; and the
#: end, by its event in `states.TOGETHER`.
HOLD: Final = "weightsync_hold"
LOAD: Final = "weightsync_load"
LABEL: Final = "weightsync_label"
UNDO: Final = "weightsync_undo"
ENDS: Final = {event: f"weightsync_{event}" for event in ("applied", "untouched", "broken")}

#: Asks each group whether requests have yet to finish.
IN_FLIGHT: Final = "weightsync_in_flight"


class WeightsyncReqInput(BaseReq, kw_only=True):
    """Run ``method`` of `weightsync.engine.rank_methods.handle` on every rank; the reply repeats ``call``.

    Pipeline stages after the first send their replies to ``reply_to``.
    """

    call: str
    method: str
    payload: bytes
    reply_to: str = ""


class WeightsyncReqOutput(BaseReq, kw_only=True):
    """The replies of all ranks of one group; ``pause_s`` and ``apply_s`` are seconds of a commit.

    ``restored``: the commit failed, and every rank has the previous version again. ``dirty``: it failed, and the ranks
    have stopped generating. ``asleep``: SGLang's tags of the memory that sleeps. ``in_flight`` replies to `IN_FLIGHT`.
    """

    call: str
    replies: List[bytes]  # noqa: UP006
    group: int = 0
    pause_s: float = 0.0
    apply_s: float = 0.0
    restored: bool = False
    dirty: bool = False
    asleep: List[str] = msgspec.field(default_factory=list)  # noqa: UP006
    in_flight: bool = False
