"""The stream of several memory domains, where all of their memory is mapped."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.divisions import boxes_of, divisions, filled
from weightsync.errors import TransferFailed
from weightsync.protocol.http import TensorSpec
from weightsync.tensors import digest
from weightsync.tensors.boxes import narrowed, whole
from weightsync.tensors.divided import Divided, block, part
from weightsync.tensors.domains import DividedLayout, divide
from weightsync.tensors.scattered import Parts, pieces, spans
from weightsync.tensors.subset import Subset


def mapped(division):
    """The stream of a division, in one piece, and as the memory of its domains."""
    specs, held = division
    assume(any(held[1:]))
    layout = DividedLayout(specs, divide(held))
    stream, arenas = filled(layout, layout.table)
    return layout, stream, Divided(layout, [arena if arena.numel() else None for arena in arenas])


@given(divisions(), st.data())
def test_slices_boxes_and_digests_are_those_of_the_whole_stream(division, data):
    layout, stream, divided = mapped(division)
    assert divided.numel() == stream.numel()
    for entry in layout.entries:
        first = data.draw(st.integers(0, entry.nbytes))
        end = data.draw(st.integers(first, entry.nbytes))
        at = slice(entry.offset + first, entry.offset + end)
        assert torch.equal(divided[at], stream[at])
        found = pieces(divided, at.start, end - first) if first < end else []
        assert sum(piece.numel() for piece in found) == end - first
        assert torch.equal(entry.view(divided), entry.view(stream))
        box = data.draw(boxes_of(entry.spec))
        assert torch.equal(part(divided, entry, box), narrowed(entry.view(stream), *box))
        assert torch.equal(part(divided, entry, None), entry.view(stream))
        made = torch.zeros_like(entry.view(stream))
        for common, held in divided.parts(entry, whole(entry.spec)):
            narrowed(made, *common).add_(held)
            assert inside(held, divided)
        assert torch.equal(made, entry.view(stream))
    subset = Subset(layout, {number: data.draw(boxes_of(spec)) for number, spec in enumerate(layout.specs)})
    for entry in layout.entries:
        for box in subset.hashed(entry.number):
            needed = narrowed(entry.view(stream), *(box or whole(entry.spec)))
            assert hashed(part(divided, entry, box)) == hashed(needed)
            place = block(divided, entry, box)
            assert place is None or inside(part(divided, entry, box), divided)
            if place is not None:
                assert (place.address, place.nbytes) == (part(divided, entry, box).data_ptr(), needed.nbytes)


def hashed(tensor):
    return digest.hashed("xxh3_64", tensor).value()


def inside(tensor, stream):
    return any(low <= tensor.data_ptr() < high for low, high in spans(stream))


def one_tensor(revoked):
    """One tensor of 8 bytes, half of it in an arena and half in parameters of another process."""
    layout = DividedLayout([TensorSpec("a", "uint8", (8,))], (((0, ((0,), (4,))),), ((0, ((4,), (4,))),)))
    parameters = Parts([0], [torch.full((4,), 2, dtype=torch.uint8)], 512, revoked)
    return Divided(layout, [torch.ones(512, dtype=torch.uint8), parameters])


def test_memory_that_one_process_has_revoked_is_refused():
    revoked = torch.zeros(1)
    divided = one_tensor(revoked)
    assert divided[0:8].tolist() == [1] * 4 + [2] * 4
    divided.check()
    revoked[0] = 1
    with pytest.raises(TransferFailed, match="may have changed its parameters"):
        divided.check()


@pytest.mark.parametrize(("first", "end"), [(0, 9), (8, 9), (512, 513)])
def test_bytes_that_no_process_holds_are_refused(first, end):
    with pytest.raises(TransferFailed, match=f"bytes {first} to {end} of the stream do not lie in any rank's memory"):
        one_tensor(torch.zeros(1)).pieces(first, end)
