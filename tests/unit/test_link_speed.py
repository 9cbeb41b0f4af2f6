"""What a rank reads depends on how fast bytes arrive."""

import threading

import pytest
import torch

from tests.unit.loaders import CPU, AdapterOf, Model, push_into
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Stages, _speed
from weightsync.protocol.http import UpdateRequest
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset
from weightsync.transports.base import Bucket

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
    ("arrived", "speed"),
    [
        ([0.0, 5.0, 5.1, 5.2, 5.3, 5.4, 5.5], 1e5),
        ([0.0, 0.1, 0.2, 0.3, 3.3, 6.3, 9.3, 12.3, 15.3], 1e5),  # the sender had not packed most
        ([0.0, 0.1, 0.2, 0.3, 0.4], 0.0),
        ([0.0], 0.0),
    ],
)
def test_the_speed_is_that_of_the_buckets_that_need_not_wait(arrived, speed):
    assert _speed(arrived, 10_000) == pytest.approx(speed)


class Paced:
    """An `Incoming` whose buckets come one by one."""

    whole, arena, lingers = None, "arena", False

    def __init__(self, layout, bucket_bytes):
        self._layout, self._size = layout, bucket_bytes

    def buckets(self, stage):
        for number in range(self._layout.buckets(self._size)):
            threading.Event().wait(0.02)
            yield Bucket(number, stage[number * self._size :][: self._size], ())


@pytest.mark.parametrize("boxes", [{}, {0: Box((0,), (2048,))}])
def test_a_rank_measures_pushes_that_it_gets_in_full(boxes):
    layout = Layout([spec_of("a", torch.zeros(4096, dtype=torch.uint8))])
    stages, request = Stages(0, CPU), UpdateRequest("p", "", "s", 512, 9.0, layout.specs, verify="off")
    stages.fill(Paced(layout, 512), request, Subset(layout, boxes), None)
    assert (0 < stages.bytes_per_s <= 512 / 0.02) == (not boxes)
