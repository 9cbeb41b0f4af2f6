"""Loaders that keep the tensors they are given: the engine never computes with memory of the trainer."""

import sys
from types import SimpleNamespace

import pytest
import torch

from tests.unit.loaders import AdapterOf, Model, bits, push_into, scattered
from weightsync import Sender
from weightsync.engine.adapter import Sealed
from weightsync.engine.loading.fake_tensor import FakeTensor
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import SourceError, WrongState
from weightsync.tensors.layout import digest_of, spec_of
from weightsync.tensors.subset import Subset
from weightsync.testing import ReferenceEngine


def model_of():
    return Model({"plain": torch.zeros(4, 6), "odd": torch.zeros(4, 6)}, {"table": torch.zeros(3)})


def pushed(number):
    return {name: torch.full(tensor.shape, float(number)) for name, tensor in model_of().state_dict().items()}


SPECS = [spec_of(name, tensor) for name, tensor in pushed(0).items()]


def copied(model, name, tensor):
    model.state_dict()[name].copy_(tensor)


def as_data(model, name, tensor):
    model.get_parameter(name).data = tensor


def as_a_parameter(model, name, tensor):
    setattr(model, name, torch.nn.Parameter(tensor, requires_grad=False))


def as_a_view(model, name, tensor):
    model.get_parameter(name).data = tensor.t().contiguous().t() if isinstance(tensor, FakeTensor) else tensor[:]


def as_a_buffer(model, name, tensor):
    model._buffers["table"] = model._buffers["table"] if isinstance(tensor, FakeTensor) else tensor.view(-1)[1:4]


def loader(act, seen=None):
    """A loader that calls ``act`` for the tensor ``odd``; with ``seen``, it behaves while it is recorded."""

    def load(model, weights):
        for name, tensor in weights:
            odd = name == "odd" and not (seen is not None and isinstance(tensor, FakeTensor))
            (act if odd else copied)(model, name, tensor)

    return load


def contents(model):
    return {name: bits(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("act", [as_data, as_a_parameter, as_a_view])
def test_a_loader_that_keeps_its_tensors_is_given_copies(act, apart):
    model = model_of()
    loading = Loading(AdapterOf(model, loader(act), SPECS))
    for number in (1, 2, 3):
        staged = push_into(loading, pushed(number))
        if apart:
            staged = Staged("push", staged.subset, scattered(staged.layout, staged.data))
            loading.load(staged)
        for entry in staged.layout.entries:
            entry.view(staged.data).fill_(77)  # as the sender overwrites it with the next push
        assert contents(model) == {name: bits(tensor) for name, tensor in pushed(number).items()}
    assert loading.path.startswith("the engine's own loader: it cannot be recorded (Unrecordable: it replaces")


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("act", [as_data, as_a_parameter, as_a_view, as_a_buffer])
def test_a_loader_that_secretly_keeps_its_tensors_is_detected_and_then_given_copies(act, apart):
    model = model_of()
    loading = Loading(AdapterOf(model, loader(act, seen=True), SPECS))
    layout = loading.accept(SPECS)
    stage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    staged = Staged("push", Subset(layout, {}), scattered(layout, stage) if apart else stage)
    loading.prepare_load(staged)
    with pytest.raises(WrongState, match=r"did not copy (odd|table) but kept the tensor that it was given.*push again"):
        loading.load(staged)
    for number in (1, 2):
        staged = push_into(loading, pushed(number))
        before = contents(model)
        for entry in staged.layout.entries:
            entry.view(staged.data).fill_(77)
        assert contents(model) == before
        assert before["plain"] == bits(pushed(number)["plain"])


def test_a_sealed_loader_is_checked_too():
    class Packs(AdapterOf):
        def loader_hooks(self):
            return Sealed(self.model, "it packs layers")

    loading = Loading(Packs(model_of(), loader(as_data), SPECS))
    with pytest.raises(WrongState, match="did not copy odd"):
        push_into(loading, pushed(1))
    assert loading.path == "the engine's own loader: it packs layers"


ADOPTING = """
from weightsync import testing
def adopt(self, weights):
    for name, tensor in weights:
        self.model.get_parameter(name).data = tensor
testing.ModelAdapter.load = adopt
testing.main()
"""


class Breaks:
    """A source whose last tensor cannot be read, once the others have been packed."""

    def __init__(self, state):
        self._state = state

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in self._state.items()]

    def __iter__(self):
        yield from list(self._state.items())[:-1]
        raise OSError("the last one cannot be read")


def test_the_weights_of_an_adopting_engine_do_not_change_when_the_next_push_is_packed(model_folder, trained):
    with (
        ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", ADOPTING)) as engine,
        Sender([engine.url]) as sender,
    ):
        state = trained.state_dict()
        for _ in range(2):
            sender.push(state)
        want = digest_of(state.items())
        assert sender.status(digest=True)[engine.url].ranks[0].digest == want
        with pytest.raises(SourceError, match="the last one"):
            sender.push(Breaks({name: tensor.clone().fill_(7) for name, tensor in state.items()}))
        assert sender.status(digest=True)[engine.url].ranks[0].digest == want
