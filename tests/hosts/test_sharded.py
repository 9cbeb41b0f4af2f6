"""A trainer whose two ranks are on two hosts, and engines on these and on a third."""

import contextlib
import os
import signal
import time

import psutil
import pytest

from tests.hosts.programs import served
from tests.sharded.conftest import Trainer, assert_pushed, fine
from tests.sharded.test_faults import assert_failed

#: Seconds; the limit of a push when the network is cut.
LIMIT_S = 10.0
#: Seconds; the limit of a push in which a process ends.
PATIENCE_S = 120.0


@pytest.fixture
def apart(network, model_folder):
    """As `ranks`, where rank 1 also has process numbers of its own, as on a host of its own."""
    hosts = [network.hosts[name] for name in ("trainer", "a")]

    def popen(rank, *command, **how):
        space = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc") if rank else ()
        return hosts[rank].popen(*space, *command, environment={"GLOO_SOCKET_IFNAME": "eth0"}, **how)

    trainer = Trainer(model_folder("llama", 1), 2, hosts[0].address, popen)
    yield trainer
    trainer.stop()


@pytest.fixture
def everywhere(near, far):
    """Every engine."""
    return [near, *far]


@pytest.fixture(params=["nccl", "nixl"])
def transport(request):
    return request.param


@pytest.mark.parametrize("how", ["fsdp", "columns", "stages"])
def test_every_engine_gets_what_two_hosts_hold(ranks, everywhere, digest, changed, how, transport):
    assert fine(ranks.all(f"shard {how}"))
    assert fine(ranks.build([engine.url for engine in everywhere], transport=transport))
    for want in (digest(1), changed, digest(1)):
        assert all(assert_pushed(ranks))
        assert [served(engine) for engine in everywhere] == [want] * 3
        ranks.all("change")
    said = ranks.all("push")
    assert [bool(one["sent"]) for one in said] == [True, True]
    assert fine(ranks.all("close"))


def test_engines_on_the_host_of_rank_0_alone(network, ranks, near, digest, transport):
    assert fine(ranks.all("shard fsdp"))
    for options in ({}, {"address": network.hosts["trainer"].address}):
        assert fine(ranks.build([near.url], transport=transport, **options))
        assert all(assert_pushed(ranks))
        assert served(near) == digest(1)
        assert fine(ranks.all("close"))


def test_a_link_that_is_cut_during_a_push_leaves_every_engine_unchanged(
    network, ranks, everywhere, digest, changed, transport
):
    assert fine(ranks.all("shard fsdp"))
    ranks.all("change")
    options = {"timeout_s": LIMIT_S, "bucket_bytes": 8192, "transport": transport}
    assert fine(ranks.build([engine.url for engine in everywhere], **options))
    assert all(assert_pushed(ranks))
    ranks.all("change")
    ranks.tell("push", 0)
    ranks.tell(f"stall {int(signal.SIGSTOP)}", 1)
    stopped = psutil.Process(ranks.processes[1].pid)
    while stopped.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    with contextlib.ExitStack() as cut:
        cut.enter_context(network.cut("a"))
        os.kill(stopped.pid, signal.SIGCONT)
        begin = time.monotonic()
        first, second = ranks.hear()
        assert time.monotonic() - begin < LIMIT_S + 5
    assert first["error"] in ("PushTimeout", "TransferFailed", "EngineUnreachable"), first
    assert set(first["engines"].values()) <= {"unchanged", "unknown"}
    assert_failed(second, second["error"], engines="unknown")
    assert [served(engine) for engine in everywhere] == [changed] * 3
    assert all(assert_pushed(ranks))
    assert [served(engine) for engine in everywhere] == [digest(1)] * 3
    assert fine(ranks.all("close"))


@pytest.mark.parametrize("victim", [1, 0])
def test_a_rank_that_is_killed_on_another_host_is_named_at_once(apart, everywhere, digest, victim):
    assert fine(apart.all("shard fsdp"))
    assert fine(apart.build([engine.url for engine in everywhere], timeout_s=PATIENCE_S))
    assert all(assert_pushed(apart))
    assert [served(engine) for engine in everywhere] == [digest(1)] * 3
    apart.all("change")
    apart.tell("push", 1 - victim)
    apart.processes[victim].kill()
    apart.processes[victim].wait()
    begin = time.monotonic()
    (said,) = apart.hear(1 - victim)
    assert time.monotonic() - begin < PATIENCE_S / 2
    who = f"trainer rank {victim} (which has ended or closed its Sender)"
    assert_failed(said, "TransferFailed", who, engines="unchanged" if victim else "unknown")
    assert [served(engine) for engine in everywhere] == [digest(1)] * 3
