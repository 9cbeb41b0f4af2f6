"""When and how samples of what a loader does are compared with its load plan."""

import pytest
import torch

from tests.unit.loaders import AdapterOf, Model, push_into
from weightsync.engine.loading.fake_tensor import FakeTensor
from weightsync.engine.loading.loader import Loading
from weightsync.engine.loading.loader_dependencies import Dependencies
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed
from weightsync.tensors.layout import spec_of


def test_a_loader_that_starts_to_pass_over_a_tensor_after_prepare_is_refused_before_the_pause():
    model, blind = Model({"w": torch.zeros(3)}, {"table": torch.zeros(3)}), []

    def load(model, weights):
        for name, tensor in weights:
            if name == "w":
                model.w.data.copy_(tensor)
            elif not blind:
                model.table.copy_(tensor)

    pushed = {"w": torch.ones(3), "table": torch.ones(3)}
    specs = [spec_of(name, tensor) for name, tensor in pushed.items()]
    loading = Loading(AdapterOf(model, load, specs))
    for _ in range(2):
        staged = push_into(loading, pushed)
    loading.accept(specs)
    blind.append("nobody looks at this list")
    with pytest.raises(TransferFailed, match=r"does not load table any more; push again"):
        loading.prepare_load(staged, "third")
    loading.accept(specs)
    assert loading.status().unread == ("table",)


def many_rank(read):
    """A rank with 300 tensors, of which its loader takes ``read`` rows; and the names it is given in each recording."""
    model = Model({f"w{number:03}": torch.zeros(read, 2) for number in range(300)})
    runs = []

    def load(model, weights):
        runs.append(set())
        for name, tensor in weights:
            if isinstance(tensor, FakeTensor):
                runs[-1].add(name)
            model.get_parameter(name).data.copy_(tensor[:read])

    pushed = {name: torch.ones(4, 2) for name in dict(model.named_parameters())}
    loading = Loading(AdapterOf(model, load, [spec_of(name, tensor) for name, tensor in pushed.items()]))
    for _ in range(2):
        staged = push_into(loading, pushed)
    runs.clear()
    return loading, staged, runs


def test_a_rank_that_gets_all_tensors_compares_both_samples_in_one_run_before_the_commit():
    loading, staged, runs = many_rank(read=4)
    specs, seen = list(staged.layout.specs), set()
    for number in range(9):
        loading.accept(specs, push=str(number))
        assert runs == []
        loading.prepare_load(staged, str(number))
        loading.prepare_load(staged, str(number))
        (run,) = runs
        assert 30 <= len(run) <= 32
        assert not seen & run
        seen |= run
        runs.clear()
    loading.accept(specs, push="last")
    loading.prepare_load(staged, "last")
    assert len(seen | runs.pop()) == 300, "every tensor has had its turn"


def test_a_rank_that_gets_parts_compares_a_sample_at_prepare_and_one_before_the_commit():
    loading, staged, runs = many_rank(read=2)
    parts = loading.subset(staged.layout)
    assert parts.name
    loading.accept(list(staged.layout.specs), push="third")
    (first,) = runs
    loading.prepare_load(Staged("third", parts, staged.data), "third")
    _, second = runs
    assert (len(first), len(second)) == (16, 16)
    assert not first & second


def test_what_a_loader_depends_on_is_compared_by_identity_or_value():
    model = Model({"plain": torch.zeros(2)})
    model.nothing, model.undefined, model.number = None, float("nan"), 7
    dependencies = Dependencies(model, lambda tensor: True)
    assert dependencies.changed() == []
    del model.nothing
    model.other = None
    assert dependencies.changed(), "another attribute takes the place of one"
    dependencies.take()
    model.number = 8
    assert dependencies.changed() == ["number"]
