"""Loaders that change over time: the engine serves what the current loader would make of the push."""

import contextlib
import os
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.loaders import AdapterOf, Model, bits, by_name, push_into, scattered
from weightsync import Sender
from weightsync.engine.adapter import LoaderHooks
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed, WrongState
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.tensors.subset import Subset
from weightsync.testing import ReferenceEngine

EXPERTS = 6
GLOBAL = types.SimpleNamespace(slot=list(range(EXPERTS)))
VARIABLE = "TEST_WEIGHTSYNC_SLOTS"


class Experts(torch.nn.Module):
    """Experts in slots; ``kind`` says where the map from experts to slots is stored."""

    def __init__(self, kind):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(EXPERTS, 8), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.kind, self.steps, self.busy = kind, 0, torch.zeros(3, dtype=torch.int64)
        if kind == "a buffer":
            self.register_buffer("slot", torch.arange(EXPERTS))
        self.set(list(range(EXPERTS)))

    def set(self, slot):
        if self.kind == "a list":
            self.slot = slot
        elif self.kind == "the same list":
            self.slot = getattr(self, "slot", [])
            self.slot[:] = slot
        elif self.kind == "a number":
            self.shift = slot[0]
        elif self.kind == "a dictionary":
            self.config = types.SimpleNamespace(slot=dict(enumerate(slot)))
        elif self.kind == "lists in a list":
            self.groups = [[one] for one in slot]
        elif self.kind == "a buffer":
            self.slot.copy_(torch.tensor(slot))
        elif self.kind == "the environment":
            os.environ[VARIABLE] = " ".join(map(str, slot))
        else:
            GLOBAL.slot = slot

    def of(self, expert):
        return {
            "a list": lambda: self.slot[expert],
            "the same list": lambda: self.slot[expert],
            "a number": lambda: (expert + self.shift) % EXPERTS,
            "a dictionary": lambda: self.config.slot[expert],
            "lists in a list": lambda: self.groups[expert][0],
            "a buffer": lambda: int(self.slot[expert]),
            "the environment": lambda: int(os.environ[VARIABLE].split()[expert]),
            "elsewhere": lambda: GLOBAL.slot[expert],
        }[self.kind]()

    def rebalance(self, slot):
        """Move the weights to other slots and update the map, as EPLB does."""
        before = [self.w[self.of(expert)].clone() for expert in range(EXPERTS)]
        self.set(slot)
        for expert, weights in enumerate(before):
            self.w.data[self.of(expert)] = weights


KINDS = (
    "a list",
    "the same list",
    "a number",
    "a dictionary",
    "lists in a list",
    "a buffer",
    "the environment",
    "elsewhere",
)


def load_experts(model, weights):
    for name, tensor in weights:
        if name == "norm":
            model.norm.data.copy_(tensor)
        else:
            model.w.data[model.of(int(name.rpartition(".")[2]))].copy_(tensor)


def checkpoint(number):
    experts = {f"experts.{expert}": torch.full((8,), 100.0 * number + expert) for expert in range(EXPERTS)}
    return {**experts, "norm": torch.full((3,), float(number))}


SPECS = [spec_of(name, tensor) for name, tensor in checkpoint(0).items()]


def served(model):
    return [float(model.w[model.of(expert)][0]) for expert in range(EXPERTS)]


def wanted(number):
    return [100.0 * number + expert for expert in range(EXPERTS)]


def compared(loading, what):
    return next(one for one in loading.status().compared if one.what == what)


@pytest.fixture(params=KINDS)
def rank(request, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setattr(GLOBAL, "slot", list(range(EXPERTS)))
    model = Experts(request.param)
    return model, Loading(AdapterOf(model, load_experts, SPECS))


def test_experts_that_moved_get_their_weights_at_the_next_push(rank):
    model, loading = rank
    for number in (1, 2):
        push_into(loading, checkpoint(number))
    assert loading.path.startswith("load plan, 7 copies")
    model.rebalance([3, 4, 5, 0, 1, 2])
    assert served(model) == wanted(2)
    push_into(loading, checkpoint(3), "third")
    assert served(model) == wanted(3)
    assert loading.path.startswith("load plan, 7 copies"), "it was recorded again, and checked"
    fault = compared(loading, "what the loader does")
    assert fault.push == "third"
    assert "the loader no longer does what was recorded with experts." in fault.fault
    push_into(loading, checkpoint(4), "fourth")
    assert served(model) == wanted(4)
    assert compared(loading, "what the loader does").fault == ""


def test_experts_that_move_during_a_push_get_their_weights(rank):
    model, loading = rank
    for number in (1, 2):
        staged = push_into(loading, checkpoint(number))
    layout = loading.accept(SPECS, push="third")
    model.rebalance([5, 4, 3, 2, 1, 0] if model.kind != "a number" else [1, 2, 3, 4, 5, 0])
    for entry in layout.entries:
        entry.view(staged.data).copy_(checkpoint(3)[entry.spec.name])
    staged = Staged("third", Subset(layout, {}), staged.data)
    loading.prepare_load(staged, "third")
    loading.load(staged)
    assert served(model) == wanted(3)


def test_irrelevant_changes_cost_nothing_in_the_end(rank):
    model, loading = rank
    for number in range(1, 9):
        push_into(loading, checkpoint(number))
        model.steps += 1
        model.busy[1] += 1
        model.config2 = [number]
        assert served(model) == wanted(number)
        assert loading.path.startswith("load plan, 7 copies")
    assert loading.status().pushes == 7
    assert loading._dependencies.changed() == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.lists(st.one_of(st.none(), st.permutations(range(EXPERTS))), min_size=1, max_size=6))
def test_the_pushed_weights_are_served_whatever_changes_between_pushes(kind, moves):
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, VARIABLE, None)
        stack.callback(setattr, GLOBAL, "slot", list(range(EXPERTS)))
        model = Experts(kind)
        loading = Loading(AdapterOf(model, load_experts, SPECS))
        for number, slot in enumerate([None, None, *moves]):
            if slot is not None:
                model.rebalance(slot)
            push_into(loading, checkpoint(number))
            assert served(model) == wanted(number)


def test_an_outdated_subset_is_refused_and_the_next_push_is_whole():
    model = Experts("a list")

    def load(model, weights):
        load_experts(model, (pair for pair in weights if pair[0] in ("norm", f"experts.{model.slot[0]}")))

    loading = Loading(AdapterOf(model, load, SPECS))
    for number in (1, 2):
        staged = push_into(loading, checkpoint(number))
    parts = loading.subset(staged.layout)
    assert parts.name
    model.slot = [1, 0, 2, 3, 4, 5]
    with pytest.raises(TransferFailed, match="push again"):
        loading.prepare_load(Staged("third", parts, staged.data), "third")
    assert loading.subset(loading.accept(SPECS)).name == ""
    push_into(loading, checkpoint(3))
    assert float(model.w[0][0]) == 301.0


def test_a_loader_that_starts_to_skip_tensors_after_prepare_is_refused_before_the_pause():
    model = Experts("a list")
    model.blind = False

    def load(model, weights):
        load_experts(model, () if model.blind else weights)

    loading = Loading(AdapterOf(model, load, SPECS))
    for number in (1, 2):
        staged = push_into(loading, checkpoint(number))
    loading.accept(SPECS)
    model.blind = True
    with pytest.raises(TransferFailed, match=r"does not load norm, w any more; push again"):
        loading.prepare_load(staged, "third")
    loading.accept(SPECS)
    assert set(loading.accepted().unwritten) == {"norm", "w"}
    assert served(model) == wanted(2)


# --- what is done around a load ---------------------------------------------------------------------------------------


class Around(AdapterOf):
    """An adapter that does something before or after a load, once a test says so."""

    before = after = staticmethod(lambda model: None)

    def loader_hooks(self):
        return LoaderHooks(self.model, self._alone, self._around)

    def _alone(self, weights):
        super().load(weights)

    @contextlib.contextmanager
    def _around(self):
        self.before(self.model)
        yield
        self.after(self.model)

    def load(self, weights):
        with self._around(), torch.no_grad():
            super().load(weights)


def exchanged(model):
    model.odd = torch.nn.Parameter(model.odd.detach().clone(), requires_grad=False)


def moved(model):
    model.odd.data = model.odd.data.clone()


def two_of(number):
    return {"plain": torch.full((40, 60), float(number)), "odd": torch.full((40, 60), number + 0.5)}


def around_rank():
    model = Model({name: torch.zeros(40, 60) for name in ("plain", "odd")})
    adapter = Around(model, by_name, [spec_of(name, tensor) for name, tensor in two_of(0).items()])
    loading = Loading(adapter)
    for number in (1, 2):
        push_into(loading, two_of(number))
    assert loading.status().pushes == 1
    return adapter, model, loading


@pytest.mark.parametrize("move", [exchanged, moved])
@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_moves_during_a_load_gets_the_pushed_weights(move, when):
    adapter, model, loading = around_rank()
    setattr(adapter, when, move)
    push_into(loading, two_of(3))
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == {
        name: bits(tensor) for name, tensor in two_of(3).items()
    }
    assert loading.path == "the engine's own loader: the memory of its model moves while it is loaded"
    assert compared(loading, "what is in the model").fault


def test_weights_that_come_to_be_processed_after_loading_are_loaded_by_the_engine():
    adapter, model, loading = around_rank()
    adapter.after = lambda model: model.odd.data.mul_(2)
    push_into(loading, two_of(3), "third")
    assert bits(model.plain) == bits(two_of(3)["plain"])
    assert bits(model.odd) == bits(two_of(3)["odd"] * 2)
    assert loading.path == ("the engine's own loader: odd is not what was copied to it: it is processed after loading")
    assert compared(loading, "what is in the model").push == "third"


@pytest.mark.parametrize("apart", [False, True])
def test_every_byte_of_a_large_model_is_eventually_compared(apart):
    shape = (3000, 1000)  # more than is compared after one push
    model = Model({"plain": torch.zeros(shape), "turned": torch.zeros(shape).t()})

    def load(model, weights):
        for name, tensor in weights:
            model.get_parameter(name).data.copy_(tensor.t() if name == "turned" else tensor)

    pushed = {name: torch.randn(shape) for name in ("plain", "turned")}
    adapter = Around(model, load, [spec_of(name, tensor) for name, tensor in pushed.items()])
    for name, place in (("plain", 1_234_567), ("turned", 2_999_999)):
        loading = Loading(adapter)
        adapter.after = Around.after
        staged = push_into(loading, pushed)
        if apart:
            staged = Staged("push", staged.subset, scattered(staged.layout, staged.data))
        adapter.after = lambda model, name=name, place=place: (
            model.get_parameter(name).data.view(-1)[place].neg_()
            if (name == "plain")
            else model.get_parameter(name).data[0, 7].neg_()
        )
        for _ in range(100):
            loading.prepare_load(staged, "push")
            loading.load(staged)
            if not loading.path.startswith("load plan"):
                break
        assert f"{name} is not what was copied to it" in loading.path


def test_a_subset_in_memory_that_moves_during_a_load_is_an_error():
    model = Model({"plain": torch.zeros(4, 6)})

    def load(model, weights):
        for _, tensor in weights:
            model.plain.data.copy_(tensor[4:])

    adapter = Around(model, load, [spec_of("plain", torch.zeros(8, 6))])
    loading = Loading(adapter)
    for number in (1, 2):
        staged = push_into(loading, {"plain": torch.full((8, 6), float(number))})
    parts = loading.subset(staged.layout)
    assert parts.name
    adapter.before = lambda model: setattr(model, "plain", torch.nn.Parameter(model.plain.detach().clone()))
    staged = Staged("third", parts, staged.data)
    loading.prepare_load(staged, "third")
    with pytest.raises(WrongState, match="the memory of its model moves while it is loaded"):
        loading.load(staged)


# --- seen from a sender -----------------------------------------------------------------------------------------------

#: An engine that swaps its two layers with every generation, and remembers where each is.
BALANCED = """
import torch
from weightsync import testing
from weightsync.tensors.layout import digest_of
adapter, load, generate = testing.ModelAdapter, testing.ModelAdapter.load, testing.ModelAdapter.generate
slot = [0, 1]
def placed(name):
    before, found, rest = name.partition("model.layers.")
    return f"{before}{found}{slot[int(rest[0])]}{rest[1:]}" if found else name
def rebalancing(self, *args):
    first, second = (layer.state_dict() for layer in self.model.model.layers)
    for one, other in zip(first.values(), second.values(), strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    slot.reverse()
    return generate(self, *args)
adapter.load = lambda self, weights: load(self, ((placed(name), tensor) for name, tensor in weights))
adapter.generate = rebalancing
held = lambda self: self.model.state_dict()
adapter.digest = lambda self: digest_of((name, held(self)[placed(name)]) for name in held(self))
testing.main()
"""


def test_an_engine_that_rebalanced_its_layers_serves_the_pushed_weights(model_folder, trained):
    want = digest_of(trained.state_dict().items())
    with (
        ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", BALANCED)) as engine,
        Sender([engine.url]) as sender,
    ):
        for _ in range(3):
            for _ in range(2):
                result = sender.push(trained)
                assert "record" in result.engines[engine.url].seconds
                assert sender.status(digest=True)[engine.url].ranks[0].digest == want
            engine.generate([1, 2, 3], 1)
        sender.push(trained)
        (rank,) = sender.status(digest=True)[engine.url].ranks
        assert rank.digest == want
        assert rank.loading.startswith("load plan")
