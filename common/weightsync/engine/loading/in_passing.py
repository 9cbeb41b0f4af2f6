"""Finds what of a push can be copied to where it is loaded in the same pass over the memory in which it is verified."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from weightsync.engine.verifying import Hashed
from weightsync.tensors import native_copy
from weightsync.tensors.layout import cut_run
from weightsync.tensors.native_copy import Block, Run
from weightsync.tensors.one_pass import OnePass, Span

#: Of the threads that may share work here, one in so many is sure to run: the trainer hashes the next bucket meanwhile.
_TRAINERS: Final = 2


class _Piece(NamedTuple):
    """What arrives with a bucket of the block ``whole``, which is hashed, and has a ``number`` of its own."""

    number: int
    whole: Block
    block: Block
    first: bool
    last: bool


def in_passing(
    hashed: Sequence[Sequence[Hashed] | None], runs: Sequence[Sequence[Run]], bucket_bytes: int
) -> list[tuple[OnePass | None, list[Run]]]:
    """For every bucket the pass that hashes and copies what arrives with it, if there can be one, and those of the
    bucket's ``runs`` that it does not copy. ``hashed`` as in `verifying.Taking`."""
    pieces = _pieces(hashed, bucket_bytes)
    able = [ended is not None and _pays_off(own) for ended, own in zip(hashed, pieces, strict=True)]
    # What cannot be hashed piece by piece, as a bucket in between is verified another way.
    torn = {piece.number for may, own in zip(able, pieces, strict=True) if not may for piece in own}
    hashers: dict[int, Any] = {}
    found: list[tuple[OnePass | None, list[Run]]] = []
    for may, own, those in zip(able, pieces, runs, strict=True):
        if may:
            spans, left = _spans([piece for piece in own if piece.last or piece.number not in torn], torn, those)
            found.append((OnePass(spans, hashers), left))
        else:
            found.append((None, list(those)))
    return found


def _pieces(hashed: Sequence[Sequence[Hashed] | None], bucket_bytes: int) -> list[list[_Piece]]:
    """What arrives with each bucket: first, in order, what is hashed to its end then."""
    ended: list[list[_Piece]] = [[] for _ in hashed]
    begun: list[list[_Piece]] = [[] for _ in hashed]
    number = itertools.count()
    for bucket, blocks in enumerate(hashed):
        for at, whole in blocks or ():
            which, done = next(number), 0
            for index, _, nbytes in () if at is None else cut_run(at, whole.nbytes, bucket_bytes):
                if index < bucket:
                    piece = Block(whole.address + done, nbytes)
                    begun[index].append(_Piece(which, whole, piece, not done, False))
                    done += nbytes
            rest = Block(whole.address + done, whole.nbytes - done)
            ended[bucket].append(_Piece(which, whole, rest, not done, True))
    return [[*own, *more] for own, more in zip(ended, begun, strict=True)]


def _pays_off(pieces: Sequence[_Piece]) -> bool:
    """Whether one pass takes less time than two: each piece is hashed by one thread, but copied by all."""
    sizes = [piece.block.nbytes for piece in pieces]
    return max(sizes, default=0) * native_copy.most_threads() <= sum(sizes) * _TRAINERS


def _spans(pieces: Sequence[_Piece], torn: set[int], runs: Sequence[Run]) -> tuple[list[Span], list[Run]]:
    """The spans of a pass, with the ``runs`` that lie in them, and all other runs."""
    whole = [piece._replace(block=piece.whole, first=True) if piece.number in torn else piece for piece in pieces]
    order = sorted(range(len(whole)), key=lambda index: whole[index].block)
    blocks = [whole[index].block for index in order]
    starts = [block.address for block in blocks]
    inside: list[list[Run]] = [[] for _ in whole]
    left: list[Run] = []
    for run in runs:
        for at, part in _cut(run, starts, blocks):
            (left if at is None else inside[order[at]]).append(part)
    spans = [Span(p.block, own, p.number, p.first, p.last) for p, own in zip(whole, inside, strict=True)]
    return spans, left


def _cut(run: Run, starts: Sequence[int], blocks: Sequence[Block]) -> Iterator[tuple[int | None, Run]]:
    """The parts of a run that lie in ``blocks``, which are in order, with the number of each; None for the others."""
    source, target, nbytes = run
    while nbytes:
        at = bisect.bisect_right(starts, source) - 1
        until = sum(blocks[at]) if at >= 0 else 0
        number = at if source < until else None
        if number is None:
            until = starts[at + 1] if at + 1 < len(starts) else source + nbytes
        part = min(nbytes, until - source)
        yield number, Run(source, target, part)
        source, target, nbytes = source + part, target + part, nbytes - part
