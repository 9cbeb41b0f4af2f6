"""The first push of a plan: the engine's own loader loads it into the standby, in slices, and both are compared."""

import subprocess
import sys

import pytest
import torch

from tests.unit.loaders import bits
from tests.unit.standbys import NAMES, Moves, checkpoint, push, ready, stage_of
from weightsync.engine.exchange import swap as swapping
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed

MIDDLE = NAMES[len(NAMES) // 2]


def really(tensor):
    """Whether a loader is given data, and not recorded."""
    return type(tensor) is torch.Tensor


def with_middle(act):
    """A loader that calls ``act(model)`` before it loads a tensor in the middle, if it is given data."""

    def load(model, weights):
        for name, tensor in weights:
            if name == MIDDLE and really(tensor):
                act(model)
            model.get_parameter(name).data.copy_(tensor)

    return load


def exactly(adapter, content):
    """Whether the parameters, as the model has them now, hold a content."""
    return all(bits(tensor) == bits(adapter.model.get_parameter(name)) for name, tensor in checkpoint(content).items())


def test_the_engine_serves_what_it_did_until_the_exchange(slices):
    adapter = Moves()
    with torch.no_grad():
        for name, tensor in checkpoint(7).items():
            adapter.model.get_parameter(name).copy_(tensor)
    loading, served = Loading(adapter), []
    assert push(loading, 1, between=lambda: served.append(adapter.holds())) > len(NAMES)
    assert set(served) == {7}
    assert (adapter.holds(), adapter.loads) == (1, 0)
    assert loading.status().pushes == 0, "the loader has loaded it"
    assert loading.undo("push 1")
    assert adapter.holds() == 7
    push(loading, 2)
    assert (adapter.holds(), loading.status().pushes) == (2, 1)


def test_what_is_processed_after_loading_goes_the_engines_way_and_has_no_plan():
    def load(model, weights):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor)
            if name == MIDDLE and really(tensor):
                model.layer_9.data.neg_()  # which no fake tensor shows

    adapter = Moves(load)
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
        assert bits(-adapter.model.layer_9) == bits(checkpoint(content)["layer_9"])
        assert bits(adapter.model.layer_8) == bits(checkpoint(content)["layer_8"])
    assert adapter.loads == 3
    assert "layer_9 is not what was recorded" in loading.path


def test_a_loader_that_fails_is_tried_again_in_the_pause(slices):
    fails = [True]

    def act(model):
        if fails:
            raise ValueError("not now")

    adapter = Moves(with_middle(act))
    loading, served = Loading(adapter), []
    staged = stage_of(loading, 1, "push 1")
    ready(loading, staged, between=lambda: served.append(exactly(adapter, 1)))
    assert not any(served)
    assert not adapter.model.layer_0.any()
    assert "ValueError: not now" in loading.standby.why
    fails.clear()
    loading.load(staged, "push 1")
    assert (adapter.holds(), adapter.loads) == (1, 1)
    for content in (2, 3):
        push(loading, content)
        assert adapter.holds() == content


def test_a_parameter_that_the_loader_replaces_is_put_back_between_slices(slices):
    """Its recording showed nothing of that."""

    def act(model):
        model.layer_3 = torch.nn.Parameter(torch.ones(30, 4), requires_grad=False)

    adapter = Moves(with_middle(act))
    loading = Loading(adapter)
    before = adapter.model.layer_3
    ready(loading, stage_of(loading, 1, "push 1"), between=lambda: None)
    assert adapter.model.layer_3 is before
    assert not adapter.model.layer_3.any()
    assert "the engine's loader replaces parts of the model" in loading.standby.why
    assert not loading.standby.holds("push 1")


def test_it_is_called_off_in_the_middle(slices):
    adapter = Moves()
    loading = Loading(adapter)
    for calls in (1, 10, 30):
        staged = stage_of(loading, 1, f"push {calls}")
        for _ in range(calls):
            with pytest.raises(Unfinished):
                loading.prepare_load(staged, staged.push)
        loading.standby.stop()
        assert not adapter.model.layer_0.any()
        assert not adapter.model.layer_39.any()
    for content in (2, 3):
        push(loading, content)
        assert adapter.holds() == content


@pytest.mark.parametrize("number", [0, 1, len(NAMES) // 2, len(NAMES) - 1])
def test_an_exchange_that_fails_between_slices_changes_nothing(slices, monkeypatch, number):
    adapter = Moves()
    loading = Loading(adapter)
    staged = stage_of(loading, 1, "push 1")
    with pytest.raises(Unfinished):
        loading.prepare_load(staged, "push 1")
    swap, left = swapping._set_data, [number]

    def failing(*both):
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError("no room")
        swap(*both)

    monkeypatch.setattr(swapping, "_set_data", failing)
    ready(loading, staged)
    assert "MemoryError: no room" in loading.standby.why
    assert not any(adapter.model.get_parameter(name).any() for name in NAMES)
    monkeypatch.undo()
    for content in (2, 3):
        push(loading, content)
        assert adapter.holds() == content


TORN = """
import torch
from tests.unit import standbys
from weightsync.engine.exchange import slices, swap
from weightsync.engine.loading import standby
from weightsync.engine.loading.loader import Loading

slices.SLICE_S = 0.0
adapter = standbys.Moves()
loading = Loading(adapter)
staged = standbys.stage_of(loading, 1, "push")
try:
    loading.prepare_load(staged, "push")
except slices.Unfinished:
    pass

class Stuck(torch.nn.Parameter):
    data = property(lambda self: torch.zeros(30, 4), lambda self, value: 1 / 0)

adapter.model.layer_9.__class__ = Stuck
print("serves", flush=True)
standbys.ready(loading, staged)
print("serves on", flush=True)
"""


def test_a_model_that_is_torn_between_slices_is_never_served():
    run = subprocess.run([sys.executable, "-c", TORN], capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (1, "serves\n"), run.stderr
    assert "the engine has to be restarted" in run.stderr


def test_a_stage_that_is_overwritten_meanwhile_is_noticed_before_anything_changes():
    class Checked(Staged):
        def check(self):
            raise TransferFailed("the trainer has written there")

    adapter = Moves()
    loading = Loading(adapter)
    with pytest.raises(TransferFailed, match="the trainer has written there"):
        ready(loading, stage_of(loading, 1, "push 1", kind=Checked))
    assert not any(adapter.model.get_parameter(name).any() for name in NAMES)
