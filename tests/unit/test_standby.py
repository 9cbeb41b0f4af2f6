"""A push is loaded into a second set of the weights while the engine serves, and exchanged; or the engine's way."""

import contextlib
import re

import pytest
import torch

from tests.unit.loaders import bits, scattered
from tests.unit.standbys import NAMES, Packs, checkpoint, push, ready, stage_of, unlike
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.engine.exchange import swap as swapping
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import TransferFailed, WrongState
from weightsync.tensors.layout import spec_of
from weightsync.tensors.subset import Subset


def test_pushes_are_loaded_in_slices_into_a_standby_and_exchanged(slices):
    adapter = Packs()
    loading, served = Loading(adapter), []
    held = dict(adapter.model.named_parameters())
    push(loading, 0)
    for content in (1, 2, 3):
        assert push(loading, content, between=lambda: served.append(adapter.holds())) > len(NAMES)
        assert adapter.holds() == content
        assert set(served[-len(NAMES) :]) == {content - 1}
    assert (adapter.made, adapter.loads, adapter.served) == (1, {"live": 0, "standby": 4}, 4)
    assert dict(adapter.model.named_parameters()) == held, "whoever refers to a parameter sees the new weights"
    assert loading.path == "into a standby, by the engine's own loader, and exchanged"
    assert loading.ready().standby_s > 0.0


def test_the_version_before_comes_back_until_the_next_push_is_loaded():
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    assert not loading.standby.undo("push 1")
    for _ in range(2):
        assert loading.standby.undo("push 2")
        assert adapter.holds() == 1
    assert not loading.standby.undo("")
    loading.load(stage_of(loading, 2, "push 2"), "push 2")  # it is still there
    assert adapter.holds() == 2
    ready(loading, stage_of(loading, 3, "push 3"))
    assert not loading.standby.undo("push 2")
    assert adapter.holds() == 2


def test_a_push_that_is_called_off_in_the_middle_leaves_nothing(slices):
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    for stop in (loading.standby.stop, lambda: ready(loading, stage_of(loading, 3, "another"))):
        staged = stage_of(loading, 2, "push 2")
        with pytest.raises(Unfinished):
            loading.prepare_load(staged, "push 2")
        stop()
        assert not loading.standby.holds("push 2")
        assert not loading.standby.undo("push 1")
        assert adapter.holds() == 1
    loading.load(staged, "push 2")  # without the standby: the engine's own way
    assert adapter.holds() == 2
    assert adapter.loads["live"] == 1
    push(loading, 4)
    assert adapter.holds() == 4


def test_a_loader_that_fails_changes_nothing_and_the_next_push_makes_a_new_standby():
    adapter = Packs()
    loading = Loading(adapter)
    for content in (1, 2):
        push(loading, content)
        adapter.fails = ValueError("no such layer")
        with pytest.raises(TransferFailed, match=r"rank 0 failed .* nothing was changed: ValueError: no such layer"):
            ready(loading, stage_of(loading, 3, "never"))
        assert adapter.holds() == content
        assert not loading.standby.undo("never")
        adapter.fails = None
    push(loading, 4)
    assert (adapter.holds(), adapter.made, adapter.loads["live"], len(adapter.discarded)) == (4, 3, 0, 2)


def test_an_exchange_that_fails_changes_nothing(monkeypatch):
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    staged = stage_of(loading, 2, "push 2")
    ready(loading, staged)
    swap, left = swapping._set_data, [len(NAMES) // 2]

    def failing(*both):
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")
        swap(*both)

    monkeypatch.setattr(swapping, "_set_data", failing)
    with pytest.raises(MemoryError):
        loading.load(staged, "push 2")
    assert loading.standby.undo("push 2")
    assert adapter.holds() == 1
    loading.load(staged, "push 2")
    assert adapter.holds() == 2
    left[0] = len(NAMES) // 2
    assert not loading.standby.undo("push 2"), "that failed too"
    assert adapter.holds() == 2


def test_a_model_that_changes_while_it_serves_is_loaded_in_the_pause_from_then_on():
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    unlike(adapter)
    push(loading, 2)
    assert (adapter.holds(), adapter.loads["live"]) == (2, 1)


@pytest.mark.parametrize("apart", [False, True])
def test_a_loader_that_keeps_its_tensors_is_given_copies(apart):
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)

    def adopt(model, weights):
        for name, tensor in weights:
            model.get_parameter(name).data = tensor

    adapter.load_into = adopt
    with pytest.raises(WrongState, match=re.escape(f"did not copy {NAMES[0]} but kept the tensor")):
        ready(loading, stage_of(loading, 2, "push 2", scattered if apart else lambda layout, stage: stage))
    assert adapter.holds() == 1
    push(loading, 3)
    assert all(bits(tensor) == bits(adapter.model.get_parameter(name)) for name, tensor in checkpoint(3).items())


def push_without(loading, adapter, content, left, push, kept=None):
    """Push all tensors but some, which stay as the engine has them."""
    specs = [spec_of(*pair) for pair in checkpoint(content).items() if pair[0] not in left]
    layout = loading.accept(specs, push=push, kept=tuple(left) if kept is None else kept)
    stage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for entry in layout.entries:
        entry.view(stage).copy_(checkpoint(content)[entry.spec.name])
    staged = Staged(push, Subset(layout, {}), stage)
    ready(loading, staged)
    loading.load(staged, push)
    assert all(
        bits(-checkpoint(content)[name]) == bits(tensor)
        for name, tensor in adapter.model.named_parameters()
        if name not in left
    )


def test_what_a_push_leaves_as_it_is_is_what_is_served_and_not_what_the_standby_holds():
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)  # now the standby holds content 1
    left = NAMES[3:7]
    push_without(loading, adapter, 3, left, "part")
    held = dict(adapter.model.named_parameters())
    assert all(bits(held[name]) == bits(-checkpoint(2)[name]) for name in left)
    assert adapter.loads["live"] == 1
    assert re.search(r"no standby|into a standby", loading.path)
    push(loading, 4)
    assert (adapter.holds(), adapter.loads["live"]) == (4, 1)


def test_a_tensor_that_earlier_pushes_had_is_not_taken_from_the_standby():
    """The engine's checkpoint may come without it, as without the second of two tied ones."""
    adapter = Packs()
    adapter.expected = lambda: Expected(adapter._specs, frozenset(NAMES[:1]))
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    push_without(loading, adapter, 3, NAMES[:1], "part", kept=())
    assert bits(adapter.model.get_parameter(NAMES[0])) == bits(-checkpoint(2)[NAMES[0]])


def test_a_model_that_changed_after_the_comparison_is_loaded_in_the_pause():
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    staged = stage_of(loading, 2, "push 2")
    ready(loading, staged)
    name = NAMES[5]
    adapter.model.register_parameter(name, torch.nn.Parameter(torch.zeros(30, 4), requires_grad=False))
    loading.load(staged, "push 2")
    assert (adapter.holds(), adapter.loads["live"]) == (2, 1)


def test_an_exchange_that_cannot_be_taken_back_leaves_no_version(monkeypatch):
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    staged = stage_of(loading, 2, "push 2")
    ready(loading, staged)

    def failing(one, data, other, mirror):
        one.data = data
        patch.setattr(torch.Tensor, "data", property(lambda self: None))  # nothing can be set any more
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(swapping, "_set_data", failing)
        with pytest.raises(MemoryError):
            loading.load(staged, "push 2")
    assert not loading.standby.undo("push 2")
    assert not loading.standby.holds("push 2")


def test_a_plan_that_was_dropped_loads_in_the_pause():
    adapter = Packs()
    adapter.loader_hooks = lambda: LoaderHooks(adapter.model, adapter.load, contextlib.nullcontext)
    loading = Loading(adapter)
    for content in (1, 2, 3):
        push(loading, content)
        assert adapter.holds() == content
    assert adapter.loads["live"] >= 3


def test_tensors_of_a_push_that_was_called_off_are_not_served_later(slices):
    adapter = Packs()
    adapter.expected = lambda: Expected(adapter._specs, frozenset(NAMES[:1]))
    loading = Loading(adapter)
    for content in (1, 2):
        push_without(loading, adapter, content, NAMES[:1], f"part {content}", kept=())
    held = bits(adapter.model.get_parameter(NAMES[0]))
    ready(loading, stage_of(loading, 5, "called off"))
    loading.standby.stop()
    push_without(loading, adapter, 3, NAMES[:1], "part 3", kept=())
    assert bits(adapter.model.get_parameter(NAMES[0])) == held


def test_a_rollback_exchanges_again_and_may_fail(monkeypatch):
    adapter = Packs()
    loading = Loading(adapter)
    standby = loading.standby
    push(loading, 1)
    push(loading, 2)
    for rollback, content in (("back", 1), ("forth", 2)):
        standby.go_back(rollback)
        assert (adapter.holds(), standby.holds_before()) == (content, True)
    assert standby.undo("forth")
    assert (adapter.holds(), standby.holds_before()) == (1, True)
    with monkeypatch.context() as patch:
        patch.setattr(swapping, "_set_data", lambda *both: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            standby.go_back("failed")
    assert standby.undo("failed")
    assert (adapter.holds(), standby.holds_before(), adapter.loads["live"]) == (1, True, 0)
    # Nobody needs the version before any more once the next push is loaded.
    ready(loading, stage_of(loading, 3, "push 3"))
    assert (standby.holds_before(), standby.undo("back")) == (False, False)
    loading.load(stage_of(loading, 3, "push 3"), "push 3")
    assert (adapter.holds(), standby.holds_before()) == (3, True)


def test_a_push_that_is_called_off_early_leaves_the_version_before(slices):
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    loading.standby.stop()  # another push begins, or is aborted, before anything is loaded
    assert loading.standby.holds_before()
    with pytest.raises(Unfinished):
        loading.prepare_load(stage_of(loading, 3, "push 3"), "push 3")
    assert not loading.standby.holds_before()
    loading.standby.stop()
    assert not loading.standby.holds_before()
    loading.load(stage_of(loading, 3, "push 3"), "push 3")  # the engine's own way
    assert (adapter.holds(), loading.standby.holds_before()) == (3, False)
