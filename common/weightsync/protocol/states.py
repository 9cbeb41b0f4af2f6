"""The state machines, as tables: which event is legal in which state, and what it leads to.

Drivers act and report what happened as an event; the tables decide what state that is. `ENGINE` is obeyed by every
engine rank (`receiver.Receiver`) and by the engine's front end (`front_end.FrontEnd`), `PUSH` by the sender, `PLAN` by
what loads on a rank (`loading.loader.Loading`), `TOGETHER` by SGLang's schedulers. Nothing here does any I/O, so that
tests can walk every edge, and explore what passes between senders and engines.

Left out is what no table would say better:

- The versions that a rank keeps (`keep_previous`) are two places, for the one that is served and the one before. Each
  is emptied by itself, whenever its memory is another's again, so any of the four cases follows from any other but by
  a commit or a rollback; what those need is that a place is filled, and the place says so.
- What users have paused (`compat_pause` of both engines) is one flag beside the push, and any order sets it.
- Whether a loader is given memory of its own is a flag that is set once and stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Generic, Literal, TypeVar

from weightsync.errors import WrongState
from weightsync.protocol.http import State

Table = Mapping[str, Mapping[str, str]]
PlanState = Literal["unrecorded", "untried", "trusted", "loader_alone"]
TogetherState = Literal["serving", "applying", "dirty", "dirty_applying"]

#: A replica, or one rank of it. The ``dirty_`` states hold weights of neither version: the engine does not generate.
#: Events: ``prepare`` a push was announced and its manifest fits · ``staged`` everything is here and verified (or, to
#: be streamed, its sender is met) · ``abort`` it was called off, failed on the way, or expired · ``commit`` loading
#: begins · ``rollback`` so does that of a version that was kept · ``applied`` it is what is served · ``untouched``
#: loading failed before the first write · ``broken`` after it.
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

#: A sender. Events: ``push`` · ``rollback`` · ``accepted`` every engine took the manifest · ``refused`` one did not, or
#: cannot be reached · ``staged`` every rank has everything, verified · ``lost`` the transfer failed · ``stream`` every
#: engine is asked to commit while the bytes travel · ``committed`` every engine has · ``failed`` one has not ·
#: ``aborted`` the engines were told to forget it · ``interrupted`` the sender's own thread was (Ctrl-C), before it
#: could do so: they find out by themselves · ``close``.
PUSH: Final[Table] = {
    "idle": {"push": "preparing", "rollback": "committing", "close": "closed"},
    "preparing": {"accepted": "transferring", "stream": "streaming", "refused": "aborting", "interrupted": "idle"},
    "transferring": {"staged": "committing", "lost": "aborting", "interrupted": "idle"},
    "committing": {"committed": "idle", "failed": "aborting", "interrupted": "idle"},
    "streaming": {"committed": "idle", "failed": "aborting", "interrupted": "idle"},
    "aborting": {"aborted": "idle", "interrupted": "idle"},
    "closed": {},
}

#: A rank's load plan, and whether it is trusted. Events: ``record`` the loader is about to be recorded, first or anew ·
#: ``recorded`` there is a plan · ``sealed`` there is none, nobody can do the loader's work · ``alike`` a push that the
#: loader brought in lies where the plan would have put it · ``replay`` the plan has brought one in · ``astray`` what it
#: would have done, or did, is not what the loader does.
PLAN: Final[Mapping[PlanState, Mapping[str, PlanState]]] = {
    "unrecorded": {"record": "unrecorded", "recorded": "untried", "sealed": "loader_alone"},
    "untried": {"record": "unrecorded", "alike": "trusted", "astray": "loader_alone"},
    "trusted": {"record": "unrecorded", "replay": "trusted", "astray": "loader_alone"},
    "loader_alone": {"record": "unrecorded"},
}

#: Ranks that commit by themselves, and so have to be in one state: that one of them has applied, in the terms of
#: `ENGINE`, does not say that all have. Events: ``load`` all have stopped and begin · ``applied`` all have loaded, and
#: have dropped their caches · ``untouched`` some failed, and all hold what they did before · ``broken`` some do not.
TOGETHER: Final[Mapping[TogetherState, Mapping[str, TogetherState]]] = {
    "serving": {"load": "applying"},
    "applying": {"applied": "serving", "untouched": "serving", "broken": "dirty"},
    "dirty": {"load": "dirty_applying"},
    "dirty_applying": {"applied": "serving", "untouched": "dirty", "broken": "dirty"},
}

S = TypeVar("S", bound=str)


class Machine(Generic[S]):
    """Where one of the tables stands. ``who`` is what errors call it."""

    def __init__(self, table: Mapping[S, Mapping[str, S]], state: S, who: str):
        self._table, self.state, self._who = table, state, who

    def allows(self, event: str) -> bool:
        """Whether the event is legal now."""
        return event in self._table[self.state]

    def check(self, event: str) -> S:
        """The state that ``event`` would lead to. Raises `WrongState`, and nothing has happened."""
        legal = self._table[self.state]
        if event not in legal:
            raise WrongState(
                f"{self._who} is {self.state}: {event} is not possible now"
                + (f", only {' or '.join(sorted(legal))}" if legal else "")
            )
        return legal[event]

    def move(self, event: str) -> S:
        """Take the event; returns the new state. Raises as `check`."""
        self.state = self.check(event)
        return self.state


def is_stopped(state: State) -> bool:
    """Whether an engine in this state generates nothing."""
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
