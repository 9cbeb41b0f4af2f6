"""Memory that an engine may still load from is not overwritten by a sender, nor unnoticed by a learner."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
import torch.multiprocessing

from tests.faulty import SETTLE_S, assert_no_mixture, digest, faulty
from tools import models
from weightsync import Sender
from weightsync.cli import main as cli
from weightsync.errors import ApplyFailed, LeaseHeld, ManifestMismatch, UnsupportedOption, WeightSyncError
from weightsync.testing import ReferenceEngine

#: Seconds; enough for a push, and a frozen engine is given up by then.
PUSH_S = 8.0


@pytest.fixture(scope="module")
def engines(model_folder, tmp_path_factory):
    with contextlib.ExitStack() as stack:
        folder = model_folder("llama", 0)
        yield [stack.enter_context(faulty(folder, tmp_path_factory.mktemp("orders"))) for _ in range(2)]


@pytest.fixture(scope="module")
def versions(model_folder):
    """Models of different weights."""
    return [models.load_reference(model_folder("llama", seed)) for seed in range(1, 5)]


@pytest.mark.parametrize("verify", ["digest", "off"])
def test_an_engine_that_still_loads_when_another_fails_keeps_its_memory(engines, versions, verify):
    fails, frozen = engines
    with Sender([fails.url, frozen.url], verify=verify, timeout_s=PUSH_S) as sender:
        for number in range(2):  # the second through the load plan
            sender.push(versions[number], version=f"before {number}")
        fails.order("raise", 3)
        frozen.order("stop")
        with pytest.raises(ApplyFailed) as raised:
            sender.push(versions[2], version="torn")
        assert raised.value.engines == {fails.url: "dirty", frozen.url: "unknown"}
        sender.remove_engine(frozen.url)
        sender.push(versions[3], version="next")
        frozen.thaw()
        reply = frozen.settled()
        assert_no_mixture(reply, "torn", versions[2])
    frozen.heal(versions[0])


def interrupted_when(fault, sender, model, version):
    """Interrupt a push at the moment when the engine's fault happens."""

    def interrupt():
        give_up = time.monotonic() + SETTLE_S
        while not fault.suffered() and time.monotonic() < give_up:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            sender.push(model, version=version)
    finally:
        thread.join()


def test_an_engine_that_still_loads_at_ctrl_c_keeps_its_memory(engines, versions):
    other, frozen = engines
    with Sender([other.url, frozen.url], timeout_s=60.0) as sender:
        for number in range(2):
            sender.push(versions[number], version=f"before {number}")
        frozen.order("stop")
        interrupted_when(frozen, sender, versions[2], "interrupted")
        sender.remove_engine(frozen.url)
        sender.push(versions[3], version="next")
        frozen.thaw()
        assert_no_mixture(frozen.settled(), "interrupted", versions[2])
        assert_no_mixture(other.settled(), "next", versions[3])
    frozen.heal(versions[0])


def test_parameters_read_in_place_are_not_served_after_ctrl_c(engines, versions, model_folder):
    _, frozen = engines
    shared = models.load_reference(model_folder("llama", 1)).share_memory()
    with Sender([frozen.url], timeout_s=60.0) as sender:
        for _ in range(2):
            assert "where they are" in sender.push(shared).staging_reason
        frozen.order("stop")
        interrupted_when(frozen, sender, shared, "interrupted")
        with torch.no_grad():
            for parameter in shared.parameters():
                parameter.neg_()
        frozen.thaw()
        reply = frozen.settled()
        assert (reply.state, reply.version != "interrupted") == ("dirty", True)
        assert "cancelled the push" in reply.detail
        sender.push(shared, version="mended")
        assert frozen.settled().ranks[0].digest == digest(shared)


def test_a_sender_interrupted_during_cleanup_can_push_again(engines, versions, monkeypatch):
    engine, _ = engines
    with Sender([engine.url], timeout_s=60.0) as sender:
        sender.push(versions[0])

        def interrupted(push, deadline):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(sender._driver.engines, "abort", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sender.push({"x": torch.zeros(1)})
        sender.push(versions[1], version="after")
        reply = engine.settled()
    assert (reply.version, reply.ranks[0].digest) == ("after", digest(versions[1]))


def push_shared(parameters, url):
    """In another process: push a learner's shared parameters."""
    with Sender([url], timeout_s=60.0) as sender:
        sender.push(parameters, version="killed")


@pytest.mark.parametrize("verify", ["digest"])
def test_parameters_are_not_served_if_their_pusher_was_killed_during_the_load(engines, model_folder, verify):
    _, frozen = engines
    model = models.load_reference(model_folder("llama", 2)).share_memory()
    shared = dict(model.state_dict())
    frozen.order("stop")
    pusher = torch.multiprocessing.get_context("spawn").Process(target=push_shared, args=(shared, frozen.url))
    pusher.start()
    give_up = time.monotonic() + SETTLE_S
    while not frozen.suffered():
        assert pusher.is_alive()
        assert time.monotonic() < give_up
        time.sleep(0.02)
    pusher.kill()
    pusher.join()
    with torch.no_grad():
        for tensor in shared.values():
            tensor.neg_()  # the learner goes on
    frozen.thaw()
    reply = frozen.settled()
    assert (reply.state, reply.version != "killed") == ("dirty", True)
    assert "the trainer's process has ended" in reply.detail
    frozen.heal(model)


def test_memory_of_a_sender_that_lost_the_lease_is_not_restored(engines, versions):
    other, engine = engines
    with (
        Sender([other.url, engine.url], keep_previous=True) as first,
        Sender([engine.url], keep_previous=True) as second,
    ):
        for number in range(2):
            first.push(versions[number], version=f"first {number}")
        cli(["abort", engine.url])
        with pytest.raises(ManifestMismatch):
            second.push({"x": torch.zeros(1)})
        with pytest.raises(LeaseHeld):
            first.push(versions[2])
        first.remove_engine(engine.url)
        for number in (2, 3):
            first.push(versions[number])  # overwrites the memory that the engine loaded from
        engine.order("raise", 3)
        with pytest.raises(ApplyFailed) as raised:
            second.push(versions[2], version="second")
        assert raised.value.engines == {engine.url: "dirty"}
        reply = engine.settled()
        assert reply.state == "dirty" or reply.ranks[0].digest == digest(versions[1])
        second.push(versions[2], version="second")


def test_a_failed_rollback_leaves_label_and_weights_consistent(engines, versions):
    first, late = engines
    with Sender([first.url], keep_previous=True) as sender:
        for number in range(2):
            sender.push(versions[number], version=f"v{number}")
        cli(["abort", first.url])
        with pytest.raises(LeaseHeld):
            sender.rollback()
        sender.add_engine(late.url)
        for url, reply in sender.status(digest=True).items():
            assert (reply.version, reply.ranks[0].digest) == ("v1", digest(versions[1])), url


@pytest.fixture
def late(model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


def restarted(engine, folder):
    """Kill an engine; returns a new one at the same address."""
    engine.process.kill()
    engine.process.wait()
    return ReferenceEngine(folder, port=int(engine.url.rpartition(":")[2]))


def test_an_engine_that_could_not_be_caught_up_is_caught_up_by_the_next_call(engines, late, versions, model_folder):
    first, _ = engines
    with Sender([first.url, late.url]) as sender:
        sender.push(versions[0], version="v0")
        with restarted(late, model_folder("llama", 0)):
            with Sender([late.url]) as other:
                other.push(versions[1], version="other")
                with pytest.raises(LeaseHeld):
                    sender.catch_up()
            assert list(sender.catch_up()) == [late.url]
            assert sender.catch_up() == {}
            reply = sender.status(digest=True)[late.url]
            assert (reply.version, reply.ranks[0].digest) == ("v0", digest(versions[0]))


def test_a_dead_engine_does_not_keep_others_from_being_caught_up(engines, late, versions, model_folder):
    first, _ = engines
    with ReferenceEngine(model_folder("llama", 0)) as gone, Sender([first.url, gone.url, late.url]) as sender:
        sender.push(versions[0], version="v0")
        with restarted(late, model_folder("llama", 0)):
            gone.process.kill()
            gone.process.wait()
            with pytest.raises(WeightSyncError, match=f"no engine answers at {gone.url}") as raised:
                sender.catch_up()
            assert raised.value.engines == {first.url: "unchanged", gone.url: "unknown", late.url: "committed"}
            sender.remove_engine(gone.url)
            reply = sender.status(digest=True)[late.url]
            assert (reply.version, reply.ranks[0].digest) == ("v0", digest(versions[0]))


def test_a_call_that_fails_before_its_push_reports_a_dirty_engine(engines, versions):
    engine, _ = engines
    with Sender([engine.url]) as first:
        engine.order("raise", 3)
        with pytest.raises(ApplyFailed):
            first.push(versions[0], version="broken")
    with Sender([engine.url]) as second:
        for fails in (second.rollback, lambda: second.push({}), lambda: second.push(versions[0], version="")):
            with pytest.raises(WeightSyncError) as raised:
                fails()
            assert raised.value.engines == {engine.url: "dirty"}
    engine.heal(versions[0])


def test_a_call_that_fails_before_its_push_reports_the_engines_current_state(engines, versions):
    engine, _ = engines
    with Sender([engine.url]) as early:
        with Sender([engine.url]) as other:
            engine.order("raise", 3)
            with pytest.raises(ApplyFailed):
                other.push(versions[0], version="broken")
        for fails in (lambda: early.add_engine(engine.url), lambda: early.push({}), early.rollback):
            with pytest.raises(WeightSyncError) as raised:
                fails()
            assert raised.value.engines == {engine.url: "dirty"}
        alias = engine.url.replace("127.0.0.1", "localhost")
        with pytest.raises(UnsupportedOption) as raised:
            Sender([engine.url, alias])
        assert raised.value.engines == {engine.url: "dirty", alias: "dirty"}
        engine.heal(versions[0])
        with pytest.raises(UnsupportedOption) as raised:
            early.add_engine(engine.url)
        assert raised.value.engines == {engine.url: "unchanged"}
