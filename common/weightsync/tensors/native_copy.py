"""Copies and hashes host memory in C, with no per-tensor Python cost.

From 1 MiB on, copies are shared by as many threads as torch's own loops use, 16 at most and no more than the cores that
a thread may run on: one alone does not reach the speed of the memory. Each takes the next 8 MiB that none has taken.
What is hashed is shared by tensors. Small tensors stay with one thread, for the others would wait for Python's lock.
Memory is named by its address, and not held: whoever has something done knows that it is there.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Any, Final, NamedTuple, TypeVar

import torch
import xxhash

#: Runs from this size on are worked on with other threads running; for smaller ones switching costs more than working.
#: It is also how much of them is worked on in one go, and what is still in the cache then.
LARGE_BYTES: Final = 1 << 20
#: What a thread copies before it looks for more: so little that there is some for every thread.
SHARE_BYTES: Final = 8 << 20
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


class Block(NamedTuple):
    """``nbytes`` bytes from an address on."""

    address: int
    nbytes: int


class Copies:
    """Copies between addresses, made ready once."""

    def __init__(self, runs: Sequence[Run]):
        small = [run for run in runs if run.nbytes < LARGE_BYTES]
        large = [part for run in runs if run.nbytes >= LARGE_BYTES for part in chunks(run, SHARE_BYTES)]
        self._large = [(part.target, part.source, part.nbytes) for part in large]
        #: Where to and from; other threads get their turn after every `LARGE_BYTES`.
        self._small = [
            (
                [view(Block(run.target, run.nbytes)) for run in group],
                [view(Block(run.source, run.nbytes)) for run in group],
            )
            for group in grouped(small, lambda run: run.nbytes)
        ]

    def make(self) -> None:
        """Make every copy."""
        _share(_memmove, self._large)
        for targets, sources in self._small:
            _run(map(_setitem, targets, itertools.repeat(slice(None)), sources))


class Hashes:
    """XXH3 of pieces of memory, made ready once. Other threads get their turn after every `LARGE_BYTES`."""

    def __init__(self, pieces: Sequence[Block]):
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

    Worth while where ``act`` takes long and lets other threads run. Raises what it raises, once all have ended. What
    ``act`` itself has done by this is done by its thread alone.
    """
    found: dict[int, _R] = {}

    def one(index: int, item: _T) -> None:
        found[index] = act(item)

    _share(one, list(enumerate(items)))
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


def view(piece: Block) -> memoryview:
    """Memory at an address."""
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address)).cast("B")


def _is_large(group: Sequence[memoryview]) -> bool:
    return len(group[0]) >= LARGE_BYTES


def _hashed(large: memoryview) -> int:
    hasher = xxhash.xxh3_64()
    hasher.update(large)  # in older versions the function that does it at once keeps all other threads waiting
    return hasher.intdigest()


def _run(calls: Iterable[object]) -> None:
    """Have every call made."""
    collections.deque(calls, maxlen=0)


class _Shared:
    """Calls that several threads make, each the next that none has made yet."""

    def __init__(self, act: Callable[..., object], items: Sequence[tuple[Any, ...]]):
        # Iterators of C's own, of which only one thread at a time takes the next.
        self._items = iter(items)
        self._calls = itertools.starmap(act, self._items)
        self._changed, self._working, self._over = threading.Condition(), 0, False
        self.failed: BaseException | None = None

    def work(self) -> None:
        """Make calls until none is left."""
        _thread.sharing = True
        try:
            _run(self._calls)
        except BaseException:
            collections.deque(self._items, maxlen=0)  # the others need not go on
            raise
        finally:
            _thread.sharing = False

    def help(self) -> None:
        """As `work`, by another thread; nothing once the one that asked has ended."""
        with self._changed:
            if self._over:
                return
            self._working += 1
        try:
            self.work()
        except BaseException as error:
            self.failed = error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Have no other thread begin, and wait for those that have: the memory is in use until then."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._over = True
                    self._changed.wait_for(lambda: not self._working)
                break
            except BaseException as error:  # Ctrl-C
                interrupted = error
        if interrupted is not None:
            raise interrupted


#: Whether a thread makes shared calls already.
_thread = threading.local()


def _share(act: Callable[..., object], items: Sequence[tuple[Any, ...]]) -> None:
    """Call ``act`` with every item, by several threads."""
    threads = 1
    if len(items) > 1 and not getattr(_thread, "sharing", False):
        threads = min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MOST_THREADS, len(items))
    if threads == 1:
        return _run(itertools.starmap(act, items))
    shared = _Shared(act, items)
    try:
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: those there are do all of it
            for _ in range(threads - 1):
                _helpers().submit(shared.help)
        shared.work()
    finally:
        shared.end()
    if shared.failed is not None:
        raise shared.failed


def release() -> None:
    """Let the threads go that wait for work to share; whoever shares some again has others."""
    if _helpers.cache_info().currsize:
        pool = _helpers()
        _helpers.cache_clear()
        pool.shutdown(wait=False)


@functools.cache
def _helpers() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_MOST_THREADS, "weightsync-bulk")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads stay behind
