"""Where weights must stay at their addresses, those of a standby are copied there in the pause."""

import types

import pytest
import torch

from tests.unit.loaders import Model
from tests.unit.standbys import NAMES, Packs, push, ready, stage_of
from tests.unit.test_pairs import Layer
from tests.unit.test_standby_ranks import Packs as RankPacks
from tests.unit.test_standby_ranks import push as push_by
from tests.unit.two_ranks import SERVING, driven, one_engine
from weightsync import errors
from weightsync.engine.exchange import copied
from weightsync.engine.exchange.copied import Copied
from weightsync.engine.exchange.pairs import Rules, Unlike
from weightsync.engine.loading.loader import Loading
from weightsync.protocol import http
from weightsync.tensors.native_copy import Copies


class Stays(Packs):
    """Its weights must stay where they are."""

    def hooks(self):
        return super().hooks()._replace(stays=True)


class RankStays(RankPacks):
    """As `Stays`, one of two ranks."""

    def hooks(self):
        return super().hooks()._replace(stays=True)


def fails_in_the_middle(patch, number=0):
    """Have the copy with this number write something, and fail."""
    left = [number]

    class Fails(Copies):
        def make(self):
            left[0] -= 1
            if left[0] == -1:
                (targets, sources), *_ = self._small
                targets[0][:] = sources[0]
                raise OSError("no luck")
            super().make()

    patch.setattr(copied, "native_copy", types.SimpleNamespace(Copies=Fails))


def places(model):
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def test_everything_that_can_be_reached_is_copied_and_stays_where_it_is():
    live, standby = Layer(1), Layer(2)
    live.turned, standby.turned = torch.randn(4, 6).t(), torch.randn(4, 6).t()
    both = Copied(live, standby, Rules())
    pairs = [(one, one.data_ptr(), other, other.data_ptr(), other.clone()) for one, other in both.tensors]
    assert len(pairs) > 15
    both.exchange()
    for one, at, other, there, value in pairs:
        assert torch.equal(one, value)
        assert torch.equal(other, value)
        assert (one.data_ptr(), other.data_ptr()) == (at, there)
    assert not both.torn


def test_memory_in_which_several_tensors_lie_is_copied_once(monkeypatch):
    def model(numbers, apart):
        made = Model({"packed": numbers})
        made.part = numbers[1:3].clone() if apart else made.packed.data[1:3]
        return made

    live, standby = (model(torch.randn(4, 8), apart=False) for _ in range(2))
    runs = []
    made = Copies.__init__
    monkeypatch.setattr(Copies, "__init__", lambda self, given: (runs.extend(given), made(self, given))[1])
    Copied(live, standby, Rules()).exchange()
    assert [run.nbytes for run in runs] == [live.packed.nbytes]
    assert torch.equal(live.part, standby.part)
    with pytest.raises(Unlike, match=r"a tensor of shape \(2, 8\) is not shared alike in both"):
        Copied(live, model(torch.randn(4, 8), apart=True), Rules())


@pytest.mark.parametrize("part", [lambda weight: weight.data.t(), lambda weight: weight.data[1:3, 2:4]])
def test_views_that_are_not_contiguous_must_lie_alike(part):
    live, standby, apart = (Model({"packed": torch.randn(4, 8)}) for _ in range(3))
    live.part, standby.part, apart.part = part(live.packed), part(standby.packed), part(apart.packed.clone())
    Copied(live, standby, Rules()).exchange()
    assert torch.equal(live.part, standby.part)
    with pytest.raises(Unlike, match="is not shared alike in both"):
        Copied(live, apart, Rules())


def test_what_may_be_a_handle_is_refused_by_name():
    live, standby = (Model({"weight": torch.randn(3)}, {"count": torch.tensor([7])}) for _ in range(2))
    Copied(live, standby, Rules())
    for model in (live, standby):
        model.packed = {"handle": torch.tensor([id(model)])}
    with pytest.raises(Unlike, match=r"^packed\.handle may be a handle, and what it stands for cannot be copied"):
        Copied(live, standby, Rules())


def test_what_cannot_be_written_is_refused_by_name():
    live, standby = (Model({"weight": torch.randn(3)}) for _ in range(2))
    for model in (live, standby):
        model.scales = torch.ones(1).expand(3)
    with pytest.raises(Unlike, match=r"^scales is expanded, and cannot be written"):
        Copied(live, standby, Rules())


def test_pushes_are_loaded_into_a_standby_and_copied_to_where_the_weights_are(slices):
    adapter = Stays()
    loading, served = Loading(adapter), []
    push(loading, 0)
    before = places(adapter.model)
    for content in (1, 2, 3):
        assert push(loading, content, between=lambda: served.append(adapter.holds())) > len(NAMES)
        assert adapter.holds() == content
        assert set(served[-len(NAMES) :]) == {content - 1}
        assert not loading.standby.holds_before()
        assert not loading.standby.undo(f"push {content}"), "the version before is gone"
        assert adapter.holds() == content
    assert places(adapter.model) == before
    assert (adapter.made, adapter.loads, adapter.served) == (1, {"live": 0, "standby": 4}, 4)
    assert loading.path == "into a standby, by the engine's own loader, and copied"


def test_a_copy_that_fails_leaves_no_version_and_the_next_push_is_right(monkeypatch):
    adapter = Stays()
    loading = Loading(adapter)
    push(loading, 1)
    staged = stage_of(loading, 2, "push 2")
    with monkeypatch.context() as patch:
        fails_in_the_middle(patch)
        ready(loading, staged)
        with pytest.raises(OSError, match="no luck"):
            loading.load(staged, "push 2")
    assert not loading.standby.holds("push 2")
    assert not loading.standby.undo("push 2")
    push(loading, 3)
    assert (adapter.holds(), adapter.made, adapter.loads["live"]) == (3, 1, 0)


def test_weights_that_moved_since_they_were_compared_are_loaded_in_the_pause():
    adapter = Stays()
    loading = Loading(adapter)
    push(loading, 1)
    staged = stage_of(loading, 2, "push 2")
    ready(loading, staged)
    weight = adapter.model.get_parameter(NAMES[0])
    weight.data = weight.data.clone()
    loading.load(staged, "push 2")
    assert (adapter.holds(), adapter.loads["live"]) == (2, 1)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("number", [0, 1])
@driven
async def test_a_copy_that_fails_on_one_rank_makes_both_dirty_unless_a_version_is_kept(made, monkeypatch, number, keep):
    front, one, _ = one_engine(made, RankStays)
    await push_by(one, "v1", 1, keep=keep)
    with monkeypatch.context() as patch:
        fails_in_the_middle(patch, number)
        with pytest.raises(errors.ApplyFailed, match="no luck") as raised:
            await push_by(one, "v2", 2, keep=keep)
    assert raised.value.weights == ("unchanged" if keep else "dirty")
    state = (await front.front_end.status(http.StatusRequest())).state
    assert state == ("serving" if keep else "dirty")
    if keep:
        assert front.seen() == SERVING[1]
    await push_by(one, "v3", 3, keep=keep)
    assert front.seen() == SERVING[3]
