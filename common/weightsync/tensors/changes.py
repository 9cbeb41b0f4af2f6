"""What has changed between two versions of a stream, as a stream of its own: `DeltaSpec` says what is in it.

It is made of both versions, and applied where the older one lies, as it arrives. What comes of it is verified as if it
had crossed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec
import torch

from weightsync.errors import TransferFailed
from weightsync.protocol.deltas import Changed, DeltaSpec, Index, unpack_index
from weightsync.protocol.http import TensorSpec, UpdateRequest
from weightsync.tensors import delta, native_copy
from weightsync.tensors.layout import Entry, Layout

#: Changes that take more than this share of the stream do not pay: making and applying them takes time, too.
_MOST_SHARE: Final = 0.75
#: Threads share the pieces of a tensor that is more than one of so many parts of what each has to do; of others each
#: takes some.
_PARTS: Final = 4
_T = TypeVar("_T")
_R = TypeVar("_R")


class Change(NamedTuple):
    """What has changed in a tensor: its delta, or all of it (1-D uint8)."""

    entry: Entry
    content: bytes | torch.Tensor

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.content)

    @property
    def described(self) -> Changed:
        """What the index says of it."""
        return Changed(self.entry.number, self.nbytes, not isinstance(self.content, bytes))


def expected(layout: Layout, old: torch.Tensor, new: torch.Tensor) -> float:
    """The share of a stream that its changes would take, by samples of its larger tensors: 1 if they would not pay."""
    sampled = nbytes = 0.0
    for entry in layout.entries:
        if entry.nbytes >= delta.LEAST_SAMPLED:
            share = delta.sampled_share(entry.raw(old), entry.raw(new), entry.dtype.itemsize)
            sampled += entry.nbytes * (share if share <= delta.MOST_SHARE else 1.0)
            nbytes += entry.nbytes
    share = sampled / nbytes if nbytes else 0.0
    return share if share <= _MOST_SHARE else 1.0


def find(layout: Layout, old: torch.Tensor, new: torch.Tensor) -> list[Change] | None:
    """What has changed from ``old`` to ``new``, streams in host memory (1-D uint8), by the order of their tensors.

    None if it takes so much that sending ``new`` pays more.
    """

    def changed(entry: Entry) -> Change | None:
        before, after = entry.raw(old), entry.raw(new)
        made = delta.encode(before, after, entry.dtype.itemsize)
        return Change(entry, after if made is None else made) if made != b"" else None

    found = [one for one in _each(changed, layout.entries, lambda entry: entry.nbytes) if one is not None]
    return found if sum(one.nbytes for one in found) <= layout.payload_bytes * _MOST_SHARE else None


def layout_of(spec: DeltaSpec) -> Layout:
    """The layout of a stream of changes."""
    return Layout([TensorSpec("index", "uint8", (spec.index_nbytes,)), TensorSpec("changes", "uint8", (spec.nbytes,))])


def crossing(request: UpdateRequest) -> UpdateRequest:
    """A request as the transport sees it: with the buckets of what crosses."""
    if request.delta is msgspec.UNSET:
        return request
    size, slots = request.delta.bucket_bytes, request.delta.slots
    return msgspec.structs.replace(request, bucket_bytes=size, slots=slots, parts=False)


def write(index: bytes, changes: Iterable[Change], layout: Layout, stream: torch.Tensor) -> None:
    """Fill ``stream`` (1-D uint8), whose layout is that of `layout_of`."""
    head, body = layout.entries
    head.raw(stream).copy_(_bytes(index))
    at, target = 0, body.raw(stream)
    for one in changes:
        content = _bytes(one.content) if isinstance(one.content, bytes) else one.content
        target[at : at + one.nbytes].copy_(content)
        at += one.nbytes


def read_index(packed: torch.Tensor) -> Index:
    """The index that the first tensor of a stream is (1-D uint8). Raises `TransferFailed` if it is none."""
    try:
        return unpack_index(packed.numpy().tobytes())
    except msgspec.MsgspecError as error:
        raise TransferFailed(f"the index of what has changed cannot be read: {error}") from error


class Applying:
    """Turns a version of ``layout`` into the next one, as changes arrive.

    Raises `TransferFailed` if ``index`` contradicts itself, or is of changes that do not take ``nbytes``.
    """

    def __init__(self, index: Index, layout: Layout, nbytes: int):
        self._layout = layout
        #: Every tensor that changed: where its changes are among the others, and whether they are all of it.
        self._work: list[tuple[Entry, slice, bool]] = []
        self._done = at = 0
        number = -1
        for one in index.changed:
            if not number < one.number < len(layout.entries):
                raise TransferFailed(f"the index of what has changed names tensor {one.number} after {number}")
            entry, number = layout.entries[one.number], one.number
            if one.whole and one.nbytes != entry.nbytes:
                raise TransferFailed(f"all of {entry.spec.name} takes {one.nbytes} bytes, by the index")
            self._work.append((entry, slice(at, at + one.nbytes), one.whole))
            at += one.nbytes
        if at != nbytes:
            raise TransferFailed(f"what has changed takes {at} bytes by the index, and {nbytes} were sent")

    def apply(self, body: torch.Tensor, arrived: int, stage: torch.Tensor, check: Callable[[], None]) -> int:
        """Apply what has arrived, the first ``arrived`` bytes of ``body``; returns up to where ``stage`` is the next
        version, in bytes.

        ``check`` is called for every tensor, and may raise. Raises `TransferFailed` if a delta is damaged, or of
        another version.
        """
        ready = itertools.takewhile(lambda item: item[1].stop <= arrived, self._work[self._done :])
        work = list(ready)

        def change(item: tuple[Entry, slice, bool]) -> None:
            entry, where, whole = item
            check()
            if whole:
                entry.raw(stage).copy_(body[where])
                return
            try:
                delta.apply(body[where].numpy().data, entry.raw(stage), entry.dtype.itemsize)
            except TransferFailed as error:
                raise TransferFailed(f"{entry.spec.name}: {error.message}") from error

        _each(change, work, lambda item: item[0].nbytes)
        self._done += len(work)
        return self._work[self._done][0].offset if self._done < len(self._work) else self._layout.nbytes


def _each(act: Callable[[_T], _R], items: Sequence[_T], nbytes: Callable[[_T], int]) -> list[_R]:
    """The results of ``act``, in order; several threads share large items, or each takes small ones."""
    sizes = [*map(nbytes, items)]
    most = sum(sizes) // (_PARTS * native_copy.most_threads())
    small = [number for number, size in enumerate(sizes) if size <= most]
    found = dict(zip(small, native_copy.each(lambda number: act(items[number]), small), strict=True))
    return [found[number] if number in found else act(item) for number, item in enumerate(items)]


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
