"""The stream of several memory domains, where all of their memory is mapped."""

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.unit.divisions import boxes_of, divisions, filled
from tests.unit.loaders import Model, divided, plan_for
from weightsync.errors import TransferFailed
from weightsync.protocol.http import TensorSpec
from weightsync.tensors import digest
from weightsync.tensors.boxes import narrowed, whole
from weightsync.tensors.divided import Divided, block, part
from weightsync.tensors.domains import DividedLayout, divide
from weightsync.tensors.scattered import Parts, pieces, spans
from weightsync.tensors.subset import Subset


def mapped(division, apart):
    """The stream of a division, in one piece, and as the memory of its domains; ``apart``: each part in its own."""
    specs, held = division
    assume(any(held[1:]))
    separate = tuple(tuple((number, tuple(box)) for number, box in own) for own in held)
    layout = DividedLayout(specs, separate if apart else divide(held))
    stream, arenas = filled(layout, layout.table)
    memories = list(arenas)
    for domain, arena in enumerate(arenas if apart else ()):
        cells = [cell for entry in layout.entries for cell in layout.cells(entry.number) if cell.domain == domain]
        starts = sorted(cell.at for cell in cells)
        parts = [arena[at:end].clone() for at, end in itertools.pairwise([*starts, arena.numel()])]
        memories[domain] = Parts(starts, parts, arena.numel(), torch.zeros(1)) if parts else arena
    return layout, stream, Divided(layout, [memory if memory.numel() else None for memory in memories])


@given(divisions(), st.booleans(), st.data())
def test_slices_boxes_and_digests_are_those_of_the_whole_stream(division, apart, data):
    layout, stream, divided = mapped(division, apart)
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


@given(divisions(), st.data())
def test_copied_bucket_by_bucket_it_is_the_whole_stream(division, data):
    layout, stream, divided = mapped(division, apart=False)
    copied, at = torch.zeros_like(stream), 0
    while at < stream.numel():
        end = data.draw(st.integers(at + 1, stream.numel()))
        for first, held in divided.held(at, end):
            assert at <= first < first + held.numel() <= end
            assert inside(held, divided)
            copied[first : first + held.numel()] = held
        at = end
    for entry in layout.entries:
        assert torch.equal(entry.view(copied), entry.view(stream))


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


@pytest.mark.parametrize("place", [0, 1])
def test_a_slice_that_is_no_box_is_copied_and_sampled(place):
    """A loader whose slices of a tensor are no boxes, of a tensor in two parts and of one in a single part."""

    def every_other(model, weights):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor.view(12, 2)[:, 0])

    checkpoint = {name: torch.randn(4, 6) for name in ("cut", "whole")}
    model = Model({name: torch.zeros(12) for name in checkpoint})
    plan, stage = plan_for(model, every_other, checkpoint)
    numbers = iter([2, 0, 0, 0, 1, 0, 0, 0])  # the first is cut after its second row
    divided_stage = divided(plan.layout, stage, lambda count: next(numbers, place) % count)
    plan.replay(divided_stage)
    for name, tensor in checkpoint.items():
        assert torch.equal(model.get_parameter(name).data, tensor.view(12, 2)[:, 0])
    assert plan.differs(divided_stage) == plan.strays(divided_stage) == ""
    for name in checkpoint:
        model.get_parameter(name).data.add_(1)
        assert name in {plan.strays(divided_stage) for _ in range(4)}
        plan.replay(divided_stage)
