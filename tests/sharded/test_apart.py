"""Trainers of which each process has an arena of its own, as on GPUs: here in shared memory."""

import os
import signal

import pytest

from weightsync.protocol import control
from weightsync.transports import registry

from .conftest import assert_pushed, fine, served
from .test_faults import assert_failed
from .test_in_place import assert_in_place
from .test_several_hosts import HOWS, PADDING, arenas_of, assert_named_while_filling


def apart(trainer):
    """Have each process of a trainer make an arena of its own."""
    assert fine(trainer.all("apart"), len(trainer.processes))
    return trainer


@pytest.fixture(params=registry.available())
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(start):
    return apart(start(4))


@pytest.fixture
def ready(engines, ranks, untrained):
    """Return the four with FSDP2 shards, and a sender with a short deadline."""

    def build(transport):
        assert fine(ranks.all("shard fsdp"), 4)
        assert fine(ranks.build(engines, timeout_s=8.0, transport=transport), 4)
        return ranks

    yield build
    for process in ranks.processes:
        os.kill(process.pid, signal.SIGCONT)
    ranks.all("close")


#: Over nccl and nixl a process is what a host is in `test_several_hosts`.
SPLIT = [("ipc_zmq", how) for how in HOWS] + [(name, "mesh") for name in ("nccl", "nixl")]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("transport", "how"), SPLIT)
def test_every_process_holds_its_part_in_an_arena_of_its_own(engines, ranks, expected, changed, how, transport):
    assert fine(ranks.all(f"shard {how}"), 4)
    assert fine(ranks.build(engines, transport=transport), 4)
    for digest in (expected,) if how == "named" else (expected, changed, expected):
        said = ranks.all("push")
        assert sum(one["written"] for one in said) == said[0]["nbytes"]
        assert served(engines) == [digest, digest]
        for rank, (one, arenas) in enumerate(zip(said, arenas_of(ranks), strict=True)):
            assert len(arenas) == (one["written"] > 0 or rank == 0)
            assert one["written"] <= sum(arenas) <= one["written"] + PADDING
        if how != "named":
            ranks.all("change")
    assert fine(ranks.all("close"), 4)
    assert arenas_of(ranks) == [[], [], [], []]


@pytest.mark.parametrize("transport", ["ipc_zmq", "nixl"])
@pytest.mark.parametrize("options", [{"bucket_bytes": 8192}, {"keep_previous": True}, {"verify": "deep"}])
def test_options_hold(engines, ranks, untrained, expected, changed, options, transport):
    assert fine(ranks.all("shard mesh"), 4)
    assert fine(ranks.build(engines, transport=transport, **options), 4)
    assert_pushed(ranks)
    assert served(engines) == [expected, expected]
    ranks.all("change")
    assert_pushed(ranks)
    assert served(engines) == [changed, changed]
    if "keep_previous" in options:
        for digest in (expected, changed, expected):
            assert len({one["version"] for one in ranks.all("rollback")}) == 1
            assert served(engines) == [digest, digest]
        assert_pushed(ranks)
        assert served(engines) == [changed, changed]
    assert fine(ranks.all("close"), 4)


def test_pushes_in_the_background_iterators_and_new_engines(engines, ranks, untrained, expected, changed, transport):
    assert fine(ranks.all("shard fsdp"), 4)
    assert fine(ranks.build(engines[:1], transport=transport), 4)
    assert {one["read"] for one in ranks.all("push_async")} == {"sent"}
    assert served(engines) == [expected, untrained]
    assert [one["transport"] for one in ranks.all(f"add {engines[1]}")] == [""] * 4
    assert fills_every_arena(ranks)
    assert served(engines) == [expected, expected]
    ranks.all("change")
    assert len({one["version"] for one in ranks.all("iterate")}) == 1
    assert served(engines) == [changed, changed]
    assert fills_every_arena(ranks)
    assert served(engines) == [changed, changed]
    assert fine(ranks.all("close"), 4)


def fills_every_arena(trainer):
    """Push; whether every process has an arena."""
    assert_pushed(trainer)
    return [len(one) for one in arenas_of(trainer)] == [1] * len(trainer.processes)


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("transport", ["ipc_zmq", "nixl"])
def test_what_each_process_holds_may_change_between_pushes(engines, start, expected, changed, transport):
    trainer = apart(start(3))
    assert fine(trainer.all("shard stages"), 3)
    assert fine(trainer.build(engines, transport=transport), 3)
    sizes = []
    for how in ("stages", "swapped", "stages", "replicas"):
        assert fine(trainer.all(f"shard {how}"), 3)
        for digest in (expected, changed):
            trainer.all("push")
            assert served(engines) == [digest, digest], how
            trainer.all("change")
        sizes.append(tuple(map(sum, arenas_of(trainer))))
    assert sizes[0] == sizes[2] != sizes[1]
    assert fine(trainer.all("close"), 3)
    assert arenas_of(trainer) == [[], [], []]
    trainer.stop()


@pytest.mark.usefixtures("untrained")
def test_what_is_in_shared_memory_is_read_in_place_and_then_written(engines, start, expected, changed):
    trainer = apart(start(2))
    assert fine(trainer.all("shard fsdp"))
    assert fine(trainer.all("share"))
    assert fine(trainer.build(engines))
    assert_in_place(trainer)
    assert served(engines) == [expected, expected]
    trainer.all("change")
    assert fine(trainer.all("shard fsdp"))
    trainer.all("change")
    assert fills_every_arena(trainer)
    assert served(engines) == [changed, changed]
    assert fine(trainer.all("share"))
    trainer.all("change")
    assert_in_place(trainer)
    assert served(engines) == [expected, expected]
    assert fine(trainer.all("close"))
    trainer.stop()


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("older", [{}, {"staging": "none"}])
def test_engines_that_cannot_map_several_arenas_get_one(engines, start, expected, older):
    trainer = apart(start(2))
    assert fine(trainer.all("shard fsdp"))
    if not older:
        assert fine(trainer.all("shares 99"))
    assert fine(trainer.build(engines, **older))
    assert_pushed(trainer)
    assert [len(one) for one in arenas_of(trainer)] == [1, 0]
    assert served(engines) == [expected, expected]
    assert fine(trainer.all(f"shares {control.SHARED_SHARDS_MINOR}"))
    trainer.stop()


@pytest.mark.parametrize(("transport", "rank"), [("ipc_zmq", 1), ("ipc_zmq", 3), ("nixl", 1)])
def test_a_rank_that_fails_or_freezes_while_filling_is_named(ready, engines, untrained, expected, transport, rank):
    assert_named_while_filling(ready(transport), rank, engines, untrained, expected)


@pytest.mark.parametrize(("transport", "rank"), [("ipc_zmq", 0), ("ipc_zmq", 1), ("nixl", 1)])
def test_a_rank_that_is_killed_while_filling_is_named_and_its_successor_pushes(
    start, engines, untrained, expected, transport, rank
):
    trainer = apart(start(2))
    assert fine(trainer.all("shard fsdp"))
    assert fine(trainer.build(engines, timeout_s=30.0, transport=transport))
    trainer.tell(f"halt {int(signal.SIGKILL)}", rank)
    trainer.tell("push", 1 - rank)
    (said,) = trainer.hear(1 - rank)
    assert_failed(said, "TransferFailed", f"trainer rank {rank}", engines="unchanged" if rank else "unknown")
    assert served(engines) == [untrained, untrained]
    trainer.stop()
    other = apart(start(2))
    assert fine(other.all("shard fsdp"))
    assert fine(other.build(engines, transport=transport))
    assert_pushed(other)
    assert served(engines) == [expected, expected]
    other.stop()
