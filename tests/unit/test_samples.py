"""When a load plan is checked, and how samples of what the loader does are compared with it."""

import pytest
import torch

from tests.unit.loaders import AdapterOf, Model, bits, push_into
from weightsync.engine.loading.comparing import sample, share_of
from weightsync.engine.loading.fake_tensor import FakeTensor
from weightsync.engine.loading.loader import Loading
from weightsync.engine.loading.loader_dependencies import Dependencies
from weightsync.engine.loading.model_memory import Memory
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


@pytest.mark.parametrize(
    ("count", "pushes", "most"), [(1, 1, 1), (300, 10, 16), (4096, 16, 128), (5000, 20, 128), (18_000, 64, 141)]
)
def test_every_tensor_has_its_turn_and_many_cost_no_more_than_they_must(count, pushes, most):
    seen = set()
    for turn in range(2 * pushes):
        taken = sample(count, turn, share_of(count))
        assert len(taken) <= most
        seen.update(taken)
    assert len(seen) == count


def moved(model):
    model.w000.data = model.w000.data.clone()


def replaced(model):
    model.w000 = torch.nn.Parameter(model.w000.detach().clone())


@pytest.mark.parametrize("change", [moved, replaced])
@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_gets_all_tensors_notices_before_the_commit_that_its_model_is_elsewhere(change, late):
    loading, staged, _ = many_rank(read=4)
    if late:
        loading.accept(list(staged.layout.specs), push="third")
    change(loading.adapter.model)
    if not late:
        loading.accept(list(staged.layout.specs), push="third")
    loading.prepare_load(staged, "third")
    assert loading.path == "the engine's own loader: the load plan is checked by the first push that commits"
    loading.load(staged)
    assert {bits(tensor) for tensor in loading.adapter.model.state_dict().values()} == {bits(torch.ones(4, 2))}


def test_a_rank_that_gets_parts_notices_at_prepare_that_its_model_is_elsewhere():
    loading, staged, _ = many_rank(read=2)
    moved(loading.adapter.model)
    loading.accept(list(staged.layout.specs), push="third")
    assert not loading.subset(staged.layout).name
    assert loading.path == "the engine's own loader: the load plan is checked by the first push that commits"


def test_a_parameter_that_is_gone_has_moved():
    model = Model({name: torch.zeros(2) for name in ("first", "second")})
    memory = Memory(model)
    assert memory.is_unmoved()
    del model.second
    assert not memory.is_unmoved()


def test_a_loader_of_a_part_that_moves_memory_in_the_pause_is_noticed():
    model, moves = Model({name: torch.zeros(4, 2) for name in ("plain", "odd")}), []

    def load(model, weights):
        for name, tensor in weights:
            parameter = model.get_parameter(name)
            parameter.data.copy_(tensor * 2 if name == "odd" else tensor)
            if moves and not isinstance(tensor, FakeTensor):
                model.plain.data = model.plain.data.clone()

    pushed = {name: torch.ones(4, 2) for name in ("plain", "odd")}
    loading = Loading(AdapterOf(model, load, [spec_of(name, tensor) for name, tensor in pushed.items()]))
    for _ in range(2):
        push_into(loading, pushed)
    assert loading.path.startswith("load plan, 1 copies; the engine's own loader for odd")
    moves.append("from now on")
    push_into(loading, {name: tensor * 3 for name, tensor in pushed.items()})
    assert loading.path == "the engine's own loader: the memory of its model moves while it is loaded"
    assert (bits(model.plain), bits(model.odd)) == (bits(torch.full((4, 2), 3.0)), bits(torch.full((4, 2), 6.0)))


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
