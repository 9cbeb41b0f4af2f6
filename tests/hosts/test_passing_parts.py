"""A trainer on two hosts, and engines on three others: two get everything from it, and one passes that on."""

import contextlib
import os
import signal
import time

import pytest

from tests.hosts.programs import Engine, served
from tests.hosts.test_sharded import LIMIT_S
from tests.sharded.conftest import assert_pushed, fine
from weightsync.transports.nixl import agents

pytestmark = pytest.mark.skipif(not agents.available(), reason="needs nixl: pip install 'weightsync[nixl]'")


@pytest.fixture(scope="module")
def others(network, engines, model_folder):
    """Three engines on hosts where the trainer is not; the first passes on to the second."""
    with contextlib.ExitStack() as running:
        more = [Engine(network.hosts[name], model_folder("llama", 0)) for name in ("c", "d")]
        for engine in more:
            running.callback(engine.kill)
        for engine in more:
            engine.wait()
        yield engines["b"], *more


@pytest.fixture
def spread(ranks, others):
    """Return a function that builds the senders of the ranks."""

    def build(**options):
        assert fine(ranks.all("shard fsdp"))
        assert fine(ranks.build([engine.url for engine in others], transport="nixl", **{"timeout_s": 60.0, **options}))
        return ranks

    yield build
    assert fine(ranks.all("close"))


def sent(network):
    return [network.hosts[name].sent() for name in ("trainer", "a", "b", "c", "d")]


def assert_one_copy(network, ranks, others, wants):
    """Push several times, and assert that the trainer's hosts sent two copies between them, and one engine another.

    An engine that gets no turn for seconds is taken for stuck, and the trainer sends to the other: not always.
    """
    counted = []
    for want in wants:
        before = sent(network)
        nbytes = sum(assert_pushed(ranks))
        counted.append([now - then for now, then in zip(sent(network), before, strict=True)])
        assert [served(engine) for engine in others] == [want] * 3
        ranks.all("change")
    first, second, *engines = min(counted)
    assert 2 * nbytes < first + second < 2.5 * nbytes, (nbytes, counted)
    assert min(first, second) > 0.6 * nbytes, (nbytes, counted)
    assert sum(nbytes < bytes_ for bytes_ in engines) == 1, (nbytes, counted)


@pytest.mark.parametrize("options", [{}, {"verify": "off"}, {"bucket_bytes": 8192}])
def test_each_of_the_trainers_links_carries_one_copy(network, spread, others, digest, changed, options):
    assert_one_copy(network, spread(**options), others, [digest(1), changed] * 2)


def test_a_way_between_engines_that_is_cut_costs_nobody_the_push(network, spread, others, digest, changed):
    trainer = spread()
    assert all(assert_pushed(trainer))
    with network.apart("b", "c"):
        for want in (changed, digest(1)):
            trainer.all("change")
            assert all(assert_pushed(trainer))
            assert [served(engine) for engine in others] == [want] * 3
    trainer.all("change")
    assert_one_copy(network, trainer, others, [changed, digest(1)] * 2)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_engine_that_freezes_is_the_only_one_that_is_named(spread, others, digest, changed, number):
    trainer = spread(timeout_s=2 * LIMIT_S)
    assert all(assert_pushed(trainer))
    trainer.all("change")
    frozen, *rest = others[number], *others[:number], *others[number + 1 :]
    trainer.tell("stall 0", 0)  # it goes on, once the engine is frozen
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        trainer.tell("push", 1)
        for said in trainer.hear():
            assert said["error"] in ("PushTimeout", "TransferFailed", "EngineUnreachable"), said
            assert frozen.url in said["message"]
            assert not any(other.url in said["message"] for other in rest), said
        assert [served(other) for other in rest] == [digest(1)] * 2
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    end = time.monotonic() + 60
    while (said := trainer.all("push"))[0].get("error"):
        assert time.monotonic() < end, said
    assert [served(engine) for engine in others] == [changed] * 3
