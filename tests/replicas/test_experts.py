"""vLLM's replicas of a mixture of experts, which take every step together: they stop and go on together, or not at all.

vLLM does not serve them on a CPU by itself; `cpu_experts` has what it lacks there.
"""

import functools
import itertools
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, PROMPT, apart
from tests.replicas.test_replicas import PATIENCE_S, Replicas, start
from tools import models
from weightsync import Sender
from weightsync.errors import ApplyFailed, ManifestMismatch, PushTimeout, WeightSyncError

pytestmark = pytest.mark.slow

#: By name. Without the prefix cache requests may also be kept, and vLLM has one API server for each replica.
SERVERS = {
    "one server": ("-dp", "2", "--api-server-count", "1", "--no-enable-prefix-caching"),
    "two servers, parallel experts": ("-dp", "2", "--no-enable-prefix-caching", "--enable-expert-parallel"),
}
ENV = {"OMP_NUM_THREADS": "1", "VLLM_PLUGINS": "weightsync,cpu_experts", "VLLM_SERVER_DEV_MODE": "1"}
WAIT = json.dumps({"weightsync": {"wait_for_initial_weights": True}})
#: Seconds in which an engine that generates would have answered.
QUIET_S = 3.0
PUSHES = 20

load = functools.cache(models.load_reference)


class Experts(Replicas):
    def push(self, folder, version, **options):
        with self.sender(**options) as sender:
            return sender.push(load(folder), version=version)

    def assert_serves(self, folder, version):
        reply = self.status()
        assert (reply.state, reply.version, [rank.rank for rank in reply.ranks]) == ("serving", version, [0, 1])
        model = load(folder)
        for replica in (0, 1):
            tokens, logprobs = self.ask(replica)
            own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING, replica

    def call(self, route):
        """Ask as a user for a pause or a resume."""
        return requests.post(f"{self.url}{route}", timeout=PATIENCE_S)


def experts(name, model_folder, folder, *more):
    return start("vllm", "qwen3_moe", model_folder, folder, ((*SERVERS[name], *more), ENV), Experts)


@pytest.fixture(scope="module", params=SERVERS)
def engine(request, model_folder, tmp_path_factory):
    found = experts(request.param, model_folder, tmp_path_factory.mktemp("experts"))
    with found.server:
        yield found


class Load:
    """Asks replicas again and again, from threads of its own; every answer must be complete."""

    def __init__(self, engine, lengths):
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(len(lengths))
        self._begun = threading.Barrier(len(lengths) + 1)
        self._asking = [self._threads.submit(self._ask, engine, replica, tokens) for replica, tokens in lengths.items()]

    def _ask(self, engine, replica, tokens):
        answers = 0
        self._begun.wait(PATIENCE_S)
        while not self._ended.is_set():
            assert len(engine.ask(replica, tokens)[0]) == tokens
            answers += 1
        return answers

    def __enter__(self):
        self._begun.wait(PATIENCE_S)
        return self

    def __exit__(self, *error):
        self._ended.set()
        for asking in self._asking:
            assert asking.result(PATIENCE_S) > 0
        self._threads.shutdown()


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport_brings_the_weights_to_both_replicas(engine, transport):
    engine.push(engine.a, "a")
    engine.push(engine.b, f"b by {transport}", transport=transport, verify="deep")
    engine.assert_serves(engine.b, f"b by {transport}")


@pytest.mark.parametrize("busy", [(), (0,), (1,), (0, 1)], ids=["idle", "first busy", "second busy", "both busy"])
@pytest.mark.parametrize("pause", ["keep", "retract", "wait", "abort"])
def test_a_pause_stops_both_replicas(engine, pause, busy):
    engine.push(engine.a, "a")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.ask, replica, 100) for replica in busy]
        engine.push(engine.b, pause, pause=pause)
        lengths = [len(request.result(PATIENCE_S)[0]) for request in asked]
    assert pause == "abort" or lengths == [100] * len(busy)
    engine.assert_serves(engine.b, pause)


@pytest.mark.parametrize("lengths", [{0: 3, 1: 17}, {1: 1}], ids=["both", "second"])
def test_many_pushes_while_waves_begin_and_end(engine, lengths):
    weights = load(engine.b), load(engine.a)
    with Load(engine, lengths):
        for number, pause in zip(range(PUSHES), itertools.cycle(("keep", "retract", "wait"))):
            with engine.sender(pause=pause) as sender:
                sender.push(weights[number % 2], version=f"push {number}")
    engine.assert_serves(engine.a, f"push {PUSHES - 1}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_replica_stops_both_until_a_push_heals_them(engine, rank):
    engine.push(engine.a, "a")
    engine.order("raise", rank)
    with engine.sender(staging="none") as sender, ThreadPoolExecutor(3) as threads:
        early = threads.submit(engine.ask, rank, 60)  # some of its tokens may be of the old weights
        with pytest.raises(ApplyFailed, match=f"rank {rank} failed") as raised:
            sender.push(load(engine.b), version="never")
        assert raised.value.engines == {engine.url: "dirty"}
        assert requests.get(f"{engine.url}/health", timeout=PATIENCE_S).status_code == 503
        waiting = [threads.submit(engine.ask, replica, 4) for replica in (0, 1)]
        with pytest.raises(ManifestMismatch):
            sender.push({"lm_head.weight": load(engine.b).lm_head.weight})
        assert sender.status()[engine.url].state == "dirty"
        refused = engine.call("/resume")
        assert refused.status_code in (500, 503)
        assert "push a full version" in refused.text
        assert not wait(waiting, timeout=QUIET_S).done
        sender.push(load(engine.b), version="healed")
        assert [len(request.result(PATIENCE_S)[0]) for request in waiting] == [4, 4]
        assert len(early.result(PATIENCE_S)[0]) == 60
    engine.assert_serves(engine.b, "healed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_replica_is_undone_in_both(engine, rank):
    with engine.sender(keep_previous=True) as sender:
        sender.push(load(engine.b), version="b")
        sender.push(load(engine.a), version="a")
        engine.order_in_pause("raise", rank)
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(load(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        engine.assert_serves(engine.a, "a")
        sender.push(load(engine.b), version="b again")
        assert sender.rollback().version == "a"
    engine.assert_serves(engine.a, "a")


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("busy", [(), (0, 1)], ids=["idle", "busy"])
def test_a_pause_that_fails_in_one_replica_releases_both(engine, replica, busy):
    engine.push(engine.a, "a")
    engine.order_at("replica stops", "raise", replica=replica)
    with engine.sender() as sender, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.ask, replica, 100) for replica in busy]
        with pytest.raises(ApplyFailed, match=r"vLLM did not pause, and nothing was changed.*injected") as raised:
            sender.push(load(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        assert [len(request.result(PATIENCE_S)[0]) for request in asked] == [100] * len(busy)
        engine.assert_serves(engine.a, "a")
        sender.push(load(engine.b), version="b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("replica", [0, 1])
def test_a_pause_that_waits_too_long_for_one_replica_releases_both(engine, replica):
    engine.push(engine.a, "a")
    with ThreadPoolExecutor(1) as threads, Sender([engine.url], timeout_s=10, pause="wait") as sender:
        asked = threads.submit(engine.ask, replica, 2000)
        with pytest.raises(PushTimeout, match="requests in flight did not finish") as raised:
            sender.push(load(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        engine.assert_serves(engine.a, "a")
        assert len(asked.result(PATIENCE_S)[0]) == 2000
    engine.push(engine.b, "b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_an_engine_that_a_user_paused_stays_paused(engine, mode):
    engine.push(engine.a, "a")
    for folder, version in ((engine.b, "b"), (engine.a, "a")):  # a resume comes right after a push
        assert engine.call(f"/pause?mode={mode}").ok
        engine.push(folder, version)
        assert engine.call("/resume").ok
        engine.assert_serves(folder, version)
    assert engine.call(f"/pause?mode={mode}").ok
    engine.push(engine.b, "b")
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(engine.ask, replica, 4) for replica in (0, 1)]
        assert not wait(waiting, timeout=QUIET_S).done
        assert engine.call("/resume").ok
        assert [len(request.result(PATIENCE_S)[0]) for request in waiting] == [4, 4]
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_what_a_user_requests_during_a_push_takes_effect_afterwards(engine, paused):
    engine.push(engine.a, "a")
    if paused:
        assert engine.call("/pause?mode=keep").ok
    with ThreadPoolExecutor(2) as threads:
        fired = engine.orders.with_suffix(".fired")
        fired.unlink(missing_ok=True)  # of an earlier test
        engine.order("hold", 1)
        pushing = threads.submit(engine.push, engine.b, "b")
        while not fired.exists():
            assert not pushing.done() or pushing.result()
        requested = threads.submit(engine.call, "/resume" if paused else "/pause?mode=keep")
        fired.unlink()
        pushing.result(PATIENCE_S)
        assert requested.result(PATIENCE_S).ok
        waiting = threads.submit(engine.ask, 1, 4)
        if not paused:
            assert not wait([waiting], timeout=QUIET_S).done
            assert engine.call("/resume").ok
        assert len(waiting.result(PATIENCE_S)[0]) == 4
    engine.assert_serves(engine.b, "b")


def pids(engine):
    with engine.sender() as sender:
        return [rank.pid for rank in sender._driver.engines.by_url[engine.url].hello.ranks]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_replica_ends_a_push_by_its_deadline_and_is_named(engine, rank):
    engine.push(engine.a, "a")
    pid = pids(engine)[rank]
    with engine.sender() as sender, ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.ask, replica, 30) for replica in (0, 1)]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(PushTimeout, match=rf"rank {rank} \(process {pid}\) is stopped"):
                Sender([engine.url], timeout_s=3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [len(request.result(PATIENCE_S)[0]) for request in asked] == [30, 30]
        sender.push(load(engine.b), version="b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("busy", [(), (0, 1)], ids=["idle", "busy"])
def test_a_replica_that_freezes_in_the_pause_ends_the_push_and_goes_on(engine, replica, busy):
    engine.push(engine.a, "a")
    engine.order_at("replica stops", "stop", replica=replica)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.ask, replica, 100) for replica in busy]
        with Sender([engine.url], timeout_s=5) as sender, pytest.raises(PushTimeout):
            sender.push(load(engine.b), version="never")
        for process in engine.server.processes():
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()
        assert [len(request.result(PATIENCE_S)[0]) for request in asked] == [100] * len(busy)
    engine.assert_serves(engine.a, "a")
    engine.push(engine.b, "b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("point", ["rank loads", "replica stops"])
def test_replicas_wait_for_their_first_push_and_end_alone_when_one_is_killed(point, model_folder, tmp_path):
    engine = experts("one server", model_folder, tmp_path, "--additional-config", WAIT)
    where = {"replica": 1} if point == "replica stops" else {"rank": 1, "tensor": 5}
    with engine.server:
        with engine.sender() as sender, ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(engine.ask, replica, 4) for replica in (0, 1)]
            assert not wait(waiting, timeout=QUIET_S).done
            sender.push(load(engine.b), version="b")
            assert [len(request.result(PATIENCE_S)[0]) for request in waiting] == [4, 4]
            engine.assert_serves(engine.b, "b")
            engine.order_at(point, "kill", **where)
            with pytest.raises(WeightSyncError) as raised:
                sender.push(load(engine.a), version="a")
            assert not isinstance(raised.value, PushTimeout)  # nobody waits for the dead
            assert raised.value.engines[engine.url] in ("unknown", "dirty")
        with pytest.raises(requests.RequestException):
            engine.ask(0, 4, timeout=5)
