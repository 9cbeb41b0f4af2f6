"""What changed in a tensor between two versions, bit by bit: found by comparing, and applied to the old bytes.

A delta is a sequence of frames, one for each `PIECE_BYTES` of the tensor, which fit in a core's cache. A frame has the
positions of the changed elements, as gaps of one byte, and how far each has moved: the difference of the bits as whole
numbers, signs folded in, so that a small step up or down is a small number whatever the dtype. Its bytes are split into
planes, of which all but the lowest are zeros after an optimiser step and vanish when they are deflated.

::

    frame    count u32, and if that is not 0: codes u32, stored u32 for each stream, the streams
    streams  the gaps (codes bytes before they are deflated), then a plane of count bytes for each byte of an element
    gap      elements between two that changed; 255 adds 255 to the next code
    stored   bytes of a stream; fewer than before: it is deflated

All numbers are little-endian. Positions that a delta names are checked before anything is written.
"""

from __future__ import annotations

import itertools
import struct
import sys
import zlib
from typing import Any, Final

import numpy as np
import torch

from weightsync.errors import TransferFailed
from weightsync.tensors import native_copy

#: Bytes of a tensor that a frame is about.
PIECE_BYTES: Final = 1 << 20
#: Frames that are made together: each step of the work gives up Python's lock, and threads that often wait for it hold
#: each other up.
TOGETHER: Final = 4
#: Bytes that are compared at once; elements are looked at only where these differ.
_WORD_BYTES: Final = 8
#: The code that stands for so many elements and for no change.
_ESCAPE: Final = 255
#: A delta that takes more than this share of a tensor's bytes does not pay: making and applying it takes time, too.
MOST_SHARE: Final = 0.5
#: How density is measured before anything else is done: runs of so many bytes, evenly spread.
_SAMPLES: Final = 16
_SAMPLE_BYTES: Final = 4096
#: A smaller tensor is compared in full at once.
LEAST_SAMPLED: Final = _SAMPLES * _SAMPLE_BYTES * 2
#: Streams with fewer bytes are not deflated; deflated ones are kept if they take less than this share.
_LEAST_DEFLATED: Final = 64
_DEFLATED_SHARE: Final = 0.75
#: So many bytes of a stream tell whether all of it deflates: deflating in vain takes longer than finding what changed.
_PROBE_BYTES: Final = 4096

_U32: Final = struct.Struct("<I")
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Numbers = np.ndarray[Any, np.dtype[Any]]


def encode(old: torch.Tensor, new: torch.Tensor, itemsize: int) -> bytes | None:
    """The delta from ``old`` to ``new``, 1-D uint8 host tensors of equal length; empty if they are equal.

    ``itemsize`` is 1, 2, 4 or 8, the bytes of an element. None if sending ``new`` pays more, by the measured density of
    changes.
    """
    assert sys.byteorder == "little", "elements are read as they are sent"
    if sampled_share(old, new, itemsize) > MOST_SHARE:
        return None
    before, after = old.numpy(), new.numpy()
    if not len(before):
        return b""
    step = TOGETHER * PIECE_BYTES
    # What deflates in one piece will in the others.
    frames, deflates = _frames(before[:step], after[:step], itemsize, None)
    groups = [slice(at, at + step) for at in range(step, len(before), step)]
    made = native_copy.each(lambda group: _frames(before[group], after[group], itemsize, deflates)[0], groups)
    frames += itertools.chain.from_iterable(made)
    nbytes = sum(map(len, frames))
    if nbytes == len(frames) * _U32.size:
        return b""
    return b"".join(frames) if nbytes <= len(before) * MOST_SHARE else None


def apply(delta: bytes | memoryview, target: torch.Tensor, itemsize: int) -> None:
    """Turn ``target``, 1-D uint8 in host memory, which holds the old bytes, into the new ones.

    Raises `TransferFailed` if the delta is damaged or of another tensor; some pieces of ``target`` may have changed by
    then, and nothing else.
    """
    raw, at, work = target.numpy(), 0, list[tuple[_Bytes, memoryview]]()
    rest = memoryview(delta)
    if not rest:
        return
    while at < len(raw):
        nbytes = _frame_bytes(rest, itemsize)
        if nbytes > _U32.size:
            work.append((raw[at : at + PIECE_BYTES], rest[:nbytes]))
        rest, at = rest[nbytes:], at + PIECE_BYTES
    if rest:
        raise TransferFailed(f"a delta has {len(rest)} bytes more than its tensor of {len(raw)} bytes needs")
    native_copy.each(lambda one: _apply_frame(*one, itemsize), work)


def sampled_share(before: torch.Tensor, after: torch.Tensor, itemsize: int) -> float:
    """What share of a tensor its delta would take, undeflated, judged by samples; 0 if it is too small for that."""
    old, new = before.numpy(), after.numpy()
    if len(old) < LEAST_SAMPLED:
        return 0.0
    starts = range(0, len(old) - _SAMPLE_BYTES + 1, (len(old) - _SAMPLE_BYTES) // (_SAMPLES - 1) // 8 * 8)
    kind = f"u{itemsize}"
    changed = sum(
        int(np.count_nonzero(old[at : at + _SAMPLE_BYTES].view(kind) != new[at : at + _SAMPLE_BYTES].view(kind)))
        for at in starts
    )
    return changed * (1 + itemsize) / (len(starts) * _SAMPLE_BYTES)


# ---- frames ----------------------------------------------------------------------------------------------------------


def _frames(
    old: _Bytes, new: _Bytes, itemsize: int, deflates: tuple[bool, ...] | None
) -> tuple[list[bytes], tuple[bool, ...] | None]:
    """The frames of some pieces, and which of their streams deflate, None if they have too few bytes to tell.

    ``deflates``: which are deflated; if it is None, all, until a piece tells.
    """
    at, before, after = changes(old, new, itemsize)
    elements = PIECE_BYTES // itemsize
    count = -(-len(old) // PIECE_BYTES)
    ends = at.searchsorted(np.arange(1, count + 1) * elements)
    codes, stops = _gaps(at, ends, elements)
    planes = _folded(before, after, itemsize)
    frames = []
    for one, coded in zip(_slices(ends), _slices(stops), strict=True):
        if one.start == one.stop:
            frames.append(_U32.pack(0))
            continue
        streams = [codes[coded], *(plane[one] for plane in planes)]
        if deflates is None and len(streams[1]) >= _LEAST_DEFLATED:
            probes = [each[:_PROBE_BYTES] for each in streams]
            deflates = tuple(len(_deflated(probe)) < len(probe) for probe in probes)
        tries = deflates or (True,) * len(streams)
        packed = [_deflated(each) if tried else each.tobytes() for each, tried in zip(streams, tries, strict=True)]
        header = struct.pack(f"<{2 + len(packed)}I", len(streams[1]), len(streams[0]), *map(len, packed))
        frames.append(b"".join((header, *packed)))
    return frames, deflates


def _slices(ends: _Numbers) -> list[slice]:
    """The slices that end where these numbers say, one after the other."""
    return list(map(slice, (0, *ends[:-1].tolist()), ends.tolist()))


def changes(old: _Bytes, new: _Bytes, itemsize: int) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Positions of the elements that differ, in order, and what they were and are."""
    kind = f"u{itemsize}"
    body = len(old) // _WORD_BYTES * _WORD_BYTES
    these, those = old[:body].view(np.uint64), new[:body].view(np.uint64)
    words = np.flatnonzero(these != those)
    # Most words are equal, so elements are compared in those alone that are not.
    before, after = these.take(words).view(kind), those.take(words).view(kind)
    lanes = np.flatnonzero(before != after)
    shift = (_WORD_BYTES // itemsize).bit_length() - 1
    at = (words << shift).take(lanes >> shift)
    at += lanes & ((1 << shift) - 1)
    before, after = before.take(lanes), after.take(lanes)
    if body < len(old):
        these, those = old[body:].view(kind), new[body:].view(kind)
        lanes = np.flatnonzero(these != those)
        at = np.concatenate((at, lanes + body // itemsize))
        before, after = np.concatenate((before, these[lanes])), np.concatenate((after, those[lanes]))
    return at, before, after


def _gaps(at: _Numbers, ends: _Numbers, elements: int) -> tuple[_Bytes, _Numbers]:
    """The codes of positions, which increase, and where those of each piece end.

    ``ends``: where the positions of each piece of ``elements`` elements end.
    """
    gaps = np.diff(at, prepend=-1)
    gaps -= 1
    firsts = ends[:-1][ends[:-1] < ends[1:]]  # a piece counts from its own beginning
    gaps[firsts] = at[firsts] % elements
    far = np.flatnonzero(gaps >= _ESCAPE)
    if not len(far):
        return gaps.astype(np.uint8), ends
    more = np.zeros(len(at) + 1, np.int64)
    more[far + 1] = gaps[far] // _ESCAPE
    gaps[far] -= more[far + 1] * _ESCAPE
    before = np.cumsum(more)  # escapes before each position, its own not among them
    codes = np.full(len(at) + int(before[-1]), _ESCAPE, np.uint8)
    codes[before[1:] + np.arange(len(at))] = gaps
    return codes, ends + before[ends]


def _positions(codes: _Bytes, count: int, elements: int) -> _Numbers:
    """The positions that ``codes`` stand for. Raises `TransferFailed` unless there are ``count`` below ``elements``."""
    ends = codes != _ESCAPE
    at: _Numbers = np.cumsum(codes + ends.astype(np.int64))[ends]
    if len(at) != count or not ends[-1] or at[-1] > elements:
        raise TransferFailed(f"a delta is damaged: its positions are not {count} of {elements} elements")
    at -= 1
    return at


def _folded(before: _Numbers, after: _Numbers, itemsize: int) -> list[_Bytes]:
    """The planes of how far elements have moved, lowest byte first; moves of either sign become small numbers."""
    moved = (after - before).view(f"i{itemsize}")
    moved = (moved << 1) ^ (moved >> (8 * itemsize - 1))
    return list(np.ascontiguousarray(moved.view(np.uint8).reshape(-1, itemsize).T))


def _unfolded(planes: list[_Bytes], itemsize: int) -> _Numbers:
    folded = np.stack(planes, axis=1).reshape(-1).view(f"u{itemsize}")
    moved: _Numbers = (folded >> 1) ^ -(folded & 1)
    return moved


def _deflated(stream: _Bytes) -> bytes:
    """A stream, deflated if that pays."""
    raw = stream.tobytes()
    if len(raw) < _LEAST_DEFLATED:
        return raw
    # Runs of one byte and frequent bytes are all there is to find: searching for more takes longer and finds less.
    deflater = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    packed = deflater.compress(raw) + deflater.flush()
    return packed if len(packed) < len(raw) * _DEFLATED_SHARE else raw


def _inflated(stored: memoryview, nbytes: int) -> _Bytes:
    """A stream of ``nbytes`` bytes. Raises `TransferFailed` if ``stored`` holds anything else."""
    if len(stored) == nbytes:
        return np.frombuffer(stored, np.uint8)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        raw = inflater.decompress(stored, nbytes + 1)
    except zlib.error as error:
        raise TransferFailed(f"a delta is damaged: a stream of it does not inflate ({error})") from error
    if len(raw) != nbytes or not inflater.eof or inflater.unused_data:
        raise TransferFailed(f"a delta is damaged: a stream of it is not {nbytes} bytes long")
    return np.frombuffer(raw, np.uint8)


def _frame_bytes(rest: memoryview, itemsize: int) -> int:
    """The length of the frame that ``rest`` begins with. Raises `TransferFailed` if it ends before that."""
    nbytes = _U32.size
    if len(rest) >= nbytes and _U32.unpack_from(rest)[0]:
        nbytes = (3 + itemsize) * _U32.size
        if len(rest) >= nbytes:
            nbytes += sum(struct.unpack_from(f"<{1 + itemsize}I", rest, 2 * _U32.size))
    if len(rest) < nbytes:
        raise TransferFailed(f"a delta is damaged: it ends within a frame, {nbytes - len(rest)} bytes too early")
    return nbytes


def _apply_frame(piece: _Bytes, frame: memoryview, itemsize: int) -> None:
    count, codes, *stored = struct.unpack_from(f"<{3 + itemsize}I", frame)
    elements = len(piece) // itemsize
    # Bounds what a few bytes may inflate to.
    if count > elements or not count <= codes <= count + elements // _ESCAPE:
        raise TransferFailed(f"a delta is damaged: {count} changes, {codes} codes in a piece of {elements} elements")
    streams, at = list[_Bytes](), (3 + itemsize) * _U32.size
    for nbytes, size in zip(stored, (codes, *[count] * itemsize), strict=True):
        streams.append(_inflated(frame[at : at + nbytes], size))
        at += nbytes
    places = _positions(streams[0], count, elements)
    values = piece.view(f"u{itemsize}")
    values[places] += _unfolded(streams[1:], itemsize)
