"""Engines that join, leave and restart, and what that costs the others."""

import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.contract.harness import CPU, A, B, Harness, assert_equal, random_tensors
from weightsync.errors import TransferFailed, UnsupportedOption
from weightsync.transports import registry
from weightsync.transports.base import Peer
from weightsync.transports.nccl.messages import InitNcclGroup


class Counting(Harness):
    """Records which engines got a handshake before each push."""

    def join(self, asked):
        self.told = sorted(asked)
        return super().join(asked)

    def pushed(self, seed=0):
        self.told = []
        tensors = random_tensors(seed)
        assert_equal(self.push(tensors, 4096), tensors)
        return self.told


@pytest.fixture
def make():
    made = []

    def make(transport):
        made.append(Counting(transport))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.mark.parametrize(("transport", "told"), [("ipc_zmq", []), ("nccl", [A, B]), ("nixl", [B]), ("files", [B])])
def test_only_affected_engines_are_told_of_a_restart(make, transport, told):
    harness = make(transport)
    assert harness.pushed() == ([] if transport == "ipc_zmq" else [A, B])
    assert harness.pushed(1) == []
    harness.peers[Peer(B, 0)].close()
    harness.peers[Peer(B, 0)] = registry.spec(transport).engine_end(CPU)
    harness.instances[B] = "b again"
    harness.transfer.disconnect(B, transport)
    assert harness.pushed(2) == told
    assert harness.pushed(3) == []


@pytest.mark.parametrize("transport", [*registry.available(), "files"])
def test_engines_leave_and_come_back_between_pushes(make, transport):
    harness = make(transport)
    harness.pushed()
    left = harness.peers.pop(Peer(B, 0))
    harness.pushed(1)
    harness.peers[Peer(B, 0)] = left
    harness.pushed(2)


def test_seven_engines_join_one_group_at_once(make):
    harness = make("nccl")
    for number in range(3, 8):
        url = f"http://127.0.0.1:{9000 + number}"
        harness.peers[Peer(url, 0)], harness.instances[url] = registry.spec("nccl").engine_end(CPU), str(number)
    harness.threads._max_workers = len(harness.peers)
    assert len(harness.pushed()) == 7


def test_the_default_process_group_is_not_needed_and_not_changed(make):
    assert not dist.is_initialized()
    make("nccl").pushed()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default = dist.group.WORLD
        make("nccl").pushed()
        assert dist.group.WORLD is default
        alone = torch.ones(3)
        dist.all_reduce(alone)
        assert alone.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


def asked(backend="gloo", **more):
    fields = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2, "timeout_s": 60.0}
    return InitNcclGroup(group_name="g", backend=backend, **{**fields, **more})


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"master_address": "0.0.0.0"}, UnsupportedOption, "cannot be dialled: give the trainer's own address"),
        ({"master_address": "::"}, UnsupportedOption, "cannot be dialled"),
        ({}, TransferFailed, r"rank 0 cannot reach the trainer's store at 127.0.0.1 port 9 from lo \(127.0.0.1\)"),
        (
            {"master_address": "no.such.host.invalid"},
            TransferFailed,
            "there is no route from this host to no.such.host",
        ),
        ({"backend": "nccl"}, UnsupportedOption, "rank 0 is on cpu, where there is no NCCL: use gloo"),
    ],
)
def test_a_group_that_cannot_work_is_refused_at_once(more, error, said):
    end, begin = registry.spec("nccl").engine_end(CPU), time.monotonic()
    with pytest.raises(error, match=said):
        end.join(asked(**more), 0)
    assert time.monotonic() - begin < 5
    end.close()


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_every_rank_reports_its_network_interface(make, transport):
    harness, ways = make(transport), []
    harness.join, join = (lambda asked: ways.append(join(asked)) or ways[-1]), harness.join
    tensors = random_tensors()
    assert_equal(harness.push(tensors, 4096), tensors)
    found = {rank.interface for reply in ways[0].values() for rank in reply.ranks}
    assert found == {"lo (127.0.0.1)"} or transport == "nixl"
    assert all(found)


ENDS_EARLY = """
import torch
from weightsync.protocol import http
from weightsync.transports.nixl.agents import Agent
from weightsync.transports import registry
from weightsync.transports.nixl.messages import RegisterNixl
end, silent = registry.spec("nixl").engine_end(torch.device("cpu")), Agent(torch.device("cpu"), 0)
for _ in range(2):
    end.join(RegisterNixl(agent=silent.name, metadata=silent.metadata(), timeout_s=30.0), 0)
"""


def test_a_rank_exits_cleanly_while_it_waits_for_a_silent_trainer():
    for _ in range(3):
        subprocess.run([sys.executable, "-c", ENDS_EARLY], check=True, timeout=60)


def test_nixl_agents_are_released_when_a_push_fails(make):
    harness, tensors = make("nixl"), random_tensors()
    harness.push(tensors, 4096)
    # A NIXL agent that lives on could write into memory that has been reused since.
    agents = [weakref.ref(end._agent.nixl.agent) for end in harness.peers.values()]

    def broken():
        yield from tensors[:20]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        harness.push(broken(), 512, manifest=tensors)
    assert all(harness.outcomes.values())  # their tracebacks hold the frames of the interrupted transfers
    assert [agent() for agent in agents] == [None] * len(agents)
    assert_equal(harness.push(tensors, 4096), tensors)


def test_a_nixl_agent_ends_before_its_arena_is_freed(make):
    """A rank of a failed push may have asked for a READ; an agent that serves it later would read freed memory."""
    harness, tensors = make("nixl"), random_tensors()
    harness.push(tensors, 512)
    (end,) = harness.transfer._ends.values()
    agent = weakref.ref(end.host.agent.nixl.agent)
    harness.push(tensors, 512)
    assert agent() is not None
    assert_equal(harness.push(tensors, 4096), tensors)  # in a new arena
    assert agent() is None
