"""A trainer rank that is killed, frozen, silent or failing: every rank is told, and the engines stay unchanged."""

import json
import os
import signal
import socket

import pytest

from .conftest import assert_pushed, fine, served


@pytest.fixture
def ready(engines, pair, untrained):
    """A pair of ranks with FSDP2 shards and a sender with a short deadline."""
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, timeout_s=8.0))
    yield pair
    for process in pair.processes:
        os.kill(process.pid, signal.SIGCONT)
    pair.all("close")


@pytest.fixture
def silent():
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def assert_failed(said, error, *words, engines="unchanged"):
    assert said["error"] == error
    assert all(word in said["message"] for word in words), said["message"]
    assert set(said["engines"].values()) == ({engines} if engines else set())


def test_every_rank_is_told_of_a_source_that_cannot_be_read(ready, engines, untrained, expected):
    ready.tell("push", 0)
    ready.tell("spoil", 1)
    first, second = ready.hear()
    for said in (first, second):
        assert_failed(said, "SourceError", "trainer rank 1: ", "model.embed_tokens.weight", "redistribute()")
    ready.tell("spoil", 0)
    ready.tell("push", 1)
    for said in ready.hear():
        assert_failed(said, "SourceError", "model.embed_tokens.weight")
    assert served(engines) == [untrained, untrained]
    assert_pushed(ready)
    assert served(engines) == [expected, expected]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_is_told_of_a_rank_that_fails_while_writing(ready, engines, untrained, expected, rank):
    ready.tell("push", 1 - rank)
    ready.tell("lose", rank)
    for said in ready.hear():
        assert_failed(said, "SourceError", "the disk is gone")
    assert served(engines) == [untrained, untrained]
    assert_pushed(ready)
    assert served(engines) == [expected, expected]


def test_an_engine_of_one_rank_s_process_is_refused(ready):
    for said in ready.all("own"):
        assert_failed(said, "UnsupportedOption", "serve it by HTTP", engines=None)


def test_ranks_that_call_different_methods_are_refused(ready):
    ready.tell("push", 0)
    ready.tell("status", 1)
    for said in ready.hear():
        assert_failed(said, "WrongState", "trainer rank 1 is in 'status' and rank 0 in 'push'")
    assert_pushed(ready)


def test_a_rank_that_never_calls_push_is_named(ready, engines, untrained):
    ready.tell("push", 0)
    (said,) = ready.hear(0)
    assert_failed(said, "PushTimeout", "trainer rank 1 (process", "to push", "every rank builds a Sender")
    assert served(engines) == [untrained, untrained]
    assert_pushed(ready)


def test_a_frozen_rank_is_named_and_continues_once_thawed(ready, engines, untrained, expected):
    frozen = ready.processes[1]
    os.kill(frozen.pid, signal.SIGSTOP)
    ready.tell("push")
    (said,) = ready.hear(0)
    assert_failed(said, "PushTimeout", f"trainer rank 1 (process {frozen.pid}, which is stopped)")
    assert served(engines) == [untrained, untrained]
    os.kill(frozen.pid, signal.SIGCONT)
    ready.tell("push", 0)  # the thawed rank still has its first push to make
    assert ready.hear()[0]["version"]
    assert served(engines) == [expected, expected]


def test_a_rank_frozen_while_writing_is_named_and_continues_once_thawed(ready, engines, untrained, expected):
    frozen = ready.processes[1]
    ready.tell("push", 0)
    ready.tell(f"halt {int(signal.SIGSTOP)}", 1)
    (said,) = ready.hear(0)
    who = f"trainer rank 1 (process {frozen.pid}, which is stopped)"
    assert_failed(said, "PushTimeout", who, "to write its part into the arena")
    assert served(engines) == [untrained, untrained]
    os.kill(frozen.pid, signal.SIGCONT)
    assert ready.hear(1) == [said]
    assert_pushed(ready)
    assert served(engines) == [expected, expected]


def test_a_frozen_rank_0_is_named_too(ready, engines, expected):
    frozen = ready.processes[0]
    ready.all("close")
    assert fine(ready.build(engines, timeout_s=5.0))
    ready.tell("push", 1)
    ready.tell(f"halt {int(signal.SIGSTOP)}", 0)
    (said,) = ready.hear(1)
    who = f"trainer rank 0 (process {frozen.pid}"
    assert_failed(said, "PushTimeout", who, "no answer within 5 s", engines="unknown")
    os.kill(frozen.pid, signal.SIGCONT)
    assert_failed(ready.hear(0)[0], "PushTimeout")
    assert_pushed(ready)
    assert served(engines) == [expected, expected]


def test_a_sender_built_only_on_rank_0_is_refused_at_the_deadline(pair, engines):
    pair.tell(f'build {{"urls": ["{engines[0]}"], "timeout_s": 3}}', 0)
    (said,) = pair.hear(0)
    assert_failed(said, "PushTimeout", "trainer rank 1 to build a Sender (in a process group of 2 every rank builds")


def test_the_earliest_deadline_applies_to_every_rank(pair, silent):
    pair.tell(f'build {{"urls": ["{silent}"], "timeout_s": 60}}', 0)
    pair.tell(f'build {{"urls": ["{silent}"], "timeout_s": 3}}', 1)
    first, second = pair.hear()
    assert_failed(first, "PushTimeout", silent, engines="unknown")
    assert second == first


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_frozen_while_broadcasting_is_named(start, engines, untrained, expected, rank):
    trainer = start(2)
    assert fine(trainer.all("shard fsdp"))
    assert fine(trainer.build(engines, transport="nccl", bucket_bytes=8192, timeout_s=12.0))
    frozen = trainer.processes[rank]
    trainer.tell(f"stall {int(signal.SIGSTOP)}", rank)
    trainer.tell("push", 1 - rank)
    (said,) = trainer.hear(1 - rank)
    who = f"trainer rank {rank} (process {frozen.pid}, which is stopped)"
    assert_failed(said, "PushTimeout", who, engines="unchanged" if rank else "unknown")
    assert served(engines) == [untrained, untrained]
    os.kill(frozen.pid, signal.SIGCONT)
    assert trainer.hear(rank)[0]["error"] in ("PushTimeout", "TransferFailed")  # whichever it notices first
    trainer.all("close")
    assert fine(trainer.build(engines, transport="nccl", bucket_bytes=8192))
    assert all(one["sent"] for one in trainer.all("push"))
    assert served(engines) == [expected, expected]
    trainer.stop()


def test_a_frozen_rank_is_named_even_if_torch_ends_the_broadcasts_first(start, engines, untrained):
    trainer = start(2)
    assert fine(trainer.all("shard fsdp"))
    assert fine(trainer.build(engines, transport="nccl", bucket_bytes=8192, timeout_s=20.0))
    trainer.tell("hasten 22", 0)
    assert fine(trainer.hear(0), 1)
    trainer.tell(f"stall {int(signal.SIGSTOP)}", 1)
    trainer.tell("push", 0)
    (said,) = trainer.hear(0)
    who = f"trainer rank 1 (process {trainer.processes[1].pid}, which is stopped)"
    assert_failed(said, "TransferFailed", "could not be broadcast to rank 0 of ", who)
    assert served(engines) == [untrained, untrained]
    trainer.stop()


def test_a_rank_killed_while_broadcasting_is_named(start, pair, engines, untrained, expected):
    trainer = start(2)
    assert fine(trainer.all("shard fsdp"))
    assert fine(trainer.build(engines, transport="nccl", bucket_bytes=8192))
    trainer.tell(f"stall {int(signal.SIGKILL)}", 1)
    trainer.tell("push", 0)
    (said,) = trainer.hear(0)
    assert_failed(said, "TransferFailed", f"trainer rank 1 (process {trainer.processes[1].pid}, which has ended)")
    assert served(engines) == [untrained, untrained]
    trainer.stop()
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, transport="nccl", bucket_bytes=8192))
    assert all(one["sent"] for one in pair.all("push"))
    assert served(engines) == [expected, expected]
    assert fine(pair.all("close"))


def test_a_rank_that_cannot_create_its_broadcast_group_is_named(ready, engines, untrained, expected):
    ready.all("close")
    ready.tell("unreachable", 1)
    assert fine(ready.hear(1), 1)
    for said in ready.build(engines, transport="nccl"):
        assert_failed(said, "TransferFailed", "trainer rank 1: the group was not made: no route to host")
    ready.tell("reachable", 1)
    assert fine(ready.hear(1), 1)
    assert fine(ready.build(engines, transport="nccl"))
    assert all(one["sent"] for one in ready.all("push"))
    assert served(engines) == [expected, expected]


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_lost_while_its_broadcast_group_is_created_is_named(start, engines, untrained, how):
    trainer = start(2)
    assert fine(trainer.all("shard fsdp"))
    trainer.tell(f"frozen {int(how)}", 1)
    assert fine(trainer.hear(1), 1)
    victim = trainer.processes[1].pid
    trainer.tell("build " + json.dumps({"urls": engines, "transport": "nccl", "timeout_s": 12.0}))
    (said,) = trainer.hear(0)
    # Rank 0's deadline passes at the same time as those of the engine's ranks, which say that they cannot join.
    kinds, seen = ["TransferFailed"], "has ended"
    if how == signal.SIGSTOP:
        kinds, seen = ["PushTimeout", "TransferFailed"], "is stopped"
    assert said["error"] in kinds
    assert_failed(said, said["error"], f"trainer rank 1 (process {victim}, which {seen})")
    assert served(engines) == [untrained, untrained]
    trainer.stop()


def test_a_killed_rank_ends_the_push_and_a_new_trainer_can_push(start, pair, engines, untrained, expected):
    for victim, at in ((1, "before"), (1, "while"), (0, "while")):
        trainer = start(2)
        assert fine(trainer.all("shard fsdp"))
        assert fine(trainer.build(engines))
        assert_pushed(trainer)
        trainer.all("change")
        if at == "before":
            trainer.processes[victim].kill()
            trainer.processes[victim].wait()
        else:
            trainer.tell(f"halt {int(signal.SIGKILL)}", victim)
        trainer.tell("push", 1 - victim)
        (said,) = trainer.hear(1 - victim)
        who = f"trainer rank {victim} (process {trainer.processes[victim].pid}, which has ended)"
        assert_failed(said, "TransferFailed", who, engines="unchanged" if victim else "unknown")
        assert served(engines) == [expected, expected]
        trainer.stop()
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines))
    pair.all("change")
    assert_pushed(pair)
    assert served(engines) != [expected, expected]
    assert fine(pair.all("close"))
