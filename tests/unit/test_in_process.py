"""Engines in the trainer's process: the reference engine, by the same code as vLLM's and SGLang's."""

import asyncio
import gc
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tools import models
from weightsync import Sender
from weightsync.engine.in_process import EngineInProcess
from weightsync.errors import ApplyFailed, EngineUnreachable, LeaseHeld, PushTimeout, UnsupportedOption
from weightsync.protocol import http
from weightsync.protocol.in_process import NotRunning
from weightsync.testing import ReferenceEngine, ReferenceInProcess, attach

PROMPT = list(range(7))


@pytest.fixture
def engine(model_folder):
    found = ReferenceInProcess(model_folder("llama", 0))
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as found:
        yield found


@pytest.fixture
def b(model_folder):
    return models.load_reference(model_folder("llama", 1))


def answer_of(model_folder, seed):
    fresh = ReferenceInProcess(model_folder("llama", seed))
    try:
        return fresh.generate(PROMPT, 8)
    finally:
        fresh.close()


def test_a_push_reaches_an_engine_of_this_process_and_a_server(engine, server, b, model_folder):
    with Sender([engine, server.url], verify="deep") as sender:
        result = sender.push(b, version="b")
        replies = sender.status(digest=True)
    name = attach(engine).name
    assert re.fullmatch(r"weightsync\.ReferenceInProcess#\d+", name)
    assert list(result.engines) == list(replies) == [name, server.url]
    assert {found.transport for found in result.engines.values()} == {"ipc_zmq"}
    assert {reply.version for reply in replies.values()} == {"b"}
    assert len({reply.ranks[0].digest for reply in replies.values()}) == 1
    assert engine.generate(PROMPT, 8) == server.generate(PROMPT, 8) == answer_of(model_folder, 1)


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport_reaches_an_engine_of_this_process(engine, b, transport):
    with Sender([engine], transport=transport) as sender:
        sender.push(b, version=transport)
        (reply,) = sender.status().values()
    assert reply.version == transport


def test_rollback_add_and_remove(engine, b, model_folder, server):
    with Sender([server.url], keep_previous=True) as sender:
        sender.push(b, version="b")
        assert sender.add_engine(engine) is not None
        with pytest.raises(UnsupportedOption, match=r"weightsync\.ReferenceInProcess#\d+ is already among"):
            sender.add_engine(engine)
        sender.push(models.load_reference(model_folder("llama", 0)), version="a")
        assert set(sender.rollback().engines) == {server.url, attach(engine).name}
        assert engine.generate(PROMPT, 8) == answer_of(model_folder, 1)
        sender.remove_engine(engine)
        assert list(sender.status()) == [server.url]


def test_all_senders_use_one_front_end(engine, b):
    with Sender([engine]) as first:
        first.push(b, version="b")
        with Sender([engine]) as second, pytest.raises(LeaseHeld):
            second.push(b)
        assert attach(engine) is attach(engine)
    with pytest.raises(UnsupportedOption, match="give different ones"):
        Sender([engine, engine])


def test_two_threads_find_one_front_end(engine, monkeypatch):
    together, made = threading.Barrier(2), []
    real = EngineInProcess.__init__

    def slow(self, *args):
        made.append(self)
        threading.Event().wait(0.2)  # long enough for the other thread to come
        real(self, *args)

    monkeypatch.setattr(EngineInProcess, "__init__", slow)

    def find():
        together.wait(30)
        return attach(engine)

    with ThreadPoolExecutor(2) as threads:
        first, second = [future.result(30) for future in (threads.submit(find), threads.submit(find))]
    assert [first] == [second] == made


def test_an_engine_whose_loop_ends_during_a_request_is_named(engine, monkeypatch):
    client = attach(engine)

    async def version():
        client._loop.stop()
        await asyncio.Event().wait()

    with Sender([engine]) as sender:
        monkeypatch.setattr(engine.front, "version", version)
        with pytest.raises(EngineUnreachable, match=r"ReferenceInProcess#\d+ .*its event loop does not run"):
            sender.status()


def test_a_request_that_comes_as_the_loop_ends_is_left_nowhere(engine, monkeypatch):
    client, held, go = attach(engine), threading.Event(), threading.Event()
    left = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: left.append(str(found.exc_value)))

    def hold():
        held.set()
        go.wait(30)
        client._loop.stop()  # what is asked meanwhile comes after it

    with ThreadPoolExecutor(1) as thread:
        client._loop.call_soon_threadsafe(hold)
        assert held.wait(30)
        asked = thread.submit(client.ask, "status", http.to_json(http.StatusRequest()), 30)
        while not client._loop._ready:
            threading.Event().wait(0.01)
        go.set()
        with pytest.raises(NotRunning, match="its event loop does not run"):
            asked.result(30)
    del asked
    gc.collect()
    assert not left


def test_an_engine_that_was_closed_is_named(engine, b):
    with Sender([engine]) as sender:
        engine.close()
        with pytest.raises(EngineUnreachable, match=r"weightsync\.ReferenceInProcess#\d+.*it was closed"):
            sender.push(b)
    with pytest.raises(EngineUnreachable, match="it was closed"):
        Sender([engine])


def test_a_failed_push_leaves_the_engine_dirty_until_the_next_one(engine, b, monkeypatch):
    def fail(weights):
        next(iter(weights))
        raise RuntimeError("no more")

    with Sender([engine]) as sender:
        with monkeypatch.context() as patch:
            patch.setattr(engine.front._adapter, "load", fail)
            with pytest.raises(ApplyFailed) as raised:
                sender.push(b)
        assert raised.value.engines == {attach(engine).name: "dirty"}
        with pytest.raises(RuntimeError, match="a push failed half-way"):
            engine.generate(PROMPT, 2)
        sender.push(b)
        assert len(engine.generate(PROMPT, 2)[0]) == 2


def test_an_engine_that_waits_for_its_first_push_generates_nothing(model_folder, b):
    engine = ReferenceInProcess(model_folder("llama", 0), wait_for_initial_weights=True)
    with pytest.raises(RuntimeError, match="first push"):
        engine.generate(PROMPT, 2)
    with Sender([engine]) as sender:
        sender.push(b)
    assert engine.generate(PROMPT, 8) == answer_of(model_folder, 1)
    engine.close()


def test_an_engine_whose_loop_the_caller_blocks_is_refused(engine, b):
    client = attach(engine)

    async def push():
        return Sender([engine])

    with pytest.raises(UnsupportedOption, match=r"asyncio\.to_thread"):
        asyncio.run_coroutine_threadsafe(push(), client._loop).result()
    sender = Sender([engine])

    async def push_on():
        sender.push(b)

    with sender, pytest.raises(UnsupportedOption, match=r"asyncio\.to_thread"):
        asyncio.run_coroutine_threadsafe(push_on(), client._loop).result()


def test_a_frozen_engine_ends_a_push_by_its_deadline(engine, b):
    released = threading.Event()
    with Sender([engine], timeout_s=2) as sender:
        attach(engine)._loop.call_soon_threadsafe(released.wait)
        with pytest.raises(PushTimeout, match=r"ReferenceInProcess#\d+ did not answer") as raised:
            sender.push(b)
        released.set()
        assert raised.value.weights in ("unchanged", "unknown")


def test_a_closed_engine_leaves_no_thread_behind(model_folder, b):
    before = set(threading.enumerate())
    engine = ReferenceInProcess(model_folder("llama", 0))
    with Sender([engine]) as sender:
        sender.push(b)
    engine.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive(), thread


def test_what_is_no_engine_is_refused():
    for wrong in (torch.nn.Linear(1, 1), object()):
        with pytest.raises(UnsupportedOption, match="neither a URL nor an engine"):
            Sender([wrong])


def test_a_warm_push_starts_no_thread(engine, b):
    started = []
    with Sender([engine]) as sender:
        for _ in range(3):
            sender.push(b)
        threading.setprofile(lambda *_: started.append(threading.current_thread().name))
        try:
            sender.push(b)
        finally:
            threading.setprofile(None)
    assert started == []
