"""The stream of a trainer on several hosts: each host's memory, a domain, holds a part of it in an arena of its own.

A cell is a box of a tensor that one domain holds. A domain's arena has its cells in the order of the stream, each
contiguous, at a multiple of `ALIGN_BYTES`. The stream, its buckets and the ranks' stages are the same as with one
domain; only where its bytes come from differs.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Final, NamedTuple

from weightsync.errors import ManifestMismatch
from weightsync.protocol.codec import to_json
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box, innermost, is_inside, joined, runs
from weightsync.tensors.layout import Cell, Layout, Table, align, cut_run
from weightsync.tensors.subset import Subset

#: Each run costs a little time in every engine rank: 2 microseconds to find, and 6 to copy in every push.
MOST_RUNS: Final = 1 << 20
_NOT_ONCE: Final = "the domains do not hold each element of it exactly once"


class Run(NamedTuple):
    """Bytes that are contiguous in the stream, from ``at`` on, and in the arena of their domain, from ``there`` on.

    Between two tensors they may include padding."""

    at: int
    there: int
    nbytes: int


class DividedLayout(Layout):
    """A `Layout` whose bytes lie in several domains, by ``table``. Raises `ManifestMismatch` as `Layout`, and unless
    the cells are every element of every tensor exactly once."""

    def __init__(self, manifest: Sequence[TensorSpec], table: Table):
        super().__init__(manifest)
        self.table = table
        self._cells: list[list[Cell]] = [[] for _ in self.entries]
        self._sizes: list[int] = []
        for domain, cells in enumerate(table):
            end = 0
            for number, (start, shape) in cells:
                box, entry = Box(start, shape), self.entries[number] if 0 <= number < len(self.entries) else None
                if len(start) != len(shape):
                    raise ManifestMismatch(f"domain {domain} holds a box from {list(start)} of shape {list(shape)}")
                if entry is None or 0 in shape or not is_inside(box, entry.spec.shape):
                    raise ManifestMismatch(f"domain {domain} holds {box} of tensor {number}, which is no part of it")
                self._cells[number].append(Cell(domain, box, end))
                end += align(math.prod(shape) * entry.dtype.itemsize)
            self._sizes.append(end)
        self._check_sizes()
        #: The runs of each domain, in order of the stream.
        self.runs = self._runs_by_domain()
        self._cut: tuple[int, list[list[list[Run]]]] = (0, [])

    @functools.cached_property
    def name(self) -> str:
        """As `Layout.name`; another division has another name."""
        return hashlib.blake2b(to_json(self.specs) + repr(self.table).encode(), digest_size=16).hexdigest()

    def cells(self, number: int) -> Sequence[Cell]:
        """See `Layout`."""
        return self._cells[number]

    def domain_bytes(self, domain: int) -> int:
        """See `Layout`."""
        return self._sizes[domain]

    def _check_sizes(self) -> None:
        """Check what takes no time, before the runs are made."""
        count = 0
        for entry, cells in zip(self.entries, self._cells, strict=True):
            if sum(math.prod(cell.box.shape) for cell in cells) != math.prod(entry.spec.shape):
                raise ManifestMismatch(f"{entry.spec.name}: {_NOT_ONCE}")
            count += sum(math.prod(cell.box.shape[: max(0, innermost(entry.spec.shape, cell.box))]) for cell in cells)
        if count > MOST_RUNS:
            raise ManifestMismatch(
                f"the trainer's hosts hold parts of tensors that lie in {count} separate places of the whole tensors, "
                f"and {MOST_RUNS} are supported: split tensors between hosts along their first dimensions, and along "
                "others within a host"
            )

    def _runs_by_domain(self) -> list[list[Run]]:
        """See ``runs``. Raises `ManifestMismatch` if they leave or repeat bytes."""
        found: list[list[Run]] = [[] for _ in self._sizes]
        for entry, cells in zip(self.entries, self._cells, strict=True):
            parts: list[tuple[int, int]] = []
            for cell in cells:
                there = cell.at
                for at, nbytes in runs(entry.spec.shape, entry.dtype.itemsize, cell.box):
                    found[cell.domain].append(Run(entry.offset + at, there, nbytes))
                    parts.append((at, nbytes))
                    there += nbytes
            end = 0
            for at, nbytes in sorted(parts):
                end = end + nbytes if at == end else -1  # a gap, or bytes that two hold
            if end != entry.nbytes:
                raise ManifestMismatch(f"{entry.spec.name}: {_NOT_ONCE}")
        ends = {entry.offset + entry.nbytes for entry in self.entries}
        return [_connected(sorted(those), ends) for those in found]

    def cut(self, bucket_bytes: int) -> list[list[list[Run]]]:
        """The runs of each domain in each bucket, in order of the stream."""
        if self._cut[0] != bucket_bytes:
            self._cut = bucket_bytes, self._cut_at(bucket_bytes)
        return self._cut[1]

    def _cut_at(self, bucket_bytes: int) -> list[list[list[Run]]]:
        cut: list[list[list[Run]]] = [[[] for _ in range(self.buckets(bucket_bytes))] for _ in self._sizes]
        for those, by_bucket in zip(self.runs, cut, strict=True):
            for run in those:
                for bucket, at, nbytes in cut_run(run.at, run.nbytes, bucket_bytes):
                    by_bucket[bucket].append(Run(at, run.there + at - run.at, nbytes))
        return cut

    def needed(self, domain: int, subset: Subset, bucket_bytes: int) -> list[list[Run]]:
        """As `cut`, for one domain and what a rank needs."""
        own = self.cut(bucket_bytes)[domain]
        if not subset.name:
            return own
        both = zip(own, subset.cut(bucket_bytes), strict=True)
        return [list(_common(runs, wanted)) for runs, wanted in both]

    def span(self, domain: int, bucket: int, bucket_bytes: int) -> tuple[int, int]:
        """The bytes of a domain's arena, first and end, among which it holds what it has of a bucket; empty if none.

        Of boxes of one tensor that interleave, these may be bytes of other buckets, too.
        """
        those = self.cut(bucket_bytes)[domain][bucket]
        return min((run.there for run in those), default=0), max((run.there + run.nbytes for run in those), default=0)


def _connected(runs: Iterable[Run], ends: Set[int]) -> list[Run]:
    """Sorted runs, of which those that follow each other in both places are one. So are those with only the padding
    between two tensors between them; ``ends`` are where tensors end."""
    found: list[Run] = []
    for run in runs:
        if found:
            at, there, nbytes = found[-1]
            end = at + nbytes
            follows = run.at == end or (end in ends and run.at == align(end))
            if follows and run.there - there == run.at - at:
                found[-1] = Run(at, there, run.at + run.nbytes - at)
                continue
        found.append(run)
    return found


def _common(runs: Sequence[Run], wanted: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """What ``runs`` and ``wanted``, pairs of offset and bytes, have in common; all are in order."""
    first = 0
    for run in runs:
        while first < len(wanted) and sum(wanted[first]) <= run.at:
            first += 1
        for at, nbytes in itertools.islice(wanted, first, None):
            if at >= run.at + run.nbytes:
                break
            start, end = max(at, run.at), min(at + nbytes, run.at + run.nbytes)
            yield Run(start, run.there + start - run.at, end - start)


def digested(subset: Subset, bucket_bytes: int) -> list[list[tuple[int, int]]]:
    """What each bucket's own digest is of, see `digest.digest_runs`: the runs that a rank needs of it, in order, cut
    where the part of a domain ends."""
    layout = subset.layout
    if not isinstance(layout, DividedLayout):
        return subset.cut(bucket_bytes)
    by_domain = [layout.needed(domain, subset, bucket_bytes) for domain in range(len(layout.table))]
    return [sorted((at, nbytes) for runs in those for at, _, nbytes in runs) for those in zip(*by_domain, strict=True)]


def layout_of(manifest: Sequence[TensorSpec], table: Table) -> Layout:
    """The layout of a push whose bytes lie in the domains of ``table``; it is empty if they lie in one."""
    return DividedLayout(manifest, table) if table else Layout(manifest)


def divide(held: Sequence[Sequence[tuple[int, Box]]]) -> Table:
    """The table of domains that hold these boxes, which are disjoint: pairs of a tensor's number and a box of it.

    Empty if the first domain holds all.
    """
    if not any(held[1:]):
        return ()
    table = []
    for boxes in held:
        by_tensor = itertools.groupby(sorted(boxes), key=lambda pair: pair[0])
        cells = [(number, box) for number, pairs in by_tensor for box in joined([box for _, box in pairs])]
        table.append(tuple((number, (box.start, box.shape)) for number, box in cells))
    return tuple(table)
