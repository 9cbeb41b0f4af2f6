"""Whether a push sends what has changed in place of everything, to engines on other hosts.

What has changed is found by comparing with the version before, as it crossed, which a second arena holds. That takes
time, of the trainer and of the ranks, and pays if the link would take longer for the rest. How fast a link is, and how
long all the rest takes, is what the pushes before have taken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from msgspec import UNSET

from weightsync.protocol import http
from weightsync.protocol.deltas import DELTA_MINOR, DeltaSpec, Index, pack_index
from weightsync.tensors import changes
from weightsync.tensors.layout import Layout, align
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.buckets import Choice, parts_of
from weightsync.trainer.engines import Engines
from weightsync.trainer.outgoing import Changes, Outgoing
from weightsync.trainer.packing import hash_stream
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry

Delta = Literal["auto", "never"]

#: Seconds: a push that takes less is not worth the trouble.
_LEAST_S: Final = 0.1
#: Seconds that a byte of the version takes to be compared, applied and verified, until that was measured.
_OWN_S: Final = 1e-9
#: The weight of the last push in a mean.
_LAST: Final = 0.5
#: What a measure of changes is multiplied by with each push without them: after a slow moment they are tried again.
_FADES: Final = 0.98


@dataclass
class _Measured:
    """What pushes to some engines have taken, in seconds for each byte of the version, each a mean that forgets.

    ``dense`` is all of a transfer of everything, ``own`` what one of changes takes beside its share of that. None if
    it was never measured.
    """

    dense: float | None = None
    own: float | None = None


class Deltas:
    """The changes that one sender sends, or does not."""

    def __init__(self, engines: Engines, asked: Delta):
        self._engines, self._asked = engines, asked
        #: By the URLs of the engines on other hosts.
        self._measured: dict[frozenset[str], _Measured] = {}

    @property
    def _far(self) -> frozenset[str]:
        return frozenset(
            url for url, engine in self._engines.by_url.items() if not registry.spec(engine.transport).local
        )

    def are_possible(self, layout: Layout, choice: Choice, *, keep: bool) -> bool:
        """Whether pushes that are verified can be sent as changes, so that a second arena is of use. ``keep``: the
        engines keep the version before."""
        far = [self._engines.by_url[url] for url in self._far]
        return (
            self._asked == "auto"
            and bool(far and not layout.table)
            and choice.staging != "none"
            and choice.slots * choice.bucket_bytes >= layout.nbytes
            and all(engine.hello.protocol >= (http.PROTOCOL[0], DELTA_MINOR) for engine in far)
            and all(rank.device == "cpu" for engine in far for rank in engine.hello.ranks)
            # Engines of this host keep the version before the last in the arena that would be written early.
            and not (keep and len(far) < len(self._engines.by_url))
        )

    def why_not(self, outgoing: Outgoing) -> str:
        """Why everything is sent; empty if it is worth looking for what has changed."""
        base, measured = outgoing.base, self._measured.get(self._far, _Measured())
        if base is None:
            return "no version before is there as it crossed"
        without = [url for url in sorted(self._far) if self._engines.by_url[url].content != base.content]
        if without:
            return f"{', '.join(without)} got no version from this sender before, or another"
        return self._against(measured, outgoing.layout.nbytes, 0.0)

    def _against(self, measured: _Measured, nbytes: int, share: float) -> str:
        """Why changes that take this share of the version do not pay; empty if they do."""
        own = _OWN_S if measured.own is None else measured.own
        all_s = nbytes * (measured.dense or 0.0)
        saved_s, costs_s = all_s * (1 - share), nbytes * own
        if all_s < _LEAST_S or saved_s <= costs_s:
            return f"it takes {all_s:.2f} s, and changes would save {saved_s:.2f} s of the link for {costs_s:.2f} s"
        return ""

    def find(self, outgoing: Outgoing, transfer: Transfer) -> str:
        """Compare the version in the arena with the one before, and have the changes sent if that pays.

        Returns why not; empty if it does.
        """
        start, base = time.perf_counter(), outgoing.base
        assert base is not None, "there is a version before"
        layout, old, new = outgoing.layout, base.memory, outgoing.memory
        measured = self._measured.get(self._far, _Measured())
        share = changes.expected(layout, old, new)
        if why := self._against(measured, layout.nbytes, share):
            return why
        found = changes.find(layout, old, new)
        if found is None:
            return "too much has changed"
        outgoing.hash_rest()
        made = made_of(found, outgoing, transfer)
        outgoing.changes = made._replace(find_s=time.perf_counter() - start)
        return ""

    def took(self, outgoing: Outgoing, copied_s: float, transfer_s: float) -> None:
        """Note what a push took: to copy the version first, if it was, and to transfer it."""
        nbytes = outgoing.layout.nbytes
        if not nbytes or not self._far or outgoing.plan.adapter is not UNSET:
            return
        measured = self._measured.setdefault(self._far, _Measured())
        if outgoing.changes is None:
            measured.dense = _mean(measured.dense, (copied_s + transfer_s) / nbytes)
            measured.own = None if measured.own is None else measured.own * _FADES
        else:
            link_s = outgoing.changes.layout.nbytes * (measured.dense or 0.0)
            own_s = max(0.0, copied_s + outgoing.changes.find_s + transfer_s - link_s)
            measured.own = _mean(measured.own, own_s / nbytes)


def _mean(before: float | None, last: float) -> float:
    return last if before is None else (1 - _LAST) * before + _LAST * last


def made_of(found: Sequence[changes.Change], outgoing: Outgoing, transfer: Transfer) -> Changes:
    """The stream of what has changed since the base of a push, in an arena of its own; ``find_s`` is still 0."""
    base, layout = outgoing.base, outgoing.layout
    assert base is not None, "there is a version before"
    nbytes = sum(one.nbytes for one in found)
    digests = {name: tuple(one.get(name, ()) for one in outgoing.announced) for name in base.demand.names}
    index = pack_index(Index(tuple(one.described for one in found), digests))
    bucket_bytes = parts_of(len(index) + nbytes)
    slots = max(1, -(-(align(len(index)) + align(nbytes)) // bucket_bytes))
    spec = DeltaSpec(base.content, len(index), nbytes, bucket_bytes, slots)
    stream = changes.layout_of(spec)
    arena = transfer.arena_of_changes(slots * bucket_bytes, layout.nbytes)
    changes.write(index, found, stream, arena.bytes)
    wanted = Wanted([Subset(stream, {})])
    hashed = hash_stream(stream, arena.bytes, outgoing.plan.digest, wanted)
    announced = wanted.by_bucket(stream, bucket_bytes, hashed)
    whole = sum(one.described.whole for one in found)
    return Changes(spec, stream, arena, announced, len(found) - whole, whole, 0.0)
