"""Load plans: a loader of views, casts and copies is recorded without side effects and replayed bit by bit."""

import contextlib
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import calls_of
from tests.unit.loaders import (
    DTYPES,
    Model,
    bits,
    by_name,
    divided,
    odd_loader,
    plan_for,
    random_bits,
    really_loaded,
    scattered,
    two,
)
from weightsync.engine.adapter import LoaderHooks

# --- programs of views, casts and copies ------------------------------------------------------------------------------


KINDS = (
    "narrow",
    "select",
    "transpose",
    "t",
    "chunk",
    "unsqueeze",
    "squeeze",
    "contiguous",
    "clone",
    "flatten",
    "detach",
    "data",
    "slice",
    "device",
    "expand",
    "movedim",
)


@st.composite
def arguments_of(draw, kind, shape):
    """Valid arguments of an operation on a tensor of this shape; None if there are none."""
    if kind == "unsqueeze":
        return (draw(st.integers(0, len(shape))),)
    if kind not in ("narrow", "select", "chunk", "slice", "transpose", "movedim"):
        return None if (kind == "t" and len(shape) != 2) or (kind == "expand" and 1 not in shape) else ()
    if not shape:
        return None
    dim = draw(st.integers(0, len(shape) - 1))
    if kind in ("transpose", "movedim"):
        return dim, draw(st.integers(0, len(shape) - 1))
    if kind == "chunk":
        return draw(st.integers(1, 3)), dim
    low = draw(st.integers(0, shape[dim] - 1))
    return {
        "narrow": (dim, low, draw(st.integers(1, shape[dim] - low))),
        "select": (dim, low),
        "slice": (dim, low, draw(st.integers(1, 3))),
    }[kind]


@st.composite
def steps(draw, shape):
    """A sequence of views and copies of a tensor of this shape, and the final shape."""
    found = []
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=5)):
        arguments = draw(arguments_of(kind, shape))
        if arguments is not None:
            found.append((kind, arguments))
            shape = tuple(step(torch.empty(shape, device="meta"), kind, arguments).shape)
    return found, shape


SPELLED = {
    "chunk": lambda tensor, parts, dim: tensor.chunk(parts, dim)[-1],
    "slice": lambda tensor, dim, low, by: tensor[(slice(None),) * dim + (slice(low, None, by),)],
    "data": lambda tensor: tensor.data,
    "device": lambda tensor: tensor.to(tensor.device),
    "expand": lambda tensor: tensor.expand([2 if size == 1 else size for size in tensor.shape]),
    "flatten": lambda tensor: tensor.reshape(-1),
}


def step(tensor, kind, arguments):
    """Apply one operation as loaders write it."""
    return SPELLED[kind](tensor, *arguments) if kind in SPELLED else getattr(tensor, kind)(*arguments)


@st.composite
def programs(draw):
    """A model, a checkpoint, and the operations that load each of its tensors."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    checkpoint, parameters, moves = {}, {}, []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        checkpoint[f"t{number}"] = random_bits(shape, dtype, generator)
        for part in range(draw(st.integers(1, 2))):
            taken, ends = draw(steps(shape))
            cast = draw(st.sampled_from([None, *DTYPES]))
            target_dtype = draw(st.sampled_from(DTYPES))
            # The target: a region in the middle of a larger parameter, perhaps transposed.
            pads = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in ends)
            turned = len(ends) == 2 and draw(st.booleans())
            whole = tuple(low + size + high for size, (low, high) in zip(ends, pads, strict=True))
            name = f"p{number}_{part}"
            parameters[name] = random_bits(tuple(reversed(whole)) if turned else whole, target_dtype, generator)
            moves.append((f"t{number}", taken, cast, name, pads, ends, turned))
    return parameters, checkpoint, moves


def program_loader(moves):
    def load(model, weights):
        for name, tensor in weights:
            for source, taken, cast, target, pads, ends, turned in moves:
                if source != name:
                    continue
                value = tensor
                for kind, arguments in taken:
                    value = step(value, kind, arguments)
                if cast is not None:
                    value = value.to(cast)
                place = model.get_parameter(target).data
                place = place.t() if turned else place
                for dim, ((low, _), size) in enumerate(zip(pads, ends, strict=True)):
                    place = place.narrow(dim, low, size)
                assert place.shape == value.shape
                place.copy_(value)

    return load


@settings(max_examples=300)
@given(programs(), st.sampled_from(["together", "scattered", "divided"]), st.randoms())
def test_replay_equals_loading(program, memory, numbers):
    parameters, checkpoint, moves = program
    model, load = Model(parameters), program_loader(moves)
    want = really_loaded(model, load, checkpoint)
    plan, stage = plan_for(model, load, checkpoint)
    if memory == "scattered":
        stage = scattered(plan.layout, stage)
    elif memory == "divided":
        stage = divided(plan.layout, stage, numbers.randrange)
    # Only rounding twice is more than a copy.
    assert all("rounded twice" in why or "computed" in why for why in plan.fallen.values())
    plan.replay(stage)
    if plan.loader:
        load(model, [(name, checkpoint[name]) for name in checkpoint if name in plan.loader])
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == want
    assert plan.differs(stage) == plan.strays(stage) == ""
    loader_hooks = LoaderHooks(model, lambda weights: load(model, weights), contextlib.nullcontext)
    assert [plan.changed(loader_hooks, samples) for samples in (1, 1, 0)] == [""] * 3
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == want
    # A tensor that the loader skips from now on is detected.
    for left_out in {copy.name for copy in plan.copies} - plan.loader:
        less = LoaderHooks(
            model, lambda weights, name=left_out: load(model, [p for p in weights if p[0] != name]), loader_hooks[2]
        )
        assert plan.changed(less, 1) == plan.changed(less, 0) == left_out
    if plan.copies:
        target = plan.copies[0].target
        target.as_strided((1,), (1,), target.storage_offset()).view(torch.uint8)[0] ^= 1
        assert plan.differs(stage) != ""


# --- what it costs ----------------------------------------------------------------------------------------------------


def many(tensors):
    names = [f"w{number}" for number in range(tensors)]
    model = Model({name: torch.randn(3, 5) for name in names})
    return model, {name: torch.randn(3, 5) for name in names}


@pytest.mark.parametrize("turned", [False, True])
def test_replay_has_no_per_tensor_python_cost(turned):
    def load(model, weights):
        for name, tensor in weights:
            target = model.get_parameter(name).data
            target.copy_(tensor.reshape(5, 3).t() if turned else tensor)

    counted = []
    for tensors in (10, 2000):
        model, checkpoint = many(tensors)
        plan, stage = plan_for(model, load, checkpoint)
        plan.replay(stage)
        counted.append(calls_of(lambda plan=plan, stage=stage: plan.replay(stage)))
        assert calls_of(plan.memory.is_unmoved) == calls_of(plan_for(*one_of(load))[0].memory.is_unmoved)
    assert counted[0] == counted[1]
    assert counted[0] < 100


@pytest.mark.parametrize("tensors", [10, 2000])
def test_replay_allocates_no_memory(tensors):
    model, checkpoint = many(tensors)
    plan, stage = plan_for(model, by_name, checkpoint)
    plan.replay(stage)
    tracemalloc.start()
    try:
        plan.replay(stage)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4096


def one_of(load):
    model, checkpoint = many(1)
    return model, load, checkpoint


def test_adjacent_copies_are_merged():
    whole = torch.zeros(8, 128)
    model = Model({"fused": whole})
    checkpoint = {f"part{number}": torch.randn(1, 128) for number in range(8)}

    def load(model, weights):
        for number, (_, tensor) in enumerate(weights):
            model.fused.data[number : number + 1].copy_(tensor)

    plan, stage = plan_for(model, load, checkpoint)
    assert len(plan.copies) == 8
    assert len(plan.runs_from(stage)) == 1
    plan.replay(stage)
    assert torch.equal(model.fused, torch.cat(list(checkpoint.values())))


def test_a_forgotten_stage_is_released():
    model, checkpoint = two()
    plan, stage = plan_for(model, odd_loader(lambda p, t: p.data.copy_(t.reshape(6, 4).t())), checkpoint)
    other = stage.clone()
    plan.replay(stage)
    plan.replay(other)
    plan.keep([other])
    assert list(plan._bound) == [other.data_ptr()]
    plan.keep(())
    assert plan._bound == {}
