"""Copies and hashes host memory in C, with no per-tensor Python cost.

Copies of 1 MiB and more are split into chunks of 8 MiB for several threads, because one thread does not reach the
memory's bandwidth. There are as many threads as torch's own loops use, but at most 16 and no more than the cores that
this process may run on. Large tensors are hashed in parallel, each by one thread. Small copies and hashes stay in one
thread, because further threads would only wait for Python's lock. Memory is given by address and is not kept alive: the
caller makes sure that it stays valid.
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

#: From this size on, Python's lock is released for the work; below it, switching threads costs more than the work. Also
#: the size of a group of small pieces, so that what was just copied is still in the cache when it is hashed.
LARGE_BYTES: Final = 1 << 20
#: Size of the chunks that threads copy: small enough that every thread gets some.
SHARE_BYTES: Final = 8 << 20
#: Bytes of one step of work that is done in steps, which take some milliseconds.
STEP_BYTES: Final = 64 << 20
#: More threads are not faster: the memory's bandwidth is the limit.
_MOST_THREADS: Final = 16

_memmove: Final = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

#: Copies between memoryviews, mapped over lists of them, run in C, loop included: cheaper than a ctypes call for each.
_setitem: Final[Any] = operator.setitem
_T = TypeVar("_T")
_R = TypeVar("_R")


class Run(NamedTuple):
    """A copy of ``nbytes`` bytes from address ``source`` to address ``target``."""

    source: int
    target: int
    nbytes: int


class Block(NamedTuple):
    """``nbytes`` bytes of memory at ``address``."""

    address: int
    nbytes: int


class Copies:
    """Copies between addresses, prepared once and made any number of times."""

    def __init__(self, runs: Sequence[Run]):
        small = [run for run in runs if run.nbytes < LARGE_BYTES]
        large = [part for run in runs if run.nbytes >= LARGE_BYTES for part in chunks(run, SHARE_BYTES)]
        self._large = [(part.target, part.source, part.nbytes) for part in large]
        #: (targets, sources) of each group; other threads can run after every group, which is about `LARGE_BYTES`.
        self._small = [
            (
                [view(Block(run.target, run.nbytes)) for run in group],
                [view(Block(run.source, run.nbytes)) for run in group],
            )
            for group in grouped(small, lambda run: run.nbytes)
        ]

    def make(self) -> None:
        """Make every copy."""
        for _ in self.steps(len(self._large) or 1):
            pass

    def steps(self, count: int = STEP_BYTES // SHARE_BYTES) -> Iterator[None]:
        """Make every copy, ``count`` chunks of `SHARE_BYTES`, or a group of small copies, between two yields."""
        for at in range(0, len(self._large), count):
            _share(_memmove, self._large[at : at + count])
            yield
        for targets, sources in self._small:
            _run(map(_setitem, targets, itertools.repeat(slice(None)), sources))
            yield


class Hashes:
    """XXH3 hashes of pieces of memory, prepared once. Other threads can run after every `LARGE_BYTES`."""

    def __init__(self, pieces: Sequence[Block]):
        groups = [list(map(view, group)) for group in grouped(pieces, lambda piece: piece.nbytes)]
        self._large = [group[0] for group in groups if _is_large(group)]
        #: Groups of small pieces in order; None stands for the next large piece.
        self._groups = [None if _is_large(group) else group for group in groups]

    def make(self) -> list[int]:
        """The hashes of what the memory holds now, in the order of the pieces."""
        large, found = iter(each(_hashed, self._large) if self._large else ()), list[int]()
        for group in self._groups:
            if group is None:
                found.append(next(large))
            else:
                found += map(xxhash.xxh3_64_intdigest, group)
        return found


@torch.inference_mode()
def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of their shapes and dtypes, shared out among threads; torch copies each by one."""
    threads = most_threads()
    each(_copy_all, [(targets[at::threads], sources[at::threads]) for at in range(min(threads, len(targets)))])


@torch.inference_mode()
def _copy_all(both: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    torch._foreach_copy_(*both)


def each(act: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """Call ``act`` with every item in several threads, and return the results in the order of the items.

    Worthwhile if ``act`` takes long and releases Python's lock. Raises what ``act`` raised, once all threads are done.
    A call of `each` inside ``act`` runs in one thread.
    """
    results: dict[int, _R] = {}

    def store(index: int, item: _T) -> None:
        results[index] = act(item)

    _share(store, list(enumerate(items)))
    return [results[index] for index in range(len(items))]


def most_threads() -> int:
    """How many threads share work here, if there is enough."""
    return min(torch.get_num_threads(), len(os.sched_getaffinity(0)), _MOST_THREADS)


def grouped(items: Iterable[_T], nbytes: Any) -> Iterator[list[_T]]:
    """Group neighbouring items up to `LARGE_BYTES` together; an item of that size or more is a group by itself.

    ``nbytes`` returns the size of an item.
    """
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
    """Split a run into chunks of ``nbytes`` bytes; the last may be smaller."""
    for at in range(0, run.nbytes, nbytes):
        yield Run(run.source + at, run.target + at, min(nbytes, run.nbytes - at))


def copy(run: Run) -> None:
    """Make one copy, with Python's lock released."""
    _memmove(run.target, run.source, run.nbytes)


def view(piece: Block) -> memoryview:
    """The memory as a writable view of bytes."""
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address)).cast("B")


def _is_large(group: Sequence[memoryview]) -> bool:
    return len(group[0]) >= LARGE_BYTES


def _hashed(large: memoryview) -> int:
    hasher = xxhash.xxh3_64()
    hasher.update(large)  # the one-shot function does not release Python's lock in older versions of xxhash
    return hasher.intdigest()


def _run(calls: Iterable[object]) -> None:
    """Consume an iterator of calls, in C."""
    collections.deque(calls, maxlen=0)


class _Shared:
    """Calls of ``act`` that several threads share: each thread makes the next one that is left."""

    def __init__(self, act: Callable[..., object], items: Sequence[tuple[Any, ...]]):
        # These iterators are implemented in C, so Python's lock lets only one thread at a time take the next item.
        self._items = iter(items)
        self._calls = itertools.starmap(act, self._items)
        self._changed, self._working, self._closed = threading.Condition(), 0, False
        self.failed: BaseException | None = None

    def work(self) -> None:
        """Make calls until none is left."""
        _thread.sharing = True
        try:
            _run(self._calls)
        except BaseException:
            collections.deque(self._items, maxlen=0)  # leave nothing for the other threads
            raise
        finally:
            _thread.sharing = False

    def help(self) -> None:
        """`work` in a helper thread; returns at once after `end`."""
        with self._changed:
            if self._closed:
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
        """Let no further thread begin, and wait for those that have: they use the memory until then."""
        interrupted: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.wait_for(lambda: not self._working)
                break
            except BaseException as error:  # Ctrl-C
                interrupted = error
        if interrupted is not None:
            raise interrupted


#: ``sharing``: whether this thread is already making shared calls.
_thread = threading.local()


def _share(act: Callable[..., object], items: Sequence[tuple[Any, ...]]) -> None:
    """Call ``act`` with the arguments of every item, in several threads if that can help."""
    threads = 1
    if len(items) > 1 and not getattr(_thread, "sharing", False):
        threads = min(most_threads(), len(items))
    if threads == 1:
        return _run(itertools.starmap(act, items))
    shared = _Shared(act, items)
    try:
        with contextlib.suppress(RuntimeError):  # no further thread can be started: the existing ones do all the work
            for _ in range(threads - 1):
                _helpers().submit(shared.help)
        shared.work()
    finally:
        shared.end()
    if shared.failed is not None:
        raise shared.failed


def release() -> None:
    """End the idle helper threads; the next call that shares work starts new ones."""
    if _helpers.cache_info().currsize:
        pool = _helpers()
        _helpers.cache_clear()
        pool.shutdown(wait=False)


@functools.cache
def _helpers() -> futures.ThreadPoolExecutor:
    return futures.ThreadPoolExecutor(_MOST_THREADS, "weightsync-copy")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # a forked child does not inherit the threads
