"""Trainers of several processes whose parameters are in shared memory: engines read them where they are."""

import os
import signal
import time

import pytest

from tests.faulty import SETTLE_S, faulty
from tools import models
from weightsync.protocol import control

from .conftest import assert_pushed, fine, served
from .test_faults import assert_failed
from .test_several_hosts import arenas_of


def assert_in_place(trainer):
    """Push, and assert that no rank writes anything, and none has an arena."""
    size = len(trainer.processes)
    said = trainer.all("push")
    assert [one["written"] for one in said] == [0] * size, said
    assert arenas_of(trainer) == [[]] * size


def shared(trainer, engines, how="fsdp", **options):
    """A trainer whose shards are in shared memory, and its sender."""
    size = len(trainer.processes)
    assert fine(trainer.all(f"shard {how}"), size)
    assert fine(trainer.all("share"), size)
    assert fine(trainer.build(engines, **options), size)
    return trainer


@pytest.fixture
def ready(engines, pair, untrained):
    """A pair with a short deadline."""
    yield shared(pair, engines, timeout_s=8.0)
    for process in pair.processes:
        os.kill(process.pid, signal.SIGCONT)
    pair.all("close")


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("how", ["fsdp", "hsdp", "parts", "stages", "half", "swapped", "overlapping"])
def test_what_every_process_holds_is_read_where_it_is(engines, four, expected, changed, how):
    shared(four, engines, how)
    for digest in (expected, changed, expected):
        assert_in_place(four)
        assert served(engines) == [digest, digest]
        four.all("change")
    assert fine(four.all("close"), 4)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("options", [{"verify": "off"}, {"verify": "deep"}])
def test_it_holds_with_every_way_to_verify(engines, pair, expected, changed, options):
    shared(pair, engines, **options)
    for digest in (expected, changed):
        assert_in_place(pair)
        assert served(engines) == [digest, digest]
        pair.all("change")
    assert fine(pair.all("close"))


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(
    ("how", "options"),
    [
        *[(how, {}) for how in ("columns", "mesh", "named", "masters", "reused")],
        *[("fsdp", options) for options in ({"bucket_bytes": 8192}, {"keep_previous": True}, {"transport": "nixl"})],
    ],
)
def test_what_cannot_be_read_in_place_is_written_into_an_arena(engines, four, expected, how, options):
    assert fine(four.all(f"shard {how}"), 4)
    if how not in ("named", "reused"):
        assert fine(four.all("share"), 4)
    assert fine(four.build(engines, **options), 4)
    for _ in range(2):
        assert_pushed(four)
        assert served(engines) == [expected, expected]
    assert fine(four.all("close"), 4)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_without_shared_memory_has_all_write_into_an_arena(engines, pair, expected, changed, rank):
    assert fine(pair.all("shard fsdp"))
    pair.tell("share", 1 - rank)
    assert fine(pair.hear(1 - rank), 1)
    assert fine(pair.build(engines))
    assert_pushed(pair)
    assert served(engines) == [expected, expected]
    pair.tell("share", rank)
    assert fine(pair.hear(rank), 1)
    pair.all("change")
    assert_in_place(pair)
    assert served(engines) == [changed, changed]
    assert fine(pair.all("close"))


@pytest.mark.usefixtures("untrained")
def test_an_engine_of_an_earlier_release_reads_an_arena(engines, pair, expected):
    pair.tell("shares 99", 0)
    assert fine(pair.hear(0), 1)
    shared(pair, engines)
    assert_pushed(pair)
    assert served(engines) == [expected, expected]
    assert fine(pair.all("close"))
    pair.tell(f"shares {control.SHARED_SHARDS_MINOR}", 0)
    assert fine(pair.hear(0), 1)


def test_pushes_in_the_background_are_copied(ready, engines, expected, changed):
    assert_in_place(ready)
    assert served(engines) == [expected, expected]
    for _ in range(2):  # each changes the weights twice
        assert {one["read"] for one in ready.all("push_async")} == {"copied"}
        assert served(engines) == [expected, expected]
    # From then on all are: a copied push has a load plan of its own.
    ready.all("change")
    assert_pushed(ready)
    assert served(engines) == [changed, changed]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_that_have_moved_are_mapped_again(engines, pair, expected, changed, rank):
    shared(pair, engines, "stages")
    assert_in_place(pair)
    for digest in (changed, expected):
        pair.all("change")
        pair.tell("move", rank)
        assert fine(pair.hear(rank), 1)
        assert_in_place(pair)
        assert served(engines) == [digest, digest]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("word", ["lose", f"halt {int(signal.SIGSTOP)}"])
def test_a_rank_that_fails_or_freezes_while_it_offers_is_named(ready, engines, untrained, expected, rank, word):
    assert_in_place(ready)
    other = 1 - rank
    ready.all("change")
    before = served(engines)
    ready.tell("push", other)
    ready.tell(word, rank)
    (said,) = ready.hear(other)
    if word == "lose":
        assert_failed(said, "SourceError", "the disk is gone")
    else:
        assert said["error"] == "PushTimeout", said
        assert f"trainer rank {rank}" in said["message"]
    os.kill(ready.processes[rank].pid, signal.SIGCONT)
    ready.hear(rank)
    assert served(engines) == before
    ready.all("change")
    assert_in_place(ready)
    assert served(engines) == [expected, expected]


@pytest.fixture(scope="module")
def slow(model_folder, tmp_path_factory):
    with faulty(model_folder("llama", 0), tmp_path_factory.mktemp("orders")) as engine:
        yield engine


def await_fault(engine):
    give_up = time.monotonic() + SETTLE_S
    while not engine.suffered():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.mark.parametrize("pushes", [0, 2])
def test_what_a_rank_may_change_after_its_deadline_is_not_served(slow, pair, model_folder, pushes):
    """``pushes``: the load plan loads only after the first push."""
    shared(pair, [slow.url], timeout_s=6.0)
    for _ in range(pushes):
        assert_in_place(pair)
    slow.order("stop", 3)
    said = pair.all("push")
    assert {one["error"] for one in said} <= {"PushTimeout", "ApplyFailed"}, said
    assert slow.suffered()
    pair.tell("change", 1)
    assert fine(pair.hear(1), 1)
    slow.thaw()
    reply = slow.settled()
    assert reply.state == "dirty", reply
    assert "cancelled the push" in reply.detail
    pair.tell("change", 1)
    assert fine(pair.hear(1), 1)
    assert_in_place(pair)
    assert slow.settled().state == "serving"
    assert fine(pair.all("close"))
    slow.heal(models.load_reference(model_folder("llama", 0)))


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_served_of_a_trainer_that_was_killed_during_the_load(slow, start, model_folder, rank):
    trainer = shared(start(2), [slow.url], timeout_s=60.0)
    slow.order("stop", 3)
    trainer.tell("push")
    await_fault(slow)
    trainer.processes[rank].kill()
    trainer.processes[rank].wait()
    slow.thaw()
    reply = slow.settled()
    assert reply.state == "dirty", reply
    assert "process has ended" in reply.detail
    trainer.stop()
    slow.heal(models.load_reference(model_folder("llama", 0)))
