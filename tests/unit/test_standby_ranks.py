"""Two ranks of one engine that load into standbys: both serve what was pushed, or both the version before."""

import asyncio
import threading

import pytest
import torch

from tests.unit.loaders import Model
from tests.unit.test_states import DictAdapter
from tests.unit.two_ranks import PATIENCE_S, SERVING, driven, one_engine
from weightsync import errors
from weightsync.engine import rank_methods
from weightsync.engine.adapter import Sealed, StandbyHooks
from weightsync.engine.exchange import swap as swapping
from weightsync.memory import arenas
from weightsync.protocol import http


class Packs(DictAdapter):
    """A `DictAdapter` of a model; ``loads`` is called between two tensors that are loaded into a standby."""

    def __init__(self):
        super().__init__()
        self.model = Model(self.weights)
        self.weights = dict(self.model.named_parameters())
        self.has_standby, self.loads = True, lambda: None

    def loader_hooks(self):
        return Sealed(self.model, "it packs layers", lambda: self.hooks() if self.has_standby else "not now")

    def hooks(self):
        return StandbyHooks(self.model, 1, self.make, self.load_into, lambda: None, lambda model: None)

    def make(self, weights):
        made = Model({name: torch.zeros_like(tensor) for name, tensor in self.weights.items()})
        self.load_into(made, weights)
        return made

    def load_into(self, model, weights):
        for number, (name, tensor) in enumerate(weights):
            if number == 1:
                self.loads()
            model.get_parameter(name).copy_(tensor)


@pytest.fixture
def harness(made):
    return one_engine(made, Packs)


async def push(trainer, version, value, keep=True, timeout_s=PATIENCE_S, **more):
    await trainer.stage(version, value, keep=keep)
    await trainer.commit(version, timeout_s=timeout_s, **more)


def fails_at(patch, number):
    """Have the exchange of the tensor with this number fail, counted over both ranks; those after it succeed."""
    swap, left = swapping._set_data, [number]

    def swapped(*both):
        left[0] -= 1
        if left[0] == -1:
            raise OSError("no luck")
        swap(*both)

    patch.setattr(swapping, "_set_data", swapped)


@driven
async def test_the_engine_answers_between_slices_and_serves_the_version_before(harness, monkeypatch):
    monkeypatch.setattr("weightsync.engine.exchange.slices.SLICE_S", 0.0)
    front, one, _ = harness
    await push(one, "v1", 1)
    go = threading.Event()

    def wait_for_go():
        while not go.is_set():
            torch.ones(1).sum()

    front.ranks[1]._adapter.loads = wait_for_go
    await one.stage("v2", 2)
    commit = asyncio.ensure_future(one.commit("v2", timeout_s=60.0))
    seen = [(await front.front_end.status(http.StatusRequest())).state for _ in range(5)]
    assert set(seen) <= {"receiving", "prepared"}
    assert [value for _, value in front.seen()] == [1.0, 1.0]
    assert not commit.done()
    go.set()
    await commit
    assert front.seen() == SERVING[2]


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@driven
async def test_an_exchange_that_fails_on_one_rank_is_taken_back_on_both(harness, monkeypatch, number):
    front, one, _ = harness
    await push(one, "v1", 1)
    with monkeypatch.context() as patch:
        fails_at(patch, number)
        with pytest.raises(
            errors.ApplyFailed, match=f"rank {number // 2} serves the version before again.*no luck"
        ) as raised:
            await push(one, "v2", 2)
    assert (raised.value.weights, front.seen()) == ("unchanged", SERVING[1])
    assert await front.version() == "v1"
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


@pytest.mark.parametrize("rank", [0, 1])
@driven
async def test_a_rank_that_fails_before_the_pause_is_the_one_that_is_named(harness, monkeypatch, rank):
    monkeypatch.setattr("weightsync.engine.exchange.slices.SLICE_S", 0.0)
    front, one, _ = harness
    await push(one, "v1", 1)
    front.ranks[rank]._adapter.loads = lambda: 1 / 0
    with pytest.raises(errors.TransferFailed) as raised:
        await push(one, "v2", 2)
    assert "still loading" not in str(raised.value)
    assert f"rank {rank} failed while loading into its standby, and nothing was changed" in str(raised.value)
    assert front.seen() == SERVING[1]
    front.ranks[rank]._adapter.loads = lambda: None
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


@driven
async def test_a_dirty_engine_stays_dirty_if_an_exchange_fails_and_is_healed_by_the_next(harness, monkeypatch):
    front, one, _ = harness
    await push(one, "v1", 1)
    for rank in front.ranks:
        rank._adapter.has_standby = False
        rank._loading.standby._drop()
        rank._kept.clear()
    front.ranks[1]._adapter.fails = True
    with pytest.raises(errors.ApplyFailed) as raised:
        await push(one, "v2", 2)
    assert raised.value.weights == "dirty"
    for rank in front.ranks:
        rank._adapter.has_standby, rank._adapter.fails = True, False
    with monkeypatch.context() as patch:
        fails_at(patch, 3)
        with pytest.raises(errors.ApplyFailed) as raised:
            await push(one, "v3", 3)
    assert raised.value.weights == "dirty"
    assert front.ranks[1].status().state == "dirty"
    assert (await front.front_end.status(http.StatusRequest())).state == "dirty"
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


@driven
async def test_a_push_that_takes_half_of_its_time_to_load_is_loaded_in_the_pause(harness, monkeypatch):
    monkeypatch.setattr("weightsync.engine.exchange.slices.SLICE_S", 0.0)
    front, one, _ = harness
    await push(one, "v1", 1)
    ended = []

    def for_ever():
        try:
            while True:
                torch.ones(1).sum()
        finally:
            ended.append(True)

    front.ranks[0]._adapter.loads = for_ever
    await push(one, "v2", 2, timeout_s=2.0)
    assert (ended, front.seen()) == ([True], SERVING[2])
    assert "half of the time of the push" in front.ranks[0].status().loading
    front.ranks[0]._adapter.loads = lambda: None
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


@driven
async def test_a_push_that_is_aborted_while_it_is_loaded_ends_that(harness, monkeypatch):
    monkeypatch.setattr("weightsync.engine.exchange.slices.SLICE_S", 0.0)
    front, one, _ = harness
    await push(one, "v1", 1)
    await one.stage("v2", 2)
    request = http.to_json(http.CommitRequest(push="v2", version="v2", pause="keep", timeout_s=5.0, owner="one"))
    await front.call("weightsync_ready", request)
    assert all(rank._loading.standby._work is not None for rank in front.ranks)
    await front.front_end.abort(http.AbortRequest(push="v2", owner="one"))
    assert all(rank._loading.standby._work is None for rank in front.ranks)
    assert front.seen() == SERVING[1]
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


@driven
async def test_a_standby_makes_room_for_a_stage_and_for_whoever_comes_after_the_sender(harness, monkeypatch):
    front, one, _ = harness
    standbys = [rank._loading.standby for rank in front.ranks]
    await push(one, "v1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(arenas, "free_bytes", lambda device: 0)
        await one.stage("v2")
        assert all(standby._model is not None for standby in standbys), "ranks map the sender's arena"
        await one.front_end.abort(http.AbortRequest(push="v2", owner="one"))
        await one.stage("v3", any_order=True)
        assert [standby._model for standby in standbys] == [None, None]
        await one.front_end.abort(http.AbortRequest(push="v3", owner="one"))
    await push(one, "v4", 2)
    assert front.seen() == SERVING[2]
    assert all(standby._model is not None for standby in standbys)
    for rank in front.ranks:
        rank.release("an address")
    assert [standby._model for standby in standbys] == [None, None]
    assert front.seen() == SERVING[2]


@driven
async def test_a_rank_that_sleeps_has_no_standby_and_no_push_on_its_way(harness, monkeypatch):
    front, one, _ = harness
    standbys = [rank._loading.standby for rank in front.ranks]
    await push(one, "v1", 1)
    await one.stage("v2", 2)
    for rank in front.ranks:
        rank_methods.before_sleep(rank)
    assert [standby._model for standby in standbys] == [None, None]
    assert front.seen() == SERVING[1]
    with pytest.raises(errors.TransferFailed, match="has not prepared push v2"):
        await one.commit("v2")
    await push(one, "v3", 3)
    assert front.seen() == SERVING[3]


def previous(front):
    found = [rank.status() for rank in front.ranks]
    return [(status.previous, status.standby or "") for status in found]


@driven
async def test_the_version_before_is_served_again_without_being_kept(harness, monkeypatch):
    front, one, _ = harness
    await push(one, "v1", 1, keep=False)
    assert previous(front) == [("", "")] * 2, "nobody has pushed what was served before"
    await push(one, "v2", 2, keep=False)
    assert previous(front) == [("v1", "v1")] * 2
    for push_id, label, value, other in (("back", "v1", 1, "v2"), ("forth", "v2", 2, "v1")):
        await one.commit(label, push=push_id, rollback=True)
        assert (front.seen(), await front.version()) == (SERVING[value], label)
        assert previous(front) == [(other, other)] * 2
    for number in range(4):
        with monkeypatch.context() as patch:
            fails_at(patch, number)
            with pytest.raises(errors.ApplyFailed) as raised:
                await one.commit("v1", push=f"failed {number}", rollback=True)
        assert (raised.value.weights, front.seen(), await front.version()) == ("unchanged", SERVING[2], "v2")
        assert previous(front) == [("v1", "v1")] * 2
    with pytest.raises(errors.TransferFailed, match="keeps no version 'v0'"):
        await one.commit("v0", push="unknown", rollback=True)
    await one.stage("v3", 3, keep=False)
    assert previous(front) == [("v1", "v1")] * 2
    await one.front_end.abort(http.AbortRequest(push="v3", owner="one"))
    await one.commit("v1", push="again", rollback=True)
    assert front.seen() == SERVING[1]


@driven
async def test_no_version_of_a_rank_that_has_loaded_its_own_way_is_offered(harness):
    front, one, _ = harness
    await push(one, "v1", 1, keep=False)
    await push(one, "v2", 2, keep=False)
    front.ranks[1]._adapter.has_standby = False
    await push(one, "v3", 3, keep=False)
    assert previous(front) == [("v2", "v2"), ("", "")]
    with pytest.raises(errors.TransferFailed, match="rank 1 keeps no version 'v2'"):
        await one.commit("v2", push="back", rollback=True)
    assert front.seen() == SERVING[3]


@driven
async def test_both_versions_that_are_kept_and_that_of_the_standby_agree(harness):
    front, one, _ = harness
    for number in (1, 2, 3):
        await push(one, f"v{number}", number)
    await one.commit("v2", push="back", rollback=True)
    assert (front.seen(), previous(front)) == (SERVING[2], [("v3", "v3")] * 2)
    for rank in front.ranks:
        rank._loading.standby.release()
    assert previous(front) == [("v3", "")] * 2
    await one.commit("v3", push="forth", rollback=True)
    assert front.seen() == SERVING[3]
