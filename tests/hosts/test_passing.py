"""Engines on several hosts pass a push on to each other, and the trainer's link carries one copy."""

import os
import signal
import time

import pytest

from tests.hosts.programs import served
from tests.hosts.test_hosts import BUCKET_BYTES, LIMIT_S
from weightsync.transports.nixl import agents

pytestmark = pytest.mark.skipif(not agents.available(), reason="needs nixl: pip install 'weightsync[nixl]'")
HOW = {"transport": "nixl", "timeout_s": 60.0}


@pytest.fixture
def nbytes(model_folder):
    return (model_folder("llama", 1) / "model.safetensors").stat().st_size


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": BUCKET_BYTES}, {"verify": "off"}])
def test_the_trainers_link_carries_one_copy(trainer, network, far, model_folder, digest, nbytes, options):
    hosts, least = [network.hosts[name] for name in ("trainer", "a", "b")], []
    for seed in (1, 2, 1, 2):
        before = [host.sent() for host in hosts]
        said = trainer.push(far, model_folder("llama", seed), **HOW, **options)
        assert not said["error"], said
        least.append([host.sent() - earlier for host, earlier in zip(hosts, before, strict=True)])
        assert [served(engine) for engine in far] == [digest(seed)] * 2
    # An engine that gets no turn for seconds is taken for stuck, and the trainer sends to the other: not always.
    sent = min(least)
    assert nbytes < sent[0] < 1.8 * nbytes, (nbytes, least)
    assert sum(nbytes < bytes_ for bytes_ in sent) == 2, (nbytes, least)


def test_a_way_between_engines_that_is_cut_costs_nobody_the_push(trainer, network, far, model_folder, digest, nbytes):
    assert not trainer.push(far, model_folder("llama", 1), **HOW)["error"]
    trainer.begin(far, model_folder("llama", 2), halts=True, **HOW)
    assert "halted" in trainer.outcome()
    with network.apart("a", "b"):
        trainer.go_on()
        said = trainer.outcome()
        assert not said["error"], said
        assert [served(engine) for engine in far] == [digest(2)] * 2
        # The way is not even there when the next push begins.
        assert not trainer.push(far, model_folder("llama", 1), **HOW)["error"]
        assert [served(engine) for engine in far] == [digest(1)] * 2
    least = []
    for seed in (2, 1, 2):
        before = network.hosts["trainer"].sent()
        assert not trainer.push(far, model_folder("llama", seed), **HOW)["error"]
        assert [served(engine) for engine in far] == [digest(seed)] * 2
        least.append(network.hosts["trainer"].sent() - before)
    assert min(least) < 1.8 * nbytes, (nbytes, least)


def test_a_way_between_engines_that_comes_back_is_tried_again(trainer, network, far, model_folder, digest):
    # With two buckets in its arena the trainer cannot send the first ones again: only the other engine has them.
    how = {**HOW, "timeout_s": 2 * LIMIT_S, "bucket_bytes": BUCKET_BYTES}
    assert not trainer.push(far, model_folder("llama", 1), **how)["error"]
    far[0].kill()  # one that has just started has no connection yet
    far[0].start()
    far[0].wait()
    with network.apart("a", "b"):
        trainer.begin(far, model_folder("llama", 2), halts=True, **how)
        said = trainer.outcome()
        assert "halted" in said, said
    trainer.go_on()
    said = trainer.outcome()
    assert not said["error"], said
    assert [served(engine) for engine in far] == [digest(2)] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_an_engine_that_freezes_is_the_only_one_that_is_named(trainer, far, model_folder, digest, number):
    how = {**HOW, "timeout_s": 2 * LIMIT_S}
    assert not trainer.push(far, model_folder("llama", 1), **how)["error"]
    trainer.begin(far, model_folder("llama", 2), halts=True, **how)
    assert "halted" in trainer.outcome()
    frozen, other = far[number], far[1 - number]
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        trainer.go_on()
        said = trainer.outcome()
        assert said["error"] in ("PushTimeout", "TransferFailed", "EngineUnreachable"), said
        assert frozen.url in said["message"]
        assert other.url not in said["message"]
        assert said["engines"][other.url] == "unchanged"
        assert served(other) == digest(1)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    end = time.monotonic() + 60
    while (said := trainer.push(far, model_folder("llama", 2), **how))["error"]:
        assert time.monotonic() < end, said
    assert [served(engine) for engine in far] == [digest(2)] * 2
