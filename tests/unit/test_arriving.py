"""A standby that a load plan fills while a push arrives, in the thread that receives it."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.unit.standbys import Moves, push, ready, stage_of
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.loader import Loading

#: Neither a part nor a multiple of a tensor's size, which is 480 bytes.
BUCKET_BYTES = 1000


@pytest.fixture
def adapter():
    return Moves()


@pytest.fixture
def loading(adapter):
    """Has loaded pushes 1 and 2: the second made the standby, which holds 1."""
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    return loading


def arriving(loading, staged, name):
    return loading.arriving(staged.layout, name, BUCKET_BYTES)


def arrived(loading, content, left_out=(), **options):
    """A stage of a push, all buckets of which have been taken but those left out."""
    staged = stage_of(loading, content, f"push {content}", **options)
    filling = arriving(loading, staged, staged.push)
    for bucket in range(staged.layout.buckets(BUCKET_BYTES)):
        if bucket not in left_out:
            filling.take(staged.data, bucket)
    return staged


def commit(loading, staged):
    ready(loading, staged)
    loading.load(staged, staged.push)


def test_what_has_arrived_is_not_copied_again(loading, adapter, monkeypatch):
    def copied(plan, stage):
        raise AssertionError("the plan was replayed")

    monkeypatch.setattr(LoadPlan, "steps", copied)
    monkeypatch.setattr(LoadPlan, "replay", copied)
    for content in (3, 4, 5):
        staged = arrived(loading, content)
        assert adapter.holds() == content - 1, "the engine serves the version before"
        commit(loading, staged)
        assert adapter.holds() == content
        staged.data.fill_(77)
    assert adapter.loads == 0
    assert loading.path.endswith("into a standby")


def by_columns(model, weights):
    for name, tensor in weights:
        for columns in (slice(0, 1), slice(1, 4)):
            model.get_parameter(name).data[:, columns].copy_(tensor[:, columns])


def test_columns_are_taken_with_the_bucket_in_which_their_tensor_ends(monkeypatch):
    adapter = Moves(by_columns)
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    assert not loading._plan.runs
    monkeypatch.setattr(LoadPlan, "steps", None)
    for left_out in ((), (4, 5)):
        for content in (3, 4):
            commit(loading, arrived(loading, content, left_out))
            assert adapter.holds() == content


@pytest.mark.parametrize("left_out", [(0,), (3, 7), range(100)], ids=["first", "two", "all"])
def test_buckets_that_were_not_taken_are_copied_before_the_commit(loading, adapter, left_out):
    commit(loading, arrived(loading, 3, left_out))
    assert adapter.holds() == 3


def test_a_bucket_is_taken_once(loading, adapter):
    staged = arrived(loading, 3)
    filling = loading.standby._arriving
    copy = staged.data.clone()
    staged.data.fill_(77)
    filling.take(staged.data, 0)
    staged.data.copy_(copy)
    commit(loading, staged)
    assert adapter.holds() == 3


def test_what_the_standby_held_is_no_version_from_the_first_bucket_on(loading):
    assert loading.standby.holds_before()
    staged = stage_of(loading, 3, "push 3")
    assert loading.standby.holds_before()
    arriving(loading, staged, "push 3")
    assert not loading.standby.holds_before()
    assert not loading.undo("push 2")


def test_what_arrived_for_a_push_that_was_called_off_is_not_served(loading, adapter):
    arrived(loading, 3)
    loading.standby.stop()
    commit(loading, stage_of(loading, 4, "push 4"))
    assert adapter.holds() == 4
    arrived(loading, 5)
    commit(loading, arrived(loading, 6))
    assert adapter.holds() == 6


def test_a_push_that_failed_while_it_arrived_leaves_no_reference_to_its_memory():
    adapter = Moves(by_columns)
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    staged = stage_of(loading, 3, "push 3")
    arriving(loading, staged, "push 3").take(staged.data, 0)
    memory = StorageWeakRef(staged.data.untyped_storage())
    del staged
    assert not memory.expired(), "the columns of later buckets"
    loading.keep(())
    assert memory.expired()
    commit(loading, arrived(loading, 4))
    assert adapter.holds() == 4


def test_what_arrived_in_another_stage_is_copied_anew(loading, adapter):
    first = arrived(loading, 3)
    staged = stage_of(loading, 4, first.push)
    commit(loading, staged)
    assert adapter.holds() == 4


def test_the_same_push_with_buckets_of_another_size(loading, adapter):
    for size in (1000, 1 << 20, 480, 1000):
        for content in (3, 4):
            staged = stage_of(loading, content, f"push {content}")
            filling = loading.arriving(staged.layout, staged.push, size)
            for bucket in range(staged.layout.buckets(size)):
                filling.take(staged.data, bucket)
            commit(loading, staged)
            assert adapter.holds() == content


def test_there_is_nothing_to_take_it_before_there_is_a_standby_and_after_it_was_given_back(adapter):
    loading = Loading(adapter)
    staged = stage_of(loading, 1, "push 1")
    assert arriving(loading, staged, "push 1") is None
    commit(loading, staged)
    assert arriving(loading, stage_of(loading, 3, "push 3"), "push 3") is not None
    loading.standby.release()
    staged = stage_of(loading, 4, "push 4")
    assert arriving(loading, staged, "push 4") is None
    commit(loading, staged)
    assert adapter.holds() == 4


def test_a_model_that_someone_changes_while_a_push_arrives_is_loaded_another_way(loading, adapter):
    staged = arrived(loading, 3)
    adapter.model.layer_3 = torch.nn.Parameter(adapter.model.layer_3.data.clone(), requires_grad=False)
    commit(loading, staged)
    assert adapter.holds() == 3
    commit(loading, arrived(loading, 4))
    assert adapter.holds() == 4


def test_a_push_that_arrived_is_undone_by_the_version_before(loading, adapter):
    staged = arrived(loading, 3)
    ready(loading, staged)
    assert loading.standby.holds("push 3")
    loading.load(staged, "push 3")
    assert loading.undo("push 3")
    assert adapter.holds() == 2
