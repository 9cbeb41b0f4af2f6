"""The state machines, as tables: which events are legal in a state, and which state each leads to.

Drivers act and report what happened as an event; the tables decide the state. Every engine rank (`receiver.Receiver`)
and the engine's front end (`front_end.FrontEnd`) follow `ENGINE`, the sender `PUSH`, a rank's loading
(`loading.loader.Loading`) `PLAN`, and SGLang's schedulers `TOGETHER`. Nothing here does I/O, so tests can walk every
edge and explore the messages between senders and engines.

Three things have no table, because one would not make them clearer:

- A rank has two slots for kept versions (`keep_previous`): the served version and the one before. Each slot is emptied
  on its own when its memory is reused, so each of the four combinations can follow any other. A commit or a rollback
  needs a filled slot, and the slot itself tells whether it is filled.
- Whether a user has paused the engine (`compat_pause` of both engines) is one flag, independent of the push.
- Whether a loader gets its own copy of the tensors is a flag that is set once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Generic, Literal, TypeVar

from weightsync.errors import WrongState
from weightsync.protocol.http import State

Table = Mapping[str, Mapping[str, str]]
PlanState = Literal["unrecorded", "untried", "trusted", "loader_alone"]
TogetherState = Literal["serving", "applying", "dirty", "dirty_applying"]

#: An engine, or one rank of it. In a ``dirty`` state the weights are of no version, and the engine does not generate.
#: Events: ``prepare`` a push was announced and its manifest fits · ``staged`` all bytes have arrived and are verified
#: (or, for a streamed push, the rank is connected to the sender) · ``abort`` the push was cancelled, failed or expired
#: · ``commit`` loading begins · ``rollback`` loading of a kept version begins · ``applied`` the loaded version is
#: served · ``untouched`` loading failed before the first write · ``broken`` loading failed after it.
ENGINE: Final[Mapping[State, Mapping[str, State]]] = {
    "serving": {"prepare": "receiving", "rollback": "applying"},
    "receiving": {"staged": "prepared", "abort": "serving"},
    "prepared": {"commit": "applying", "abort": "serving"},
    "applying": {"applied": "serving", "untouched": "serving", "broken": "dirty"},
    "dirty": {"prepare": "dirty_receiving", "rollback": "dirty_applying"},
    "dirty_receiving": {"staged": "dirty_prepared", "abort": "dirty"},
    "dirty_prepared": {"commit": "dirty_applying", "abort": "dirty"},
    "dirty_applying": {"applied": "serving", "untouched": "dirty", "broken": "dirty"},
    "unsynced": {"prepare": "dirty_receiving"},
}

#: A sender. Events: ``push`` · ``rollback`` · ``accepted`` every engine accepted the manifest · ``refused`` an engine
#: refused it or cannot be reached · ``staged`` every rank has all bytes, verified · ``lost`` the transfer failed, or
#: was a rehearsal · ``stream`` every engine is asked to commit while the bytes travel · ``committed`` every engine has
#: committed · ``failed`` an engine has not · ``aborted`` the engines were told to drop the push · ``interrupted`` the
#: sender's thread was interrupted (Ctrl-C) before it could tell them, so they drop it by their own deadlines ·
#: ``close``.
PUSH: Final[Table] = {
    "idle": {"push": "preparing", "rollback": "committing", "close": "closed"},
    "preparing": {"accepted": "transferring", "stream": "streaming", "refused": "aborting", "interrupted": "idle"},
    "transferring": {"staged": "committing", "lost": "aborting", "interrupted": "idle"},
    "committing": {"committed": "idle", "failed": "aborting", "interrupted": "idle"},
    "streaming": {"committed": "idle", "failed": "aborting", "interrupted": "idle"},
    "aborting": {"aborted": "idle", "interrupted": "idle"},
    "closed": {},
}

#: A rank's load plan, and whether it is trusted. Events: ``record`` the loader is about to be recorded, for the first
#: time or again · ``recorded`` there is a plan · ``sealed`` there is none, only the loader can load · ``matched`` after
#: a load by the loader every parameter is as the plan would have left it · ``replay`` the plan has loaded a push ·
#: ``differed`` what the plan did, or would have done, differs from what the loader does.
PLAN: Final[Mapping[PlanState, Mapping[str, PlanState]]] = {
    "unrecorded": {"record": "unrecorded", "recorded": "untried", "sealed": "loader_alone"},
    "untried": {"record": "unrecorded", "matched": "trusted", "differed": "loader_alone"},
    "trusted": {"record": "unrecorded", "replay": "trusted", "differed": "loader_alone"},
    "loader_alone": {"record": "unrecorded"},
}

#: The state that SGLang's ranks of one group share. They load together, so ``applied`` of one rank in `ENGINE` does
#: not mean that all have applied. Several groups take each event together, step by step. Events: ``load`` all have
#: stopped, and begin to load · ``applied`` all have loaded and dropped their caches · ``untouched`` some failed, and
#: all still hold what they held before · ``broken`` some do not.
TOGETHER: Final[Mapping[TogetherState, Mapping[str, TogetherState]]] = {
    "serving": {"load": "applying"},
    "applying": {"applied": "serving", "untouched": "serving", "broken": "dirty"},
    "dirty": {"load": "dirty_applying"},
    "dirty_applying": {"applied": "serving", "untouched": "dirty", "broken": "dirty"},
}

#: Every state of `ENGINE`, from harmless to worst: an engine is in the worst state of its ranks.
WORST_LAST: Final[tuple[State, ...]] = (
    "serving",
    "receiving",
    "prepared",
    "applying",
    "unsynced",
    "dirty_receiving",
    "dirty_prepared",
    "dirty_applying",
    "dirty",
)

S = TypeVar("S", bound=str)


class Machine(Generic[S]):
    """One state machine: a table and its current ``state``. ``subject`` is its name in error messages.

    ``moved`` is called with the states before and after every event.
    """

    def __init__(
        self,
        table: Mapping[S, Mapping[str, S]],
        state: S,
        subject: str,
        moved: Callable[[S, S], None] = lambda before, after: None,
    ):
        self._table, self.state, self._subject, self._moved = table, state, subject, moved
        #: When the state was entered, by `time.monotonic`.
        self.since = time.monotonic()

    def allows(self, event: str) -> bool:
        """Whether the event is legal now."""
        return event in self._table[self.state]

    def check(self, event: str) -> S:
        """The state that ``event`` would lead to. Raises `WrongState` if it is not legal now. Changes nothing."""
        legal = self._table[self.state]
        if event not in legal:
            raise WrongState(
                f"{self._subject} is {self.state}: {event} is not possible now"
                + (f", only {' or '.join(sorted(legal))}" if legal else "")
            )
        return legal[event]

    def move(self, event: str) -> S:
        """Apply the event and return the new state. Raises `WrongState` if it is not legal now."""
        before, self.state, self.since = self.state, self.check(event), time.monotonic()
        self._moved(before, self.state)
        return self.state


def is_stopped(state: State) -> bool:
    """Whether an engine in this state must not generate until a push commits."""
    return state.startswith("dirty") or state == "unsynced"


def diagram(table: Table) -> str:
    """The table as the text of a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for state, edges in table.items():
        by_target: dict[str, list[str]] = {}
        for event, target in edges.items():
            by_target.setdefault(target, []).append(event)
        lines += [f"    {state} --> {target}: {', '.join(events)}" for target, events in by_target.items()]
    return "\n".join(lines)
