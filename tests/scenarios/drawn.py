"""The hypothesis strategies for the arguments of the rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import hypothesis.strategies as st

from tests.scenarios.pusher import RANKS
from tests.scenarios.suspect import Fault
from tests.scenarios.weights import CONTENTS

number = st.integers(0, 2)
content = st.integers(0, CONTENTS - 1)
#: For how many steps a process stays frozen or held.
still = st.integers(1, 4)


def _fault(last: int = 7) -> st.SearchStrategy[Fault]:
    places = st.sampled_from(
        [
            ("rank loads", (("tensor", last // 2),)),
            ("rank loads", (("tensor", 0),)),
            ("rank loads", (("tensor", last),)),
            ("rank stops", ()),
            ("rank takes", (("bucket", 0),)),
            ("rank prepares", ()),
        ]
    )
    return _at(places)


def _at(places: st.SearchStrategy[Any]) -> st.SearchStrategy[Fault]:
    actions = st.sampled_from(["hold", "raise", "stop", "kill"])
    return st.builds(lambda place, action, steps: Fault(place[0], action, place[1], steps), places, actions, still)


fault = st.one_of(st.none(), _fault())
#: One fault per engine; half of the draws have none.
faults = st.one_of(st.just((None, None, None)), st.tuples(fault, fault, fault))
_in_adapter = st.one_of(
    st.none(),
    _at(st.sampled_from([("rank serves adapter", ()), ("rank takes", (("bucket", 0),)), ("rank prepares", ())])),
)
#: The same for pushes and rollbacks of adapters.
adapter_faults = st.one_of(st.just((None, None, None)), st.tuples(_in_adapter, _in_adapter, _in_adapter))
#: What else happens during a call, and to which engine.
meanwhile = st.lists(
    st.tuples(st.sampled_from(["release", "interrupt", "abort", "kill engine", "second sender"]), number), max_size=2
)
#: The learner's next content, if it continues at once.
then = st.one_of(st.none(), content)


class Push(NamedTuple):
    """A push and its faults. ``then`` is the content with which the trainer continues at once, if it does.

    After a push that failed, the trainer pushes ``then`` to the engines that did not fail. ``adapter`` is that of an
    adapter that it pushes after a push that did not fail, if it does.
    """

    content: int
    faults: tuple[Fault | None, ...]
    meanwhile: list[tuple[str, int]]
    then: int | None
    adapter: int | None


pushes = st.builds(Push, content, faults, meanwhile, then, adapter=st.one_of(st.none(), content))
kinds = st.sampled_from(["mapping anew", "folder", "iterable"])
#: The same as ``meanwhile`` for a push of another process, which may be killed itself.
beside_others = st.lists(
    st.tuples(st.sampled_from(["kill pusher", "release", "abort", "kill engine"]), number), max_size=2
)
#: The same for a trainer of several ranks.
beside_ranks = st.lists(
    st.tuples(
        st.sampled_from(["kill pusher", "freeze pusher", "release", "abort", "kill engine"]),
        number,
    ),
    max_size=2,
)
_IN_RANK_0 = (
    ("trainer packs", (("number", 0),)),
    ("trainer asks", (("route", "commit"),)),
    ("trainer was answered", (("route", "commit"),)),
    ("trainer was answered", (("route", "open"),)),
)
_UNDER_WAY = ("bytes are under way", ())
#: For how many things another rank is asked at most, by what it was called for.
_ASKED = {"build a Sender": 2, "push": 6}
_IN_OTHERS = (
    *(
        (point, (("call", call), ("number", n)))
        for point in ("trainer rank begins", "trainer rank has done")
        for call, most in _ASKED.items()
        for n in range(most)
    ),
    _UNDER_WAY,
)


class End(NamedTuple):
    """What kills or stops one rank of a trainer in other processes."""

    rank: int
    fault: Fault


def _ends(ranks: st.SearchStrategy[int], places: Sequence[Any], actions: Sequence[str]) -> st.SearchStrategy[End]:
    faults = [Fault(point, action, where) for point, where in places for action in actions]
    return st.builds(End, ranks, st.sampled_from(faults))


def ends_of(size: int) -> st.SearchStrategy[End | None]:
    """What kills or stops a rank of a trainer of ``size``; half of the draws are nothing."""
    actions = ["kill", "stop"]
    others = _ends(st.integers(1, size - 1), _IN_OTHERS, actions)
    return st.one_of(st.none(), st.none(), _ends(st.just(0), (*_IN_RANK_0, _UNDER_WAY), actions), others)


#: What kills a trainer in one other process.
ends = st.one_of(st.none(), _ends(st.just(0), _IN_RANK_0, ["kill"]))
#: The hosts of a trainer's ranks, which are two; that of the engines has no name.
hosts = st.sampled_from([some for some in product(("", "second", "third"), repeat=RANKS) if len(set(some)) == 2])


def _options(
    transport: str, staging: str, verify: str, keep: bool, bucket: int | None, timeout_s: float, pause: str, delta: str
) -> dict[str, Any]:
    if staging == "none":
        keep, verify = False, "off" if verify == "off" else "digest"
    return {
        "transport": transport,
        "staging": staging,
        "verify": verify,
        "keep_previous": keep,
        "bucket_bytes": bucket,
        "timeout_s": timeout_s,
        "pause": pause,
        "delta": delta,
    }


def _drawn_options(*transports: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        _options,
        transport=st.sampled_from(transports),
        staging=st.sampled_from(["full", "full", "auto", "none"]),
        verify=st.sampled_from(["digest", "off", "deep"]),
        keep=st.booleans(),
        bucket=st.sampled_from([None, None, 1 << 16]),
        timeout_s=st.sampled_from([1.0, 0.7, 1.5]),
        pause=st.sampled_from(["retract", "abort", "wait"]),
        delta=st.sampled_from(["auto", "auto", "never"]),
    )


options = _drawn_options("auto", "auto", "ipc_zmq", "nccl", "nixl")
#: Those of a trainer on several hosts.
far_options = _drawn_options("auto", "nccl", "nixl")
PLAIN = _options("auto", "full", "digest", False, None, 1.0, "retract", "auto")
members = st.sampled_from([some for size in (3, 2, 1) for some in combinations(range(3), size)])
