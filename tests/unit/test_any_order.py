"""Streams in any order: what a trainer packs, a rank puts together again; rubbish in announcements is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import TransferFailed
from weightsync.tensors.any_order import Arrival, Order
from weightsync.tensors.layout import ALIGN_BYTES, Layout, spec_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.packing import Packer


@st.composite
def streams(draw):
    """Tensors with few or many bytes, an order for them, and the size and the number of buckets."""
    sizes = draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12))
    return (
        sizes,
        draw(st.permutations(range(len(sizes)))),
        draw(st.integers(1, 6)) * ALIGN_BYTES,
        draw(st.integers(2, 4)),
    )


@given(streams())
def test_a_rank_gets_every_bit(made):
    sizes, order, bucket_bytes, slots = made
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    layout = Layout([spec_of(f"t{number}", tensor) for number, tensor in enumerate(tensors)])
    arena = torch.zeros(slots * bucket_bytes, dtype=torch.uint8)
    stage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    packer = Packer(layout, arena, bucket_bytes, slots, "xxh3_64", Wanted([Subset(layout, {})]))
    arrival, place, ended, count = Arrival(layout), Order(), [], 0
    pairs = (((place.placed(layout.entries[number]),), tensors[number]) for number in order)
    for bucket in packer.fill_pairs(pairs, lambda number: None):
        assert bucket.number == count
        count += 1
        at = bucket.number % slots * bucket_bytes
        data = arena[at : at + min(bucket_bytes, layout.nbytes - bucket.number * bucket_bytes)]
        for piece in arrival.pieces(bucket.begins, data.numel()):
            piece.entry.raw(stage)[piece.start : piece.start + piece.nbytes] = data[piece.at : piece.at + piece.nbytes]
            ended += [piece.entry.number] if piece.last else []
    arrival.end()
    assert count == layout.buckets(bucket_bytes)
    assert ended == [number for number in order if sizes[number]]
    for entry, tensor in zip(layout.entries, tensors, strict=True):
        assert torch.equal(entry.raw(stage), tensor)


LAYOUT = Layout([spec_of(f"t{number}", torch.zeros(700, dtype=torch.int8)) for number in range(3)])


@pytest.mark.parametrize(
    ("announced", "said"),
    [
        ([((7,), 512)], "tensor 7 was announced, and has come already or is not part of the push"),
        ([((-1,), 512)], "tensor -1 was announced"),
        ([((0,), 1024), ((0,), 1024)], "tensor 0 was announced, and has come already"),
        ([((0, 1), 512)], "t1 was announced in a bucket that has no room for it"),
        ([((0, 1), 1024)], "t1 was announced in a bucket that has no room for it"),
        ([((0,), 1024), ((1,), 1024)], "the stream ended without t2"),
        ([((0,), 1024), ((1,), 1024), ((2,), 512)], "the stream ended within t2"),
        ([((), 512)], "the stream ended without t0, t1, t2"),
    ],
)
def test_announcements_that_cannot_be_are_refused(announced, said):
    with pytest.raises(TransferFailed, match=said):
        receive(announced)


def receive(announced):
    arrival = Arrival(LAYOUT)
    for begins, nbytes in announced:
        list(arrival.pieces(begins, nbytes))
    arrival.end()
