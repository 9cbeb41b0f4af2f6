"""Packing the same tensors again: the same bytes and digests, with no per-tensor Python cost."""

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.contract.harness import bits
from tests.helpers import calls_of
from tools import models
from weightsync import LocalShard, Sender
from weightsync.sources import open_source
from weightsync.sources.fingerprint import Fingerprint, fingerprint_of
from weightsync.sources.module import ModuleSource
from weightsync.tensors import native_copy
from weightsync.tensors.boxes import Box
from weightsync.tensors.layout import Layout, digest_of, spec_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.testing import ReferenceEngine
from weightsync.trainer.pack_plan import pack_plan
from weightsync.trainer.packing import Packer


@st.composite
def tensors_and_parts(draw):
    """Small and large tensors, and wanted rows of some of them."""
    shapes = draw(st.lists(st.tuples(st.sampled_from([0, 1, 3, 40, 700]), st.sampled_from([1, 5, 1024])), max_size=8))
    tensors = [torch.randint(0, 99, shape, dtype=torch.int32) for shape in [*shapes, (700, 1024)]]
    layout = Layout([spec_of(f"t{n}", tensor) for n, tensor in enumerate(tensors)])
    boxes = {}
    for number, tensor in enumerate(tensors):
        if draw(st.booleans()):
            rows = draw(st.integers(0, tensor.shape[0]))
            boxes[number] = Box((tensor.shape[0] - rows, 0), (rows, tensor.shape[1]))
    keeps = draw(
        st.sampled_from([[Subset(layout, {})], [Subset(layout, boxes)], [Subset(layout, {}), Subset(layout, boxes)]])
    )
    return tensors, layout, Wanted(keeps)


@settings(max_examples=40)
@given(
    tensors_and_parts(),
    st.sampled_from([1 << 16, 1 << 20, 1 << 23]),
    st.sampled_from([2, 1 << 11]),
    st.sampled_from(["", "xxh3_64"]),
)
def test_a_pack_plan_packs_the_same_bytes_as_the_packer(found, bucket_bytes, slots, algorithm):
    tensors, layout, demand = found
    size = min(slots * bucket_bytes, -(-max(layout.nbytes, 1) // bucket_bytes) * bucket_bytes)
    slots = size // bucket_bytes
    arenas = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    plan = pack_plan(layout, arenas[1], bucket_bytes, slots, algorithm, demand, addresses)
    for _ in range(2):
        acquired = []
        expected = Packer(layout, arenas[0], bucket_bytes, slots, algorithm, demand).fill(tensors, acquired.append)
        for number, (one, other) in enumerate(zip(expected, plan.fill(acquired.append), strict=True)):
            digests = {name: other.digests.get(name, ()) for name in demand.names}
            assert (one.number, one.nbytes) == (other.number, other.nbytes) == (number, one.nbytes)
            assert {name: one.digests.get(name, ()) for name in demand.names} == digests
            at = number % slots * bucket_bytes
            assert torch.equal(*(arena[at : at + bucket_bytes] for arena in arenas))
        assert sorted(acquired) == sorted([*range(number + 1)] * 2)
        for tensor in tensors:
            tensor.add_(1)


def test_a_digest_over_several_pieces_cannot_be_planned():
    layout = Layout([spec_of("a", torch.zeros(8, 8))])
    arena, columns = torch.zeros(1024, dtype=torch.uint8), Wanted([Subset(layout, {0: Box((0, 0), (8, 4))})])
    assert pack_plan(layout, arena, 1024, 1, "xxh3_64", columns, [arena.data_ptr()]) is None
    assert pack_plan(layout, arena, 1024, 1, "mix64", Wanted([Subset(layout, {})]), [0]) is None


class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))


def test_packing_again_has_no_per_tensor_python_cost():
    found = []
    for count in (50, 1000):
        source = ModuleSource(Many(count))
        layout = Layout(source.specs)
        arena = torch.zeros(layout.nbytes, dtype=torch.uint8)
        addresses = [tensor.data_ptr() for tensor in source.tensors()]
        demand = Wanted([Subset(layout, {})])
        plan = pack_plan(layout, arena, layout.nbytes, 1, "xxh3_64", demand, addresses)
        hashes = native_copy.Hashes([native_copy.Block(address, 256) for address in addresses])
        found.append(
            [
                calls_of(lambda plan=plan: list(plan.fill(lambda _: None))),
                calls_of(lambda hashes=hashes: hashes.make()),
                calls_of(lambda source=source: (source.reads(source._given), source.identity())),
            ]
        )
    assert found[0] == found[1]


# --- whether a module has changed


def exchange(model):
    model.parts[1].weight = nn.Parameter(model.parts[1].weight.data)


def move(model):
    model.parts[1].weight.data = model.parts[1].weight.data.clone()


def turn(model):
    model.parts[1].weight.data = model.parts[1].weight.data.t()


def cast(model):
    model.parts[1].weight.requires_grad_(False).data = model.parts[1].weight.data.view(torch.int32)


def negate(model):
    model.parts[1].weight.data = torch._neg_view(model.parts[1].weight.data)


def reorder(model):
    model.parts._modules["1"] = model.parts._modules.pop("1")


def rename(model):
    for key in list(model.parts._modules):  # in the same order
        model.parts._modules[f"{key}0"] = model.parts._modules.pop(key)


def add(model):
    model.parts[1].bias = nn.Parameter(torch.zeros(8))


def take_away(model):
    model.parts[1].weight = None


def buffer(model):
    model.register_buffer("seen", torch.zeros(1))


def child(model):
    model.parts.append(nn.Linear(2, 2))


def replace(model):
    model.parts[1] = nn.Linear(8, 8, bias=False)


def hook(model):
    model.parts[1].register_state_dict_post_hook(lambda *_: None)


def pre_hook(model):
    model.parts[1].register_state_dict_pre_hook(lambda *_: None)


def hide(model):
    model.parts[1].state_dict = dict


CHANGES = (exchange, move, turn, cast, negate, reorder, rename, add, take_away, buffer, child, replace)


@pytest.mark.parametrize("change", [*CHANGES, hook, pre_hook, hide])
@pytest.mark.parametrize("quick", [False, True])
def test_a_changed_module_is_noticed(change, quick, monkeypatch):
    if not quick:
        monkeypatch.setattr("weightsync.sources.fingerprint._guards", lambda tensors: None)
    model = Many(3)
    fingerprint = Fingerprint(model)
    assert (fingerprint._identities._guards is not None) == quick
    assert fingerprint.holds()
    with torch.inference_mode():
        assert fingerprint.holds()
    model.parts[0].weight.data.add_(1)  # a step of the optimiser
    model.parts[0].weight.grad = torch.ones(8, 8)
    model.train()
    assert fingerprint.holds()
    change(model)
    assert not fingerprint.holds()


def test_a_replaced_parameter_is_freed():
    model = Many(3)
    source = ModuleSource(model)
    assert source.identity() is not None
    before = weakref.ref(model.parts[1].weight)
    exchange(model)
    gc.collect()
    assert before() is None
    assert source.identity() is None


def test_modules_with_state_dict_hooks_are_read_at_every_push():
    model = Many(3)
    model.parts[1].register_state_dict_post_hook(lambda *_: None)
    assert fingerprint_of(model) is None
    assert ModuleSource(model).identity() is None


def test_every_push_sends_the_modules_current_values(model_folder):
    """Every second push finds the module's tensors at other addresses."""
    model = models.load_reference(model_folder("llama", 1))
    with ReferenceEngine(model_folder("llama", 0)) as engine, Sender([engine.url]) as sender:
        for number in range(8):
            for parameter in model.parameters():
                if number % 2:
                    parameter.data = parameter.data.clone()
                bits(parameter.data).bitwise_xor_(1)
            sender.push(model)
            (rank,) = sender.status(digest=True)[engine.url].ranks
            assert rank.digest == digest_of(model.state_dict().items())


# --- whether a mapping has changed


def reordered(weights):
    return dict(reversed(weights.items()))


def renamed(weights):
    return {f"{name}x": tensor for name, tensor in weights.items()}


def moved(weights):
    return {name: tensor.clone() for name, tensor in weights.items()}


def turned(weights):
    return {name: tensor.t() for name, tensor in weights.items()}


def recast(weights):
    return {name: tensor.view(torch.int32) for name, tensor in weights.items()}


def fewer(weights):
    return dict(list(weights.items())[1:])


def made_on_demand(weights):
    return OrderedDict(weights)


def negative(weights):
    return {name: torch._neg_view(tensor) for name, tensor in weights.items()}


def sharded(weights):
    return {name: LocalShard(tensor, tuple(tensor.shape), (0, 0)) for name, tensor in weights.items()}


@pytest.mark.parametrize(
    "change", [reordered, renamed, moved, turned, recast, fewer, made_on_demand, negative, sharded]
)
def test_a_changed_mapping_is_read_again(change):
    weights = {f"w{number}": torch.randn(4, 4) for number in range(3)}
    seen = open_source(weights).identity()
    assert seen is not None
    assert open_source({name: tensor.detach() for name, tensor in weights.items()}, reuse=seen).identity() is seen
    source = open_source(change(weights), reuse=seen)
    assert source.identity() is not seen
    expected = open_source(change(weights))
    assert source.specs == expected.specs
    assert all(map(torch.equal, source.tensors(), expected.tensors()))


def test_every_push_sends_the_mappings_current_values(model_folder):
    """Each push is of a new mapping; every third has its tensors at other addresses. No mapping is kept alive."""
    weights = models.load_reference(model_folder("llama", 1)).state_dict()
    with ReferenceEngine(model_folder("llama", 0)) as engine, Sender([engine.url]) as sender:
        for number in range(9):
            weights = {name: t.clone() if number % 3 == 2 else t for name, t in weights.items()}
            for tensor in weights.values():
                bits(tensor).bitwise_xor_(1)
            sender.push(dict(weights))
            (rank,) = sender.status(digest=True)[engine.url].ranks
            assert rank.digest == digest_of(weights.items())
        held = weakref.ref(next(iter(weights.values())))
        weights.clear()
        del tensor
        gc.collect()
        assert held() is None


def test_reopening_a_mapping_has_no_per_tensor_python_cost():
    found = []
    for count in (50, 1000):
        weights = {f"w{number}": torch.zeros(4) for number in range(count)}
        seen = open_source(weights).identity()
        found.append(calls_of(lambda weights=weights, seen=seen: open_source(weights, reuse=seen)))
    assert found[0] == found[1]
