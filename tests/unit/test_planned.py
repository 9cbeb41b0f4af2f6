"""A load plan fills a second set of the memory that it writes, while the engine serves; both sets are exchanged."""

import contextlib
import gc
import types
import weakref

import pytest
import torch

from tests.unit.loaders import bits, by_name, scattered
from tests.unit.standbys import NAMES, Moves, by_name_but_half_of_one, checkpoint, push, ready, stage_of
from weightsync.engine.adapter import Movable, sleeping_needs_room
from weightsync.engine.exchange import swap as swapping
from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed
from weightsync.memory import arenas


def test_pushes_fill_a_second_set_while_the_first_is_served(slices):
    adapter = Moves()
    loading, served = Loading(adapter), []
    held = dict(adapter.model.named_parameters())
    push(loading, 0)
    for content in (1, 2, 3, 4):
        before = len(served)
        push(loading, content, between=lambda: served.append(adapter.holds()))
        assert adapter.holds() == content
        assert set(served[before:]) == {content - 1}
    assert adapter.loads == 0
    assert dict(adapter.model.named_parameters()) == held
    assert loading.path.endswith("copies, into a standby")
    assert loading.status().pushes == 4
    assert loading.ready().standby_s > 0.0


def test_the_version_before_comes_back(slices):
    adapter = Moves()
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
    for _ in range(2):
        assert loading.undo("push 3")
        assert adapter.holds() == 2
    loading.load(stage_of(loading, 3, "push 3"), "push 3")  # it is still there
    for rollback, content in (("back", 2), ("forth", 3), ("back again", 2)):
        loading.go_back(rollback)
        assert (adapter.holds(), loading.standby.holds_before()) == (content, True)
    push(loading, 4)
    assert (adapter.holds(), adapter.loads) == (4, 0)


def test_an_exchange_that_fails_changes_nothing(monkeypatch):
    adapter = Moves()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    staged = stage_of(loading, 3, "push 3")
    ready(loading, staged)
    swap = swapping._set_data
    for number in range(len(NAMES)):
        left = [number]

        def failing(*both, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise MemoryError("no room")
            swap(*both)

        with monkeypatch.context() as patch:
            patch.setattr(swapping, "_set_data", failing)
            with pytest.raises(MemoryError):
                loading.load(staged, "push 3")
        assert loading.undo("push 3")
        assert adapter.holds() == 2
    loading.load(staged, "push 3")
    assert adapter.holds() == 3
    push(loading, 4)
    assert (adapter.holds(), adapter.loads) == (4, 0)


def test_steps_around_the_exchange_that_fail_are_undone():
    adapter = Moves()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    faults = []

    @contextlib.contextmanager
    def around():
        if "enter" in faults:
            faults.clear()
            raise RuntimeError("another session is open")
        yield
        if "exit" in faults:
            faults.clear()
            raise RuntimeError("its checks failed")

    adapter.around = around
    for fault in ("enter", "exit"):
        staged = stage_of(loading, 3, fault)
        ready(loading, staged)
        faults.append(fault)
        with pytest.raises(RuntimeError, match=r"another session|its checks"):
            loading.load(staged, fault)
        assert loading.undo(fault)
        assert adapter.holds() == 2
    push(loading, 4)
    assert adapter.holds() == 4


@pytest.mark.parametrize("what", ["in place", "by moving"])
def test_weights_that_are_processed_after_the_exchange_are_loaded_by_the_loader(what):
    adapter = Moves()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)

    @contextlib.contextmanager
    def around():
        yield
        for parameter in adapter.model.parameters():
            if what == "in place":
                parameter.data.neg_()
            else:
                parameter.data = parameter.data.clone()

    adapter.around = around
    staged = stage_of(loading, 3, "push 3")
    ready(loading, staged)
    loading.load(staged, "push 3")
    assert adapter.loads == 1
    assert all(bits(tensor) == bits(adapter.model.get_parameter(name)) for name, tensor in checkpoint(3).items())
    assert "processed after loading" in loading.path or "moves" in loading.path
    assert not loading.standby.holds_before()


def shared_memory(adapter):
    """A parameter that no push loads lies in the memory of one that is."""
    memory = torch.zeros(200)
    adapter.model.layer_1.data = memory[:120].view(30, 4)
    adapter.model.other = torch.nn.Parameter(memory[150:], requires_grad=False)


def opaque(adapter):
    adapter.model.handle = types.SimpleNamespace(packed=iter([1]))


def unknown_room(adapter):
    adapter.movable = Movable(ranks=1 << 40)


def asleep(adapter):
    adapter.movable = Movable(lacks=lambda: sleeping_needs_room({"weights", "kv"}))


REFUSED = {
    "half": (lambda adapter: None, by_name_but_half_of_one, "only a part of layer_9 is loaded"),
    "shared": (shared_memory, by_name, "other is not loaded, and shares memory with what is"),
    "opaque": (opaque, by_name, "handle.packed is a list_iterator, whose content is not known"),
    "no room": (unknown_room, by_name, "are free"),
    "asleep": (asleep, by_name, "no standby: the memory of kv, weights sleeps, and needs the room when it wakes"),
    "fixed": (lambda adapter: setattr(adapter, "movable", "graphs"), by_name, "no standby: graphs"),
}


@pytest.mark.parametrize(("act", "load", "reason"), REFUSED.values(), ids=REFUSED)
def test_where_it_cannot_be_the_plan_is_replayed_in_the_pause(act, load, reason):
    adapter = Moves(load)
    act(adapter)
    loading = Loading(adapter)
    held = {name: tensor.data_ptr() for name, tensor in adapter.model.named_parameters()}
    for content in (1, 2, 3):
        push(loading, content)
        assert bits(adapter.model.layer_5) == bits(checkpoint(content)["layer_5"])
    assert {name: tensor.data_ptr() for name, tensor in adapter.model.named_parameters()} == held
    assert adapter.loads == 1
    assert reason in loading.path
    assert "into a standby" not in loading.path
    assert not loading.standby.holds_before()


def test_what_holds_no_weights_may_be_opaque():
    adapter = Moves()
    opaque(adapter)
    adapter.movable = Movable(rules=Rules(apart=lambda found: isinstance(found, types.SimpleNamespace)))
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content
    assert loading.path.endswith("into a standby")


def test_a_standby_that_finds_no_memory_is_given_up_for_that_push(monkeypatch):
    adapter = Moves()
    loading = Loading(adapter)
    with monkeypatch.context() as patch:
        patch.setattr(arenas, "free_bytes", lambda device: 100)
        for content in (1, 2):
            push(loading, content)
            assert adapter.holds() == content
            assert "and 100 are free" in loading.path
    push(loading, 3)
    assert (adapter.holds(), loading.path.endswith("into a standby")) == (3, True)


def test_memory_is_given_back_whichever_set_is_served():
    for pushes in (2, 3):
        adapter = Moves()
        loading = Loading(adapter)
        for content in range(pushes):
            push(loading, content)
        first = (
            adapter.model.layer_0.untyped_storage().data_ptr()
        )  # its views refer to the memory in which they were made
        pairs = [(one.untyped_storage(), other.untyped_storage()) for one, other in loading.standby._set.tensors]
        held = [weakref.ref(other) for one, other in pairs if one.data_ptr() != first]
        assert len(held) == len(NAMES) - 1
        del pairs
        live = {parameter.untyped_storage().data_ptr() for parameter in adapter.model.parameters()}
        loading.standby.release()
        loading.keep(())
        gc.collect()
        assert not any(found() is not None and found().nbytes() for found in held)
        assert {parameter.untyped_storage().data_ptr() for parameter in adapter.model.parameters()} == live
        assert adapter.holds() == pushes - 1
        push(loading, 5)
        push(loading, 6)
        assert (adapter.holds(), adapter.loads) == (6, 0)


def test_a_loader_that_changes_gets_another_plan_and_standby():
    adapter = Moves()
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)

    other = {"layer_1": "layer_2", "layer_2": "layer_1"}
    adapter._load = lambda model, weights: by_name(model, ((other.get(name, name), one) for name, one in weights))
    for content in (4, 5, 6, 7, 8, 9):
        push(loading, content)
    assert bits(adapter.model.layer_1) == bits(checkpoint(9)["layer_2"])
    assert adapter.loads == 0
    assert loading.path.endswith("into a standby")


def test_a_model_that_someone_changes_while_it_is_filled_is_not_exchanged(slices):
    adapter = Moves()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    staged = stage_of(loading, 3, "push 3")
    ready(loading, staged)
    adapter.model.layer_3 = torch.nn.Parameter(adapter.model.layer_3.data.clone(), requires_grad=False)
    ready(loading, staged)
    loading.load(staged, "push 3")
    assert adapter.holds() == 3


def test_a_stage_that_is_overwritten_while_it_is_read_is_noticed_before_anything_changes():
    class Checked(Staged):
        bad = False

        def check(self):
            if self.bad:
                raise TransferFailed("the trainer has written there")

    adapter = Moves()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    staged = stage_of(loading, 3, "push 3", kind=Checked)
    staged.bad = True
    with pytest.raises(TransferFailed, match="the trainer has written there"):
        ready(loading, staged)
    assert adapter.holds() == 2
    push(loading, 4)
    assert adapter.holds() == 4


def test_tensors_in_separate_memory_fill_it_too(slices):
    adapter = Moves()
    loading = Loading(adapter)
    for content in (1, 2, 3):
        staged = stage_of(loading, content, f"push {content}", scattered)
        ready(loading, staged)
        loading.load(staged, staged.push)
        assert adapter.holds() == content
    assert adapter.loads == 0
