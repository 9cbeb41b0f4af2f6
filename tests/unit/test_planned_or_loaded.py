"""Where no load plan can fill a standby, the engine's loader loads a second model."""

import pytest

from tests.unit.loaders import bits, by_name
from tests.unit.standbys import Moves, by_name_but_half_of_one, checkpoint, push
from weightsync.engine.adapter import StandbyHooks
from weightsync.engine.loading.loader import Loading
from weightsync.errors import ManifestMismatch
from weightsync.tensors.layout import spec_of


class Both(Moves):
    """With a second model for a loader that no plan replaces."""

    def __init__(self):
        super().__init__(by_name_but_half_of_one)
        self.model.views.pop()  # members of a set cannot be paired
        self.made = 0

    def loader_hooks(self):
        return super().loader_hooks()._replace(standby=self.hooks)

    def hooks(self):
        return StandbyHooks(self.model, 1, self.make, by_name, lambda: None, lambda model: None)

    def make(self, weights):
        self.made += 1
        made = type(self)().model
        by_name(made, weights)
        return made


def test_what_no_plan_can_fill_is_loaded_into_a_second_model():
    adapter = Both()
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
        held = dict(adapter.model.named_parameters())
        assert all(bits(tensor) == bits(held[name]) for name, tensor in checkpoint(content).items())
    assert (adapter.made, adapter.loads) == (1, 0)
    assert loading.path == "into a standby, by the engine's own loader, and exchanged"
    assert loading.standby.holds_before()


def fused(model, weights):
    """Half of one weight comes with the tensor of another."""
    for name, tensor in weights:
        if name == "layer_9":
            model.layer_9.data[:15].copy_(tensor[:15])
        else:
            model.get_parameter(name).data.copy_(tensor)
        if name == "layer_8":
            model.layer_9.data[15:].copy_(tensor[15:])


def test_a_push_that_is_refused_takes_no_plan_from_those_after_it():
    adapter = Both()
    adapter._load = fused
    loading = Loading(adapter)
    push(loading, 1)
    manifest = [spec_of(*pair) for pair in checkpoint(2).items() if pair[0] != "layer_8"]
    with pytest.raises(ManifestMismatch, match="layer_8 cannot be left"):
        loading.accept(manifest, kept=("layer_8",))
    push(loading, 3)
    assert loading.path.startswith("load plan,")
    assert loading.path.endswith(", into a standby")
    assert (adapter.made, adapter.loads) == (0, 0)


def test_where_weights_stay_the_plan_is_replayed_for_what_it_can():
    adapter = Both()
    adapter.movable = "graphs"
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
    assert (adapter.made, loading.path.partition(",")[0]) == (0, "load plan")
