"""Loops over host memory that run in C: for each of many tensors they cost its bytes, and no step of Python's own.

Memory is named by its address, and not held: whoever has something done knows that it is there.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import xxhash

#: Runs from this size on are worked on with other threads running; for smaller ones switching costs more than working.
#: It is also how much of them is worked on in one go, and what is still in the cache then.
LARGE_BYTES: Final = 1 << 20

_memmove: Final = ctypes.CDLL(None).memmove
_memmove.restype = None
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

#: In one step of C for each, also of the loop around it: less than a call of the C library takes through ctypes.
_setitem: Final[Any] = operator.setitem
_T = TypeVar("_T")


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
        large = [run for run in runs if run.nbytes >= LARGE_BYTES]
        small = [run for run in runs if run.nbytes < LARGE_BYTES]
        self._large = [run.target for run in large], [run.source for run in large], [run.nbytes for run in large]
        self._targets = [view(Piece(run.target, run.nbytes)) for run in small]
        self._sources = [view(Piece(run.source, run.nbytes)) for run in small]

    def make(self) -> None:
        """Make every copy."""
        _run(map(_memmove, *self._large))
        _run(map(_setitem, self._targets, itertools.repeat(slice(None)), self._sources))


class Hashes:
    """XXH3 of pieces of memory, made ready once. Other threads get their turn after every `LARGE_BYTES`."""

    def __init__(self, pieces: Sequence[Piece]):
        self._groups = [list(map(view, group)) for group in grouped(pieces, lambda piece: piece.nbytes)]

    def make(self) -> list[int]:
        """What they are now, in order."""
        found: list[int] = []
        for group in self._groups:
            if len(group[0]) < LARGE_BYTES:
                found += map(xxhash.xxh3_64_intdigest, group)
            else:
                hasher = xxhash.xxh3_64()
                hasher.update(group[0])
                found.append(hasher.intdigest())
        return found


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


def chunks(run: Run) -> Iterator[Run]:
    """A run in pieces of `LARGE_BYTES`."""
    for at in range(0, run.nbytes, LARGE_BYTES):
        yield Run(run.source + at, run.target + at, min(LARGE_BYTES, run.nbytes - at))


def copy(run: Run) -> None:
    """One copy, with other threads running."""
    _memmove(run.target, run.source, run.nbytes)


def view(piece: Piece) -> memoryview:
    """Memory at an address."""
    return memoryview((ctypes.c_char * piece.nbytes).from_address(piece.address)).cast("B")


def _run(calls: Iterable[object]) -> None:
    """Have every call made."""
    collections.deque(calls, maxlen=0)
