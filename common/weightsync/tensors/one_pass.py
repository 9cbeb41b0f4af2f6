"""Copies and hashes host memory in one pass, so that what is copied is hashed while it is in the cache.

Small tensors are handled in groups of 1 MiB, large ones in smaller chunks, each by one of several threads. All is
prepared once, by address, and made any number of times; see `native_copy`.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from weightsync.tensors import native_copy
from weightsync.tensors.layout import cut_run
from weightsync.tensors.native_copy import Block, Copies, Hashes, Run

#: Of large pieces so much is copied at a time: few enough bytes that they are still in the cache of a core, source and
#: target, when they are hashed.
CHUNK_BYTES: Final = 256 << 10
#: The same of what is converted, in many steps: in smaller chunks, threads would mostly wait for Python's lock.
_MADE_BYTES: Final = 4 << 20


class Span(NamedTuple):
    """Bytes that are copied by ``runs``, which lie in them, and hashed.

    Spans of several passes that have the same number ``hashed`` are hashed one after the other, from the ``first`` to
    the ``last``; None: it is not hashed. After the last one each block in ``rest`` is hashed by itself. With ``made``,
    the span itself is what is first written: so many bytes, from a byte of it on. It returns how many elements are not
    finite. What ``follows`` from other spans is made after them, in order.
    """

    block: Block
    runs: Sequence[Run]
    hashed: int | None
    first: bool = True
    last: bool = True
    rest: Sequence[Block] = ()
    made: Callable[[int, int], int] | None = None
    follows: bool = False

    @property
    def is_small(self) -> bool:
        """Whether it can be handled with others."""
        return self.first and self.last and self.block.nbytes < native_copy.LARGE_BYTES and self.made is None


class _Group(NamedTuple):
    """Spans that are copied, then hashed; ``number`` is the place among the steps of a pass."""

    number: int
    copies: Copies
    hashes: Hashes

    def make(self) -> _Done:
        start = time.perf_counter()
        self.copies.make()
        copied = time.perf_counter()
        return _Done(self.number, self.hashes.make(), copied - start, time.perf_counter() - copied)


class _Chunk(NamedTuple):
    """A part of a span that is small enough to be in the cache from one of its steps to the next."""

    made: Callable[[], int] | None
    runs: Sequence[Run]
    hashed: memoryview


class _Part(NamedTuple):
    """A span that is large, converted, or continued in another pass."""

    number: int
    chunks: Sequence[_Chunk]
    hasher: Any
    first: bool
    last: bool
    rest: Hashes | None
    follows: bool

    @property
    def is_large(self) -> bool:
        """Whether it is worth a thread of its own."""
        return sum(len(chunk.hashed) for chunk in self.chunks) >= native_copy.LARGE_BYTES

    def make(self) -> _Done:
        gather_s = digest_s = 0.0
        not_finite = 0
        if self.first and self.hasher is not None:
            self.hasher.reset()  # what was cancelled may have left something in it
        for chunk in self.chunks:
            start = time.perf_counter()
            if chunk.made is not None:
                not_finite += chunk.made()
            for run in chunk.runs:
                native_copy.copy(run)
            copied = time.perf_counter()
            if self.hasher is not None:
                self.hasher.update(chunk.hashed)
            gather_s += copied - start
            digest_s += time.perf_counter() - copied
        start = time.perf_counter()
        found = [self.hasher.intdigest()] if self.last and self.hasher is not None else []
        found += self.rest.make() if self.rest is not None else []
        return _Done(self.number, found, gather_s, digest_s + time.perf_counter() - start, not_finite)


class _Done(NamedTuple):
    """The digests of one step, the seconds it spent copying and hashing, and how many elements are not finite."""

    number: int
    digests: list[int]
    gather_s: float
    digest_s: float
    not_finite: int = 0


class OnePass:
    """Copies and hashes ``spans``; ``hashers`` are shared by all passes over what they have parts of, by number.

    ``gather_s`` and ``digest_s`` are the seconds that the last `make` spent copying and hashing, ``not_finite`` is how
    many infinite and NaN elements it converted.
    """

    def __init__(self, spans: Sequence[Span], hashers: MutableMapping[int, Any]):
        self.gather_s = self.digest_s = 0.0
        self.not_finite = 0
        steps = list(_steps(spans, hashers))
        parts = [step for step in steps if isinstance(step, _Part)]
        self._groups = [step for step in steps if isinstance(step, _Group)]
        self._following = [part for part in parts if part.follows]
        #: Threads share the large ones.
        self._large = [part for part in parts if part.is_large and not part.follows]
        self._small = [part for part in parts if not part.is_large and not part.follows]

    def make(self) -> list[int]:
        """Copy and hash; the digests of what was hashed to its end, in the order of the spans."""
        start = time.perf_counter()
        small = [*map(_Group.make, self._groups), *map(_Part.make, self._small)]
        large = native_copy.each(_Part.make, self._large)
        done = sorted([*small, *large, *map(_Part.make, self._following)])
        self._note(time.perf_counter() - start, done)
        return [digest for step in done for digest in step.digests]

    def _note(self, seconds: float, done: Sequence[_Done]) -> None:
        """Steps that ran in parallel share the elapsed ``seconds`` in proportion."""
        gather_s, digest_s = sum(step.gather_s for step in done), sum(step.digest_s for step in done)
        share = seconds / max(gather_s + digest_s, seconds, 1e-9)
        self.gather_s, self.digest_s = share * gather_s, share * digest_s
        self.not_finite = sum(step.not_finite for step in done)


def _steps(spans: Sequence[Span], hashers: MutableMapping[int, Any]) -> Iterator[_Group | _Part]:
    """Groups of small spans, and every other span by itself.

    A group is small enough to be hashed from the cache after it was copied. Without hashing there is one group.
    """
    hashed = any(span.hashed is not None or span.rest for span in spans)
    nbytes = (lambda span: span.block.nbytes) if hashed else (lambda _: 0)
    number = itertools.count()
    for group in native_copy.grouped(spans, nbytes):
        for small, members in itertools.groupby(group, lambda span: span.is_small if hashed else span.made is None):
            if small:
                yield _group(next(number), list(members))
            else:
                yield from (_part(next(number), span, hashers) for span in members)


def _group(number: int, spans: Sequence[Span]) -> _Group:
    runs = [run for span in spans for run in span.runs]
    hashed = [at for span in spans for at in ([] if span.hashed is None else [span.block]) + list(span.rest)]
    return _Group(number, Copies(runs), Hashes(hashed))


def _part(number: int, span: Span, hashers: MutableMapping[int, Any]) -> _Part:
    hasher = None if span.hashed is None else hashers.setdefault(span.hashed, xxhash.xxh3_64())
    rest = Hashes(span.rest) if span.rest else None
    size = _MADE_BYTES if span.made is not None else native_copy.SHARE_BYTES if hasher is None else CHUNK_BYTES
    return _Part(number, list(_chunks(span, size)), hasher, span.first, span.last, rest, span.follows)


def _chunks(span: Span, size: int) -> Iterator[_Chunk]:
    address, nbytes = span.block
    runs: list[list[Run]] = [[] for _ in range(0, nbytes, size)]
    for source, target, length in span.runs:
        for number, at, part in cut_run(source - address, length, size):
            runs[number].append(Run(address + at, target + address + at - source, part))
    for number, of_chunk in enumerate(runs):
        at = number * size
        part = min(size, nbytes - at)
        made = None if span.made is None else functools.partial(span.made, at, part)
        yield _Chunk(made, of_chunk, native_copy.view(Block(address + at, part)))
