"""Loaders that do more than views, casts and copies, and incomplete pushes: both are named."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.loaders import bits, by_name, odd_loader, plan_for, really_loaded, two
from weightsync.engine.loading.fake_tensor import Unrecordable


def fill_item(parameter, tensor):
    parameter.data.fill_(tensor[0, 0].item())


def in_parts(parameter, tensor):
    parameter.data.zero_()
    parameter.data[:2].copy_(tensor[:2])


def through_a_buffer(parameter, tensor):
    padded = torch.zeros(5, 6)
    padded[:4].copy_(tensor)
    parameter.data.copy_(padded[:4])


ARITHMETIC = {
    "a product": lambda parameter, tensor: parameter.data.copy_(tensor * 2),
    "in place": lambda parameter, tensor: parameter.data.copy_(tensor).mul_(2),
    "accumulated": lambda parameter, tensor: parameter.data.zero_().add_(tensor),
    "out": lambda parameter, tensor: torch.mul(tensor, 2, out=parameter.data),
    "a sum": lambda parameter, tensor: parameter.data.copy_(torch.cat([tensor[:2], tensor[2:]])),
    "an index": lambda parameter, tensor: parameter.data.copy_(tensor[torch.tensor([3, 2, 1, 0])]),
    "into an index": lambda parameter, tensor: parameter.data.index_copy_(0, torch.arange(4), tensor),
    "a value": fill_item,
    "a comparison": lambda parameter, tensor: parameter.data.copy_(tensor if tensor.any() else -tensor),
    "numpy": lambda parameter, tensor: parameter.data.copy_(torch.from_numpy(tensor.numpy().copy())),
    "its own content": lambda parameter, tensor: parameter.data.copy_(parameter.data.flip(0) * 0 + tensor),
    "a buffer": through_a_buffer,
    "rounding twice": lambda parameter, tensor: parameter.data.copy_(tensor.to(torch.bfloat16)),
    "twice": in_parts,
    "mixed up": lambda parameter, tensor: parameter.data.copy_(tensor.t().reshape(24).view(4, 6)),
    "quantised": lambda parameter, tensor: parameter.data.copy_(tensor.div_(2)),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_only_a_parameter_that_is_computed_falls_back_to_the_loader(what):
    model, checkpoint = two()
    load = odd_loader(ARITHMETIC[what])
    want = really_loaded(model, load, checkpoint)
    if what == "numpy":
        with pytest.raises(Exception, match=r"\w"):  # operations outside of torch cannot be recorded
            plan_for(model, load, checkpoint)
        return
    plan, stage = plan_for(model, load, checkpoint)
    assert plan.loader == {"odd"}
    assert set(plan.fallen) <= {"odd"}
    assert {copy.name for copy in plan.copies} == {"plain"}
    plan.replay(stage)
    load(model, [("odd", checkpoint["odd"].clone())])
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == want


COPIES = {
    "device and dtype": lambda p, t: p.data.copy_(t.to(device=p.device, dtype=torch.float64)),
    "is_cuda": lambda p, t: p.data.copy_(t.cuda() if t.is_cuda else t),
    "contiguous": lambda p, t: p.data.copy_(t.t().contiguous().t()),
    "reshaped": lambda p, t: p.data.copy_(t.reshape(24).view(2, 2, 6).flatten(0, 1)),
    "chunks": lambda p, t: [part.copy_(other) for part, other in zip(p.data.chunk(2, 1), t.chunk(2, 1), strict=True)],
    "narrow": lambda p, t: [p.data.narrow(0, n, 1).copy_(t.narrow(0, n, 1)) for n in range(4)],
    "item assignment": lambda p, t: p.data.__setitem__((slice(None), slice(0, 3)), t[:, :3]),
    "bits": lambda p, t: p.data.view(torch.int32).copy_(t.view(torch.int32)),
    "grouped": lambda p, t: torch._foreach_copy_([p.data[:2], p.data[2:]], [t[:2], t[2:]]),
    "split": lambda p, t: [p.data[:, n].copy_(part) for n, part in enumerate(t.unbind(1))],
    "zeros and all the rest": lambda p, t: (p.data[2:].zero_(), p.data[:2].copy_(t[:2])),
    "made elsewhere": lambda p, t: (p.data[2:].copy_(torch.ones(2, 6)), p.data[:2].copy_(t[:2])),
    "nothing": lambda p, t: (p.data.copy_(t), p.data[4:].fill_(0), p.data[4:].copy_(t[4:])),
    "a parameter of its own": lambda p, t: p.data.copy_(torch.nn.Parameter(t, requires_grad=False).data),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", COPIES)
def test_views_casts_and_copies_in_every_spelling_are_planned(what, inference):
    model, checkpoint = two()
    load = odd_loader(COPIES[what])
    want = really_loaded(model, load, checkpoint)
    with torch.inference_mode(inference):
        plan, stage = plan_for(model, load, checkpoint)
        assert (plan.fallen, plan.loader) == ({}, frozenset())
        for tensor in model.parameters():
            tensor.data.fill_(7)
        plan.replay(stage)
    parts = what == "item assignment"
    got = {name: bits(tensor) for name, tensor in model.state_dict().items() if not (parts and name == "odd")}
    assert got == {name: want[name] for name in got}


def test_a_loader_with_threads_is_not_recorded():
    model, checkpoint = two()

    def load(model, weights):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda pair: model.get_parameter(pair[0]).data.copy_(pair[1]), list(weights)))

    with pytest.raises(Unrecordable, match="in another thread"):
        plan_for(model, load, checkpoint)


def exchange(model, tensor):
    model.odd = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)


def move(model, tensor):
    model.odd.data = torch.zeros(4, 6)


def stash(model, tensor):
    model.stashed = tensor.t()


OUTSIDE = torch.zeros(3)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (exchange, "replaces odd"),
        (move, "replaces odd"),
        (stash, "keeps odd beyond the load"),
        (lambda model, tensor: OUTSIDE.fill_(1), "memory that is no parameter"),
    ],
)
def test_a_loader_that_cannot_be_undone_or_replayed_is_not_recorded(act, said):
    model, checkpoint = two()

    def load(model, weights):
        for name, tensor in weights:
            if name == "odd":
                act(model, tensor)

    with pytest.raises(Unrecordable, match=said):
        plan_for(model, load, checkpoint)
    assert OUTSIDE.sum() == 0


def test_a_loader_that_writes_to_several_parameters_at_once_is_not_recorded():
    model, checkpoint = two()
    flat = torch.zeros(48)
    model.plain.data, model.odd.data = flat[:24].view(4, 6), flat[24:].view(4, 6)

    def load(model, weights):
        for number, (_, tensor) in enumerate(weights):
            flat.narrow(0, 12 * number, 36).copy_(tensor.reshape(-1).repeat(2)[:36])

    with pytest.raises(Unrecordable, match="no parameter, or more than one"):
        plan_for(model, load, checkpoint)


def test_a_loader_that_raises_is_not_recorded_and_changes_nothing():
    model, checkpoint = two()
    checkpoint["odd"] = torch.zeros(9, 9)
    with pytest.raises(RuntimeError):
        plan_for(model, by_name, checkpoint)


def test_a_parameter_made_of_several_tensors_falls_back_with_all_of_them():
    model, checkpoint = two(left=(4, 3), right=(4, 3))

    def load(model, weights):
        held = {}
        for name, tensor in weights:
            held[name] = tensor
        model.odd.data.copy_(torch.cat([held["left"], held["right"]], 1))
        for name in held.keys() - {"odd"}:
            model.get_parameter(name).data.copy_(held[name])

    plan, _ = plan_for(model, load, checkpoint)
    assert set(plan.fallen) == {"odd"}
    assert plan.loader == {"left", "right"}


def test_a_tensor_loaded_twice_into_tied_parameters_is_copied_once():
    model, checkpoint = two()
    model.register_parameter("tied", model.plain)

    def load(model, weights):
        for name, tensor in weights:
            for target in ("plain", "tied") if name == "plain" else (name,):
                model.get_parameter(target).data.copy_(tensor)

    plan, _ = plan_for(model, load, checkpoint)
    assert [copy.name for copy in plan.copies] == ["plain", "odd"]
    assert (plan.fallen, plan.unwritten(), plan.unread()) == ({}, [], [])


# --- coverage ---------------------------------------------------------------------------------------------------------


def test_unwritten_parameters_and_unread_tensors_are_named():
    model, checkpoint = two(scale=(), third=(2,))
    model.register_buffer("rotary", torch.zeros(4))

    def load(model, weights):
        for name, tensor in weights:
            if name in ("plain", "scale"):
                model.get_parameter(name).data.copy_(tensor)
            elif name == "odd":
                model.odd.data[:, :5].copy_(tensor[:, :5])

    plan, _ = plan_for(model, load, checkpoint)
    assert plan.unwritten() == ["odd", "third"]
    assert plan.unread() == ["third"]


def test_a_partly_loaded_buffer_is_named():
    model, checkpoint = two(table=(3, 8))
    del model._parameters["table"]
    model.register_buffer("table", torch.zeros(3, 8))
    plan, _ = plan_for(model, lambda model, weights: None, checkpoint)
    assert plan.unwritten() == ["odd", "plain"]

    def load(model, weights):
        for name, tensor in weights:
            target = model.table[:, :7] if name == "table" else model.get_parameter(name).data
            target.copy_(tensor[:, :7])

    plan, _ = plan_for(model, load, checkpoint)
    assert plan.unwritten() == ["table"]
