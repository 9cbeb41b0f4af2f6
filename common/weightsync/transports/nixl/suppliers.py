"""Which rank passes the buckets of a push on to which, so that a trainer's link does not carry a copy for each.

Ranks that need the same and are written to form a chain, in order of their hosts: the trainer writes to the first, and
each passes on what it has verified. More ranks than a push has buckets form a tree. A rank that falls behind its
supplier has lost the way to it, or is stuck itself: it gets another supplier, and what it was to supply goes around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final, NamedTuple

from weightsync.transports.base import Peer

#: Fewer buckets are not passed on: nothing would be gained.
MIN_BUCKETS: Final = 4
#: Seconds, and times that of the slowest bucket so far, after which a rank that lacks what its supplier has is stuck.
_STUCK_S: Final = 3.0
_STUCK_TIMES: Final = 4.0
#: No longer than this share of the push's time limit: with `MIN_BUCKETS` as slow as that, the push would fail anyway.
_STUCK_SHARE: Final = 1 / MIN_BUCKETS


class Change(NamedTuple):
    """``receiver`` no longer gets its buckets from ``old``, but from ``new``; None is the trainer.

    If both are the same rank, nobody else has them: it tries again to reach the receiver.
    """

    receiver: Peer
    old: Peer | None
    new: Peer | None


def chains(members: Iterable[tuple[str, str, Peer]], buckets: int, hosts: int = 1) -> dict[Peer, Peer]:
    """The supplier of each rank that has one: ``members`` are what a rank needs, by name, its host, and itself.

    A trainer on several ``hosts`` writes to as many ranks as it has hosts, since each sends them a part.
    """
    found: dict[Peer, Peer] = {}
    by_need: dict[str, list[Peer]] = {}
    for need, _, peer in sorted(members):
        by_need.setdefault(need, []).append(peer)
    for peers in by_need.values() if buckets >= MIN_BUCKETS else ():
        length = -(-len(peers) // hosts)
        copies = 1 if length <= buckets else 2
        for first in range(0, len(peers), length):
            those = peers[first : first + length]
            found.update({peer: those[(number - 1) // copies] for number, peer in enumerate(those) if number})
    return found


class Suppliers:
    """The suppliers during a push that may take ``limit_s``.

    ``whole``: the trainer's arena holds everything, so that it can supply any rank.
    """

    def __init__(self, suppliers: Mapping[Peer, Peer], whole: bool, limit_s: float, now: float):
        members = dict.fromkeys((*suppliers.values(), *suppliers))
        #: By member; None is the trainer.
        self.of: dict[Peer, Peer | None] = {peer: suppliers.get(peer) for peer in members}
        self._whole = whole
        self._most_s = limit_s * _STUCK_SHARE
        #: When each was last seen to be level with its supplier or to take a bucket, and what it had then.
        self._level = dict.fromkeys(members, now)
        self._had = dict.fromkeys(members, -1)
        self._slowest_s = 0.0
        self._stuck: set[Peer] = set()

    def supplied_by(self, supplier: Peer | None) -> list[Peer]:
        """The ranks that get their buckets from this one, or from the trainer."""
        return [peer for peer, found in self.of.items() if found == supplier]

    def changes(self, now: float, announced: int, taken: Callable[[Peer], int]) -> list[Change]:
        """Who gets another supplier, given the last bucket that was announced, and that each rank has ``taken``."""
        found: list[Change] = []
        limit = min(_STUCK_S + _STUCK_TIMES * self._slowest_s, self._most_s)
        for peer in self.of:
            supplier = self.of[peer]
            has, there = taken(peer), announced if supplier is None else taken(supplier)
            if has > self._had[peer]:
                self._slowest_s = max(self._slowest_s, now - self._level[peer])
                self._had[peer], self._level[peer] = has, now
                self._stuck.discard(peer)
            elif has >= there:
                self._level[peer] = now
            elif now - self._level[peer] > limit and peer not in self._stuck:
                changes = self._around(peer, taken)
                # At once, for another rank may be stuck too: each gets one other supplier, and time to hear from it.
                self.of.update({change.receiver: change.new for change in changes})
                self._level.update(dict.fromkeys((peer, *(change.receiver for change in changes)), now))
                found += changes
        return found

    def _around(self, peer: Peer, taken: Callable[[Peer], int]) -> list[Change]:
        supplier = self.of[peer]
        self._stuck.add(peer)
        asked = [(peer, supplier)] if supplier is not None else []
        asked += [(other, peer) for other in self.supplied_by(peer)]
        found = [Change(receiver, old, self._other(receiver, old, taken)) for receiver, old in asked]
        if any(change.receiver == peer and change.new == change.old for change in found):
            self._stuck.discard(peer)  # it is asked again, as long as it takes nothing
        return found

    def _other(self, receiver: Peer, old: Peer | None, taken: Callable[[Peer], int]) -> Peer | None:
        """Another supplier, if there is one: the trainer, or a rank that is ahead and does not depend on this one."""
        if self._whole:
            return None
        for peer in self.of:
            if peer not in (receiver, old) and peer not in self._stuck and taken(peer) >= taken(receiver):
                above: Peer | None = peer
                while above is not None and above != receiver:
                    above = self.of[above]
                if above is None:
                    return peer
        return old

    def late(self, missing: Set[Peer]) -> set[Peer]:
        """Of the ranks that lack a bucket, those whose supplier has it: the others wait for these."""
        return {peer for peer in missing if self.of.get(peer) not in missing}
