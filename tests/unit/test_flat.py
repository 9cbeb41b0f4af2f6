"""Ranges of flattened tensors as boxes, and the parts that FSDP1 and ZeRO-3 leave to a process."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.errors import SourceError
from weightsync.sources import open_source
from weightsync.sources.flat import FlatPart
from weightsync.tensors.boxes import Box, boxes_of_range, cut_of, narrowed


@st.composite
def ranges(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    low, high = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, low, high


@given(ranges())
def test_the_boxes_of_a_range_have_its_elements_in_order(found):
    shape, low, high = found
    whole = torch.arange(math.prod(shape)).view(shape)
    boxes = boxes_of_range(shape, low, high)
    held = [value for box in boxes for value in narrowed(whole, *box).reshape(-1).tolist()]
    assert held == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_a_part_shows_the_values_of_its_boxes(found):
    shape, low, high = found
    whole = torch.arange(math.prod(shape)).view(shape)
    padded = torch.cat([torch.tensor([-1]), whole.view(-1)[low:high], torch.tensor([-1])])
    part = FlatPart(padded[1:-1], shape, low, "w")
    assert [one.box for one in part.boxes] == boxes_of_range(shape, low, high)
    assert all(torch.equal(one.of(part.held), narrowed(whole, *one.box)) for one in part.boxes)


@given(ranges(), st.data())
def test_a_view_of_a_part_shows_the_values_of_the_view(found, data):
    shape, low, high = found
    whole = torch.arange(math.prod(shape)).view(shape)
    spans = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    view = narrowed(whole, [a for a, _ in spans], [b - a for a, b in spans])
    cut = cut_of(shape, view.shape, view.stride(), view.storage_offset())
    part = FlatPart(whole.view(-1)[low:high], shape, low, "w")
    seen = sorted(value for one in cut.local(part.boxes) for value in one.of(part.held).reshape(-1).tolist())
    assert seen == [value for value in sorted(view.reshape(-1).tolist()) if low <= value < high]


class Wrapper(torch.nn.Module):
    """What ZeRO-3 leaves of a module, of which this process has nothing in memory."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(0))
        self.w.ds_tensor = torch.empty(2)
        self.w.ds_tensor.status = type("Status", (), {"name": "NOT_AVAILABLE"})


def test_a_part_that_is_on_a_disk_is_named():
    with pytest.raises(SourceError, match=r"w: ZeRO-3 has moved this process's part to a disk"):
        open_source(Wrapper())


def test_an_empty_part_has_no_boxes():
    assert FlatPart(torch.empty(0), (3, 4), 0, "w").boxes == ()
    assert boxes_of_range((3, 4), 4, 8) == [Box((1, 0), (1, 4))]
