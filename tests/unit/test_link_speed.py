"""What a rank reads depends on how fast bytes arrive."""

import pytest
import torch

from tests.unit.loaders import AdapterOf, Model, push_into
from weightsync.engine.loading.loader import Loading
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import spec_of
from weightsync.transports.nixl.incoming import speed

#: In bytes a second.
SLOW, FAST = 50e6, 3e9


def left_half(model, weights):
    """A loader that keeps half of the columns, as one rank of two does."""
    for _, tensor in weights:
        model.left.data.copy_(tensor[:, : tensor.shape[1] // 2])


@pytest.fixture
def loading():
    """What a rank has once it trusts its load plan, and the layout of its pushes."""
    checkpoint = {"a": torch.randn(64, 1024)}
    model = Model({"left": torch.zeros(64, 512)})
    found = Loading(AdapterOf(model, left_half, [spec_of("a", checkpoint["a"])]))
    return found, push_into(found, checkpoint).layout


def test_over_a_slow_link_only_the_columns_that_are_kept_are_read(loading):
    found, layout = loading
    assert found.subset(layout).name == ""
    assert found.subset(layout, SLOW).box(0) == Box((0, 0), (64, 512))


def test_the_first_push_decides_and_no_later_one_changes_it(loading):
    found, layout = loading
    assert found.subset(layout, FAST).name == ""
    assert found.subset(layout, SLOW).name == ""


@pytest.mark.parametrize(
    ("arrived", "found"),
    [
        ([5.0, 5.1, 5.2, 5.3, 5.4, 5.5], 1e5),
        ([0.1, 0.2, 0.3, 3.3, 6.3, 9.3, 12.3, 15.3], 1e5),  # the sender had not packed most
        ([0.1, 0.2, 0.3, 0.4, 0.5], 0.0),
        ([0.0], 0.0),
        ([], 0.0),
    ],
)
def test_the_speed_is_that_of_the_buckets_that_need_not_wait(arrived, found):
    assert speed(arrived, 10_000) == pytest.approx(found)
