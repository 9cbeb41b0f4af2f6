"""Loops over host memory that run in C: for each of many tensors they cost its bytes, and no step of Python's own.

What is large is worked on by as many threads as torch's own loops use, for one alone does not reach the speed of the
memory. Memory is named by its address, and not held: whoever has something done knows that it is there.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, Final, NamedTuple, TypeVar

import torch
import xxhash

#: Runs from this size on are worked on with other threads running; for smaller ones switching costs more than working.
#: It is also how much of them is worked on in one go, and what is still in the cache then.
LARGE_BYTES: Final = 1 << 20
#: What a thread copies before it looks for more: the C library goes past the caches where a copy would not fit there.
SHARE_BYTES: Final = 32 << 20
#: More do not move more: they wait for the same memory.
_MOST_THREADS: Final = 16

_memmove: Final = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

#: In one step of C for each, also of the loop around it: less than a call of the C library takes through ctypes.
_setitem: Final[Any] = operator.setitem
_T = TypeVar("_T")
_R = TypeVar("_R")


class Run(NamedTuple):
    """``nbytes`` bytes from the address ``source`` on, that go to the address ``target``."""

    source: int
    target: int
    nbytes: int


class Piece(NamedTuple):
    """``nbytes`` bytes from an address on."""

    address: int
    nbytes: int


class Copies:
    """Copies between addresses, made ready once."""

    def __init__(self, runs: Sequence[Run]):
        small = [run for run in runs if run.nbytes < LARGE_BYTES]
        large = [part for run in runs if run.nbytes >= LARGE_BYTES for part in chunks(run, SHARE_BYTES)]
        self._large = [(part.target, part.source, part.nbytes) for part in large]
        self._targets = [view(Piece(run.target, run.nbytes)) for run in small]
        self._sources = [view(Piece(run.source, run.nbytes)) for run in small]

    def make(self) -> None:
        """Make every copy."""
        _share(itertools.starmap(_memmove, self._large), len(self._large))
        _run(map(_setitem, self._targets, itertools.repeat(slice(None)), self._sources))


class Hashes:
    """XXH3 of pieces of memory, made ready once. Other threads get their turn after every `LARGE_BYTES`."""

    def __init__(self, pieces: Sequence[Piece]):
        groups = [list(map(view, group)) for group in grouped(pieces, lambda piece: piece.nbytes)]
        self._large = [group[0] for group in groups if _is_large(group)]
        #: In order; None is the next of the large ones.
        self._groups = [None if _is_large(group) else group for group in groups]

    def make(self) -> list[int]:
        """What they are now, in order."""
        large, found = iter(each(_hashed, self._large) if self._large else ()), list[int]()
        for group in self._groups:
            if group is None:
                found.append(next(large))
            else:
                found += map(xxhash.xxh3_64_intdigest, group)
        return found


def each(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """What ``act`` makes of every item, in order; every thread takes the next that none has taken yet.

    Worth while where ``act`` takes long and lets other threads run. Raises what it raises.
    """
    found: dict[int, _R] = {}

    def one(index: int, item: _T) -> None:
        found[index] = act(item)

    _share(itertools.starmap(one, enumerate(items)), len(items))
    return [found[index] for index in range(len(items))]


def grouped(items: Iterable[_T], nbytes: Any) -> Iterator[list[_T]]:
    """Neighbours together, of no more than `LARGE_BYTES` in all; what is as large as that alone."""
    group: list[_T] = []
    size = 0
    for item in items:
        if group and size + nbytes(item) >= LARGE_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += nbytes(item)
    if group:
        yield group


def chunks(run: Run, nbytes: int) -> Iterator[Run]:
    """A run in pieces of ``nbytes``."""
    for at in range(0, run.nbytes, nbytes):
        yield Run(run.source + at, run.target + at, min(nbytes, run.nbytes - at))


def copy(run: Run) -> None:
    """One copy, with other threads running."""
    _memmove(run.target, run.source, run.nbytes)


def view(piece: Piece) -> memoryview:
    """Memory at an address."""
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address)).cast("B")


def _is_large(group: Sequence[memoryview]) -> bool:
    return len(group[0]) >= LARGE_BYTES


def _hashed(large: memoryview) -> int:
    hasher = xxhash.xxh3_64()
    hasher.update(large)  # without the lock that the function which does it at once would hold
    return hasher.intdigest()


def _run(calls: Iterable[object]) -> None:
    """Have every call made."""
    collections.deque(calls, maxlen=0)


def _share(calls: Iterator[object], count: int) -> None:
    """Have every call made, by several threads that take the next of an iterator of C's own in turn."""
    threads = min(torch.get_num_threads(), _MOST_THREADS, count) if count > 1 else 1
    helpers: list[futures.Future[None]] = []
    try:
        if threads > 1:
            helpers += _begin(calls, threads - 1)
        _run(calls)
    finally:
        # Whoever has not begun finds nothing left to do; the memory is in use until the others have ended.
        begun = [helper for helper in helpers if not helper.cancel()]
        futures.wait(begun)
    for helper in begun:
        helper.result()


def _begin(calls: Iterator[object], count: int) -> list[futures.Future[None]]:
    pool = _helpers()
    try:
        return [pool.submit(_run, calls) for _ in range(count)]
    except RuntimeError:
        # No more threads are to be had. Whoever has begun is waited for, and all else done by the thread that asks.
        pool.shutdown(cancel_futures=True)
        _helpers.cache_clear()
        return []


@functools.cache
def _helpers() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_MOST_THREADS, "weightsync-bulk")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads stay behind
