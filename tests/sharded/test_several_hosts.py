"""Trainers of four processes on two hosts: each host holds its part of the model, and all engines get everything."""

import os
import signal
from typing import NamedTuple

import pytest

from weightsync.memory.arenas import OWN_NAME, SHM_DIRECTORY
from weightsync.protocol import control
from weightsync.tensors.layout import ALIGN_BYTES

from .conftest import assert_pushed, fine, served
from .test_faults import assert_failed

#: A tensor of each cell begins at a multiple of so many bytes.
PADDING = 100 * ALIGN_BYTES


class Way(NamedTuple):
    """A transport, and whether the engines are on the host of the first half of the ranks. Over NIXL engines read from
    their own host, and the other writes."""

    transport: str
    first: bool = True

    def sending(self, rank, written):
        """Whether a rank sends, which has ``written`` so many bytes with those of its host."""
        lowest = rank in (0, 2) and written > 0
        return lowest and (self.transport == "nccl" or self.first == (rank == 2))


WAYS = {"nccl": Way("nccl"), "nixl": Way("nixl"), "nixl-second": Way("nixl", first=False)}


def on_two_hosts(trainer, way=WAYS["nccl"]):
    """Have half of the ranks report another host than that of the engines."""
    size = len(trainer.processes)
    for rank in range(size):
        trainer.tell("elsewhere " + ("another" if way.first == (rank >= size // 2) else ""), rank)
    assert fine(trainer.hear(), size)
    return trainer


@pytest.fixture(params=["nccl", "nixl"])
def transport(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(start):
    return start(4)


@pytest.fixture
def spread(ranks):
    """Four ranks on two hosts."""
    return on_two_hosts(ranks)


@pytest.fixture
def ready(engines, spread, untrained):
    """Return the four with FSDP2 shards, and a sender with a short deadline."""

    def build(transport):
        assert fine(spread.all("shard fsdp"), 4)
        assert fine(spread.build(engines, timeout_s=8.0, transport=transport), 4)
        return spread

    yield build
    for process in spread.processes:
        os.kill(process.pid, signal.SIGCONT)
    spread.all("close")


def arenas_of(trainer):
    """The sizes of the arenas of each rank."""
    found = [[] for _ in trainer.processes]
    pids = [process.pid for process in trainer.processes]
    for path in SHM_DIRECTORY.iterdir():
        if OWN_NAME.fullmatch(path.name) and path.is_file() and (pid := int(path.name.split("-")[1])) in pids:
            found[pids.index(pid)].append(path.stat().st_size)
    return found


HOWS = ["fsdp", "hsdp", "mesh", "columns", "parts", "stages", "half", "named", "masters", "mixed"]
#: Which host the engines are on decides only which of the trainer's hosts writes. These show it; the others are slow.
FEW = ("fsdp", "columns", "stages")
SPLITS = [
    pytest.param(how, way, id=f"{how}-{name}", marks=() if way.first or how in FEW else pytest.mark.slow)
    for how in HOWS
    for name, way in WAYS.items()
]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("how", "way"), SPLITS)
def test_every_host_holds_and_sends_its_part(engines, ranks, expected, changed, how, way):
    spread = on_two_hosts(ranks, way)
    assert fine(spread.all(f"shard {how}"), 4)
    assert fine(spread.build(engines, transport=way.transport), 4)
    for digest in (expected,) if how == "named" else (expected, changed, expected):
        said = spread.all("push")
        nbytes = said[0]["nbytes"]
        assert sum(one["written"] for one in said) == nbytes
        assert served(engines) == [digest, digest]
        arenas, hosts = arenas_of(spread), [sum(one["written"] for one in said[at : at + 2]) for at in (0, 2)]
        assert [len(one) for one in arenas] == [1, 0, int(hosts[1] > 0), 0]
        for arena, written in zip((arenas[0], arenas[2]), hosts, strict=True):
            assert written <= sum(arena) <= written + PADDING
        sending = [way.sending(rank, hosts[rank // 2]) for rank in range(4)]
        assert [bool(one["sent"]) for one in said] == sending
        if how != "named":
            spread.all("change")
    assert fine(spread.all("close"), 4)
    assert arenas_of(spread) == [[], [], [], []]


@pytest.mark.usefixtures("untrained")
def test_replicas_are_sent_by_rank_0_alone(engines, spread, expected, transport):
    assert fine(spread.all("shard replicas"), 4)
    assert fine(spread.build(engines, transport=transport), 4)
    said = spread.all("push")
    assert [bool(one["sent"]) for one in said] == [transport == "nccl", False, False, False]
    assert served(engines) == [expected, expected]
    assert fine(spread.all("close"), 4)


@pytest.mark.parametrize("options", [{"bucket_bytes": 8192}, {"keep_previous": True}, {"verify": "deep"}])
def test_options_hold_on_several_hosts(engines, spread, untrained, expected, changed, options, transport):
    assert fine(spread.all("shard mesh"), 4)
    assert fine(spread.build(engines, transport=transport, **options), 4)
    assert_pushed(spread)
    assert served(engines) == [expected, expected]
    spread.all("change")
    assert_pushed(spread)
    assert served(engines) == [changed, changed]
    if "keep_previous" in options:
        assert len({one["version"] for one in spread.all("rollback")}) == 1
        assert served(engines) == [expected, expected]
        assert [len(one) for one in arenas_of(spread)] == [1, 0, 1, 0]
        assert_pushed(spread)
        assert served(engines) == [changed, changed]
    assert fine(spread.all("close"), 4)


def test_pushes_in_the_background_iterators_and_new_engines(engines, spread, untrained, expected, changed, transport):
    assert fine(spread.all("shard fsdp"), 4)
    assert fine(spread.build(engines[:1], transport=transport), 4)
    said = spread.all("push_async")
    assert {one["read"] for one in said} == {"sent"}
    assert served(engines) == [expected, untrained]
    # No arena holds everything, so it does not catch up: the next push brings it.
    assert [one["transport"] for one in spread.all(f"add {engines[1]}")] == [""] * 4
    assert spread.all("catch_up") == [[]] * 4
    assert served(engines) == [expected, untrained]
    assert_pushed(spread)
    assert served(engines) == [expected, expected]
    spread.all("change")
    assert len({one["version"] for one in spread.all("iterate")}) == 1
    assert served(engines) == [changed, changed]
    assert fine(spread.all("close"), 4)


@pytest.mark.usefixtures("untrained")
def test_a_trainer_with_nothing_on_the_host_of_rank_0(engines, start, expected, transport):
    trainer = start(3)
    trainer.tell("elsewhere another", 1, 2)
    assert fine(trainer.hear(1, 2), 2)
    trainer.tell("shard nothing", 0)
    trainer.tell("shard stages", 1, 2)
    assert fine(trainer.hear(), 3)
    assert fine(trainer.build(engines, transport=transport), 3)
    for said in trainer.all("push"):
        assert_failed(said, "ManifestMismatch", "missing: ")
    trainer.tell("shard nothing", 0)
    trainer.tell("shard replicas", 1, 2)
    assert fine(trainer.hear(), 3)
    assert [one["written"] > 0 for one in trainer.all("push")] == [False, True, False]
    assert served(engines) == [expected, expected]
    trainer.stop()


@pytest.mark.usefixtures("untrained")
def test_what_each_host_holds_may_change_between_pushes(engines, start, expected, changed, transport):
    trainer = start(4)
    trainer.tell("elsewhere second", 1, 2)
    trainer.tell("elsewhere third", 3)
    assert fine(trainer.hear(1, 2, 3), 3)
    assert fine(trainer.all("shard stages"), 4)
    assert fine(trainer.build(engines, transport=transport), 4)
    sizes = []
    for how in ("stages", "swapped", "stages", "fsdp", "replicas", "swapped"):
        assert fine(trainer.all(f"shard {how}"), 4)
        for digest in (expected, changed):
            trainer.all("push")
            assert served(engines) == [digest, digest], how
            trainer.all("change")
        sizes.append(tuple(map(sum, arenas_of(trainer))))
    assert sizes[0] == sizes[2] != sizes[1]
    assert sizes[0][0] == sizes[1][0]
    assert fine(trainer.all("close"), 4)
    assert arenas_of(trainer) == [[], [], [], []]
    trainer.stop()


def test_transports_that_take_one_host_are_refused(engines, spread):
    for said in spread.build(engines, transport="ipc_zmq"):
        words = "ipc_zmq takes a trainer on one host", 'pass transport="nixl", "nccl" or "auto"'
        assert_failed(said, "UnsupportedOption", *words)


def test_weights_without_a_stage_are_refused(engines, spread, untrained):
    assert fine(spread.all("shard fsdp"), 4)
    assert fine(spread.build(engines, staging="none"), 4)
    for said in spread.all("push"):
        assert_failed(said, "UnsupportedOption", "on several hosts push into a stage", "asked for")
    assert served(engines) == [untrained, untrained]
    assert fine(spread.all("close"), 4)


def assert_named(said, rank):
    """The first rank names the one that is wrong. On a busy machine others may give up before rank 0 has told them."""
    assert f"trainer rank {rank}" in said[0]["message"], said
    named = (f"trainer rank {rank}", "waiting for trainer rank 0")
    assert all(any(name in one["message"] for name in named) for one in said), said


def assert_named_while_filling(ready, rank, engines, untrained, expected):
    """Assert that of four ranks one that fails, and then freezes, while it fills an arena is named, and that the next
    push succeeds."""
    others = [other for other in range(4) if other != rank]
    for word, wrong in (("lose", "the disk is gone"), (f"halt {int(signal.SIGSTOP)}", "which is stopped")):
        ready.tell("push", *others)
        ready.tell(word, rank)
        said = ready.hear(*others)
        assert {one["error"] for one in said} == {"SourceError" if word == "lose" else "PushTimeout"}, said
        assert wrong in said[0]["message"]
        assert_named(said, rank)
        os.kill(ready.processes[rank].pid, signal.SIGCONT)
        ready.hear(rank)
        assert served(engines) == [untrained, untrained]
        # The next push needs the memory. A rank that gave up by itself drops its arena when that begins.
        told = {other for other, one in zip(others, said, strict=True) if f"trainer rank {rank}" in one["message"]}
        told |= {rank} if word == "lose" else set()
        assert {other: sizes for other, sizes in enumerate(arenas_of(ready)) if other in told - {0} and sizes} == {}
    assert_pushed(ready)
    assert served(engines) == [expected, expected]


@pytest.mark.parametrize(("transport", "rank"), [("nccl", 1), ("nccl", 2), ("nccl", 3), ("nixl", 2)])
def test_a_rank_that_fails_or_freezes_while_filling_is_named(ready, engines, untrained, expected, transport, rank):
    assert_named_while_filling(ready(transport), rank, engines, untrained, expected)


@pytest.mark.parametrize(
    ("way", "rank", "action"),
    [
        *[(*which, signal.SIGKILL) for which in (("nccl", 0), ("nccl", 2), ("nixl-second", 0), ("nixl", 2))],
        *[(*which, signal.SIGSTOP) for which in (("nccl", 2), ("nixl", 2))],
        *[pytest.param(*which, signal.SIGSTOP, marks=pytest.mark.slow) for which in (("nccl", 0), ("nixl-second", 0))],
    ],
)
def test_a_rank_that_ends_or_freezes_while_it_sends_is_named(start, engines, untrained, rank, action, way):
    way = WAYS[way]
    trainer = on_two_hosts(start(4), way)
    assert fine(trainer.all("shard fsdp"), 4)
    # Its first push: on a busy machine the ranks take seconds to fill their arenas.
    assert fine(trainer.build(engines, timeout_s=16.0, bucket_bytes=8192, transport=way.transport), 4)
    others = [other for other in range(4) if other != rank]
    trainer.tell(f"stall {int(action)}", rank)
    trainer.tell("push", *others)
    said = trainer.hear(*others)
    assert {one["error"] for one in said} <= {"PushTimeout", "TransferFailed"}, said
    assert f"trainer rank {rank} (process {trainer.processes[rank].pid}" in said[0]["message"], said
    assert_named(said, rank)
    assert served(engines) == [untrained, untrained]
    trainer.stop()
    other = on_two_hosts(start(2), way)
    assert fine(other.all("shard fsdp"))
    assert fine(other.build(engines, timeout_s=60.0, transport=way.transport))
    assert_pushed(other)
    other.stop()


def test_copies_that_differ_between_hosts_are_found(engines, spread, untrained):
    assert fine(spread.all("shard replicas"), 4)
    assert fine(spread.build(engines), 4)
    spread.tell("diverge 3", 3)
    assert fine(spread.hear(3), 1)
    for said in spread.all("push"):
        assert_failed(said, "SourceError", "different values of the same weights", "(ranks 0 and 3,")
    assert served(engines) == [untrained, untrained]
    assert fine(spread.all("close"), 4)


def test_an_engine_that_does_not_know_several_hosts_is_refused(engines, spread, transport):
    assert fine(spread.all("shard fsdp"), 4)
    spread.tell("needs 99", 0)
    assert fine(spread.hear(0), 1)
    assert fine(spread.build(engines, transport=transport), 4)
    for said in spread.all("push"):
        assert_failed(said, "UnsupportedOption", "cannot be pushed to from several hosts; update it")
    assert fine(spread.all("close"), 4)
    spread.tell(f"needs {control.SEVERAL_HOSTS_MINOR}", 0)
    assert fine(spread.hear(0), 1)
