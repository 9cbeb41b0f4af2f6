"""What of a push the ranks of an engine leave unread, and what of their models it leaves unwritten: both together.

A tensor that a rank does not read may be for another rank, or of no use to the engine; a parameter that nothing is
loaded into may have a default. But where all ranks leave a tensor unread that could be for such a parameter, the
loader has passed over it.

Where no list says what a complete push is, every parameter must be written as a whole, a buffer if it is written at
all, and every tensor must be read by some rank. A tied tensor may be left out only if the recording without it writes
all that the recording of the whole list does.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from weightsync.errors import ManifestMismatch, ManifestUnknown
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.rank_replies import Accepted
from weightsync.tensors.layout import listed


def packed(numbers: Iterable[int]) -> bytes:
    """A set of tensor numbers in a manifest, as a bit mask; bit n stands for tensor n."""
    bits = 0
    for number in numbers:
        bits |= 1 << number
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def passed_over(
    specs: Sequence[TensorSpec], unread: Collection[str], unwritten: Mapping[str, Collection[int]]
) -> dict[str, bytes]:
    """For each unwritten parameter, the unread tensors that could belong to it, as `packed`; none if there are none.

    ``unwritten`` are a rank's parameters, with the numbers of dimensions of what they are loaded from; none, if nothing
    of the push is. A tensor could be for a parameter of the same layer: what an engine skips on purpose are whole
    layers, of which its model has no parameter.
    """
    if not unwritten:
        return {}
    layers: dict[str, list[int]] = collections.defaultdict(list)
    for number, spec in enumerate(specs):
        if spec.name in unread:
            layers[_layer(spec.name)].append(number)
    found: dict[str, bytes] = {}
    for name, dimensions in unwritten.items():
        numbers = layers.get(_layer(name), ())
        fitting = [number for number in numbers if not dimensions or len(specs[number].shape) in dimensions]
        if fitting:
            found[name] = packed(fitting)
    return found


def _layer(name: str) -> str:
    """The first number in a name, which tells its layer; empty if there is none."""
    return next((part for part in name.split(".") if part.isdigit()), "")


def check_read(ranks: Sequence[Accepted], manifest: Sequence[TensorSpec] = ()) -> None:
    """Raise `ManifestMismatch`, by name, for tensors that no rank reads although an unwritten parameter may need them.

    An empty manifest is one that the ranks know; `ManifestUnknown` is raised if it is needed.
    """
    if unread := set(ranks[0].unread).intersection(*(rank.unread for rank in ranks)):
        raise ManifestMismatch(f"the push does not fit the engine's model: no rank loads {listed(unread)}")
    skipped = [int.from_bytes(rank.skipped, "little") for rank in ranks]
    everywhere = skipped[0]
    for bits in skipped:
        everywhere &= bits
    missing: set[int] = set()
    unwritten: set[str] = set()
    for rank in ranks:
        for name, packed_numbers in rank.unwritten.items():
            if both := int.from_bytes(packed_numbers, "little") & everywhere:
                missing.update(_numbers(both))
                unwritten.add(name)
    if not unwritten:
        return
    if not manifest:
        raise ManifestUnknown("the manifest is needed to name what is not loaded; send it")
    raise ManifestMismatch(
        f"the push does not fit the engine's model: nothing is loaded into {listed(unwritten)}, or not into all of it, "
        f"while no rank loads {listed(manifest[number].name for number in missing)}: the engine's loader passes over "
        "them without a word; start the engine without what renames or wraps these layers (LoRA on experts, for one)"
    )


def _numbers(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
