"""Manifests, and the stream of bytes in which a checkpoint crosses.

The stream is the tensors in the source's order, each aligned to 512 bytes. Both sides compute where each tensor lies
from the manifest alone, so a bucket is announced by its number only. A bucket is a window of the stream; a tensor may
extend over several.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from weightsync.errors import ManifestMismatch
from weightsync.protocol.codec import Shape, to_json
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box
from weightsync.tensors.scattered import Stream

#: Every tensor starts at a multiple of this many bytes in the stream, which suits every dtype and vector load.
ALIGN_BYTES: Final = 512

#: dtypes that can be sent, by torch's name without the prefix.
DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name)
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    )
    if hasattr(torch, name)
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
#: Names of the dtypes between which a sender casts.
CASTABLE: Final = frozenset(("float64", "float32", "bfloat16", "float16"))
#: Pairs of dtypes of which the second holds every value of the first, so that such a cast loses nothing.
WIDER: Final = frozenset(
    (narrow, wide) for wide in ("float64", "float32") for narrow in ("float32", "bfloat16", "float16") if narrow != wide
)

#: How many names an error lists before "and N more", and how many characters of each.
_LISTED: Final = 5
_LISTED_CHARS: Final = 300


#: Advice on the two most common mismatches: transformers drops layers, and tensors have a dtype that is not cast.
_IF_MISSING: Final = (
    "transformers drops what it has no module for, such as layers for multi-token prediction: leave them as the engine "
    "has them with allow_missing, push a mapping that has them, or start the engine from a folder without them"
)
_IF_CAST: Final = (
    "a push casts between float64, float32, bfloat16 and float16, where the engine only copies a tensor; convert "
    "others first, as in tensor.to(torch.bfloat16)"
)


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor. Raises `ManifestMismatch`, naming it, if its dtype cannot be sent."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise ManifestMismatch(f"{name}: dtype {tensor.dtype} cannot be sent; supported are {', '.join(DTYPES)}")
    return TensorSpec(name, dtype, tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in messages."""
    return str(dtype).removeprefix("torch.")


def align(nbytes: int) -> int:
    """Round up to a multiple of `ALIGN_BYTES`."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Entry(NamedTuple):
    """One tensor in the stream: ``offset`` and ``nbytes`` in bytes, ``number`` is its index in the manifest."""

    spec: TensorSpec
    dtype: torch.dtype
    offset: int
    nbytes: int
    number: int

    def raw(self, stream: Stream) -> torch.Tensor:
        """All bytes of the tensor, a slice of ``stream``."""
        return stream[self.offset : self.offset + self.nbytes]

    def view(self, stream: Stream) -> torch.Tensor:
        """The tensor itself, as a view of ``stream``."""
        return self.raw(stream).view(self.dtype).view(self.spec.shape)


class Piece(NamedTuple):
    """What a bucket holds of one tensor: its bytes ``start`` to ``start + nbytes``, at offset ``at`` of the bucket.

    ``last``: the tensor ends with this piece. A tensor without elements has one piece of no bytes.
    """

    entry: Entry
    start: int
    at: int
    nbytes: int
    last: bool


Table = tuple[tuple[tuple[int, tuple[Shape, Shape]], ...], ...]
"""The cells of each memory domain of a stream: number of the tensor, start and shape; empty if there is one domain."""


class Cell(NamedTuple):
    """A box of a tensor, which lies at byte ``at`` of the arena of a memory domain, by its number."""

    domain: int
    box: Box
    at: int


class Layout:
    """Where each tensor of a manifest lies in the stream. Raises `ManifestMismatch` for an invalid dtype or shape.

    Tensors start at multiples of `ALIGN_BYTES`. Every ``bucket_bytes`` a new bucket begins, even in the middle of a
    tensor; in a stage that holds the whole stream, every tensor is contiguous.
    """

    #: What each memory domain holds of it, if there are several, see `Table`.
    table: Table = ()

    def __init__(self, manifest: Sequence[TensorSpec]):
        self.specs = tuple(manifest)
        self.entries: list[Entry] = []
        offset = 0
        for spec in manifest:
            dtype = DTYPES.get(spec.dtype)
            if dtype is None or any(size < 0 for size in spec.shape):
                raise ManifestMismatch(f"{spec.name}: dtype {spec.dtype}, shape {spec.shape} is not a tensor")
            nbytes = math.prod(spec.shape) * dtype.itemsize
            self.entries.append(Entry(spec, dtype, offset, nbytes, len(self.entries)))
            offset += align(nbytes)
        self.nbytes = offset
        self._ends = [entry.offset + entry.nbytes for entry in self.entries]
        #: Bytes of the tensors, without the padding between them.
        self.payload_bytes = sum(entry.nbytes for entry in self.entries)

    @functools.cached_property
    def name(self) -> str:
        """A hash of the manifest: equal layouts have equal names."""
        return hashlib.blake2b(to_json(self.specs), digest_size=16).hexdigest()

    def cells(self, number: int) -> Sequence[Cell]:
        """Where the parts of a tensor lie, if several memory domains hold the stream; otherwise nothing."""
        return ()

    def domain_bytes(self, domain: int) -> int:
        """The size of a memory domain's arena; without several domains there is one, which holds the stream."""
        return self.nbytes

    def buckets(self, bucket_bytes: int) -> int:
        """Number of buckets; 1 for an empty stream."""
        return max(1, -(-self.nbytes // bucket_bytes))

    def pieces(self, index: int, bucket_bytes: int) -> Iterator[Piece]:
        """What bucket ``index`` holds, in the order of the stream."""
        low, high = index * bucket_bytes, min((index + 1) * bucket_bytes, self.nbytes)
        final = index == self.buckets(bucket_bytes) - 1
        at = bisect.bisect_left(self._ends, low) if index else 0
        for entry in itertools.islice(self.entries, at, None):
            if entry.offset >= high and not final:
                return
            end = entry.offset + entry.nbytes
            start = max(entry.offset, low)
            if entry.nbytes == 0 or end > low:
                yield Piece(entry, start - entry.offset, start - low, max(0, min(end, high) - start), end <= high)


def cut_run(at: int, nbytes: int, bucket_bytes: int) -> Iterator[tuple[int, int, int]]:
    """What each bucket has of ``nbytes`` bytes from ``at`` on: number of the bucket, offset in the stream, bytes."""
    end = at + nbytes
    while at < end:
        bucket = at // bucket_bytes
        upto = min(end, (bucket + 1) * bucket_bytes)
        yield bucket, at, upto - at
        at = upto


def named(items: Iterable[str]) -> tuple[str, ...]:
    """The first few names in order, each shortened if it is long."""
    names = sorted(items)[:_LISTED]
    return tuple(name if len(name) <= _LISTED_CHARS else name[:_LISTED_CHARS] + "..." for name in names)


def listed(items: Iterable[str]) -> str:
    """Names for an error message: the first few in order, each shortened if it is long, and how many more there are."""
    names = list(items)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(named(names)) + more


def check_manifest(pushed: Sequence[TensorSpec], expected: Sequence[TensorSpec], optional: Iterable[str] = ()) -> None:
    """Raise `ManifestMismatch`, naming tensors, unless a push has exactly the tensors of the engine's checkpoint.

    ``optional`` names may be missing from the push (the second half of a tied pair).
    """
    want = {spec.name: spec for spec in expected}
    have: dict[str, TensorSpec] = {}
    faults: list[str] = []
    twice = {spec.name for spec in pushed if spec.name in have or have.update({spec.name: spec})}
    if twice:
        faults.append(f"sent twice: {listed(twice)}")
    if unknown := have.keys() - want.keys():
        faults.append(f"unknown to the engine: {listed(unknown)}")
    if missing := want.keys() - have.keys() - set(optional):
        faults.append(f"missing: {listed(missing)} ({_IF_MISSING})")
    both = [(have[name], want[name]) for name in have.keys() & want.keys()]
    if shapes := [(ours, theirs) for ours, theirs in both if ours.shape != theirs.shape]:
        faults.append("wrong shape: " + _pairs(shapes, "shape"))
    if dtypes := [(ours, theirs) for ours, theirs in both if ours.dtype != theirs.dtype]:
        faults.append(_wrong_dtypes(dtypes))
    if faults:
        raise ManifestMismatch(
            f"the push does not fit the engine's model ({len(have)} tensors sent, {len(want)} expected): "
            + "; ".join(faults)
        )


def wrong_dtypes(pairs: Sequence[tuple[TensorSpec, TensorSpec]]) -> ManifestMismatch:
    """The error of tensors whose dtype is not the engine's: pairs of what was pushed and what is expected."""
    return ManifestMismatch(f"the push does not fit the engine's model: {_wrong_dtypes(pairs)}")


def _wrong_dtypes(pairs: Sequence[tuple[TensorSpec, TensorSpec]]) -> str:
    return f"wrong dtype ({_IF_CAST}): {_pairs(pairs, 'dtype')}"


def _pairs(pairs: Iterable[tuple[TensorSpec, TensorSpec]], what: str) -> str:
    return listed(
        f"{ours.name} ({getattr(ours, what)}, the engine has {getattr(theirs, what)})" for ours, theirs in pairs
    )


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """BLAKE2b hash, in hex, of the names, dtypes, shapes and bytes of tensors, in order of their names."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def differing(these: Iterable[tuple[str, torch.Tensor]], those: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of the tensors, sorted, that are not equal in both, as `digest_of` sees them, or are in one only."""
    first, second = ({name: digest_of([(name, tensor)]) for name, tensor in tensors} for tensors in (these, those))
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
