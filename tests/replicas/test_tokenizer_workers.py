"""SGLang with several tokenizer workers (``--tokenizer-worker-num``): every one of them answers for the engine."""

import contextlib
import itertools
import json
import os
import select
import signal
import time
from http.client import HTTPConnection
from http.server import HTTPServer

import psutil
import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, WAITING, apart
from tests.replicas.test_replicas import OPTIONS, PATIENCE_S, Replicas, start
from tools import models, servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.errors import ApplyFailed, ManifestMismatch, PushTimeout

pytestmark = pytest.mark.slow  # its server starts in 40 s; what it shares with vLLM is in tests/unit/test_servers.py

COUNT = 2
#: SGLang would kill and restart a worker that a test freezes for long.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "600"}
#: What a worker logs once it listens, and once it has been warmed up.
STARTED, READY = "Application startup complete", "The server is fired up"
WORKERS = (("--tokenizer-worker-num", str(COUNT)), ENVIRONMENT)


class Workers(Replicas):
    """A running engine; its workers listen at one socket, so the others are frozen while one is asked."""

    ranks = (0,)

    def pids(self):
        children = psutil.Process(self.server.process.pid).children()
        return [child.pid for child in children if any("tokenizer_worker" in word for word in child.cmdline())]

    @contextlib.contextmanager
    def only(self, worker):
        """While it runs, new connections reach this worker alone."""
        others = [pid for pid in self.pids() if pid != worker]
        try:
            for pid in others:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in others:
                os.kill(pid, signal.SIGCONT)

    def in_turn(self):
        """The engine's URL, again and again; each time another worker than before is the only one that answers."""
        for worker in itertools.cycle(self.pids()):
            with self.only(worker):
                yield self.url

    def get(self, path):
        return requests.get(self.url + path, timeout=PATIENCE_S)

    def begin(self, tokens):
        """Begin to read a stream: an iterator over its events, of which the first has arrived."""
        events = streamed(self.send(tokens, stream=True))
        return itertools.chain([next(events)], events)

    def begin_with_each(self, tokens):
        """A stream of each worker."""
        begun = []
        for worker in self.pids():
            with self.only(worker):
                begun.append(self.begin(tokens))
        return begun

    def ask(self, tokens=NEW_TOKENS):
        """Tokens, logprobs, and what is said about them."""
        return answered(self.send(tokens, return_logprob=True))

    def send(self, tokens, **more):
        """Send a request: the connection on which the answer will arrive."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": sampling, **more}
        connection = HTTPConnection(self.url.removeprefix("http://"), timeout=PATIENCE_S)
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def send_to(self, worker, tokens, **more):
        """As `send`; the worker handles no later request before this one."""
        with self.only(worker):
            connection = self.send(tokens, **more)
            self.get("/model_info")
        return connection

    def assert_serves(self, folder, version):
        """Assert that the engine serves a folder, and that every worker knows."""
        model = models.load_reference(folder)
        self.await_ready()
        workers = self.pids()
        assert len(workers) == COUNT
        for worker in workers:
            with self.only(worker):
                reply = self.status()
                assert (reply.state, reply.version) == ("serving", version)
                assert tuple(rank.rank for rank in reply.ranks) == self.ranks
                assert self.get("/model_info").json()["weight_version"] == version
                assert self.get("/health").status_code == 200
                tokens, logprobs, about = self.ask()
            assert about["weight_version"] == version
            own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING

    def assert_dirty(self):
        """Assert that every worker says that the engine must not serve, and refuses to resume it."""
        for worker in self.pids():
            with self.only(worker):
                assert self.status().state == "dirty"
                for path in ("/health", "/ready", "/ping"):
                    answer = self.get(path)
                    assert (answer.status_code, "half-way" in answer.text) == (503, True), path
                answer = requests.post(f"{self.url}/continue_generation", json={}, timeout=PATIENCE_S)
                assert (answer.status_code, "half-way" in answer.text) == (503, True)

    def fail(self, folder):
        """Push with a load that fails half-way."""
        self.order("raise", self.ranks[-1])
        with self.sender() as sender, pytest.raises(ApplyFailed) as raised:
            sender.push(models.load_reference(folder), version="never")
        assert raised.value.engines == {self.url: "dirty"}

    def kill(self, worker):
        """Kill a worker, and wait until the engine has started another one, which serves."""
        started = self.logged(STARTED)
        os.kill(worker, signal.SIGKILL)
        self.await_started(started + 1)
        assert worker not in self.pids()

    def logged(self, line):
        """How many workers have logged a line so far."""
        return self.server.log.read_text(errors="replace").count(line)

    def await_started(self, count):
        deadline = Deadline(PATIENCE_S)
        while self.logged(STARTED) < count:
            deadline.check("another worker")
            assert self.server.process.poll() is None
            time.sleep(servers.POLL_INTERVAL_S)

    def await_ready(self):
        """Wait until SGLang has warmed up every worker, with requests that may reach others."""
        deadline = Deadline(PATIENCE_S)
        while self.logged(READY) < self.logged(STARTED):
            deadline.check("the workers to be ready")
            time.sleep(servers.POLL_INTERVAL_S)


def answered(connection):
    """As `Workers.ask`, for a request that was sent."""
    with contextlib.closing(connection):
        answer = connection.getresponse()
        said = json.loads(answer.read())
    assert answer.status == 200, said
    pairs = said["meta_info"].get("output_token_logprobs", ())
    return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs], said["meta_info"]


def streamed(connection):
    with contextlib.closing(connection):
        for line in connection.getresponse():
            event = line.removeprefix(b"data:").strip()
            if event and event != b"[DONE]":
                yield json.loads(event)


def any_answered(connections):
    return bool(select.select([connection.sock for connection in connections], [], [], 0)[0])


@contextlib.contextmanager
def workers(model_folder, folder, *more, env=ENVIRONMENT, make=Workers):
    """An engine whose workers have all started; the first that has makes the server answer."""
    engine = start("sglang", "qwen3", model_folder, folder, ((*WORKERS[0], *more), env), make)
    with engine.server:
        engine.await_started(COUNT)
        yield engine


@pytest.fixture(scope="module")
def engine(model_folder, tmp_path_factory):
    with workers(model_folder, tmp_path_factory.mktemp("workers")) as found:
        yield found


def push_in_turn(engine, router, folder, version, **options):
    """Push with each request answered by another worker than the request before."""
    with contextlib.closing(engine.in_turn()) as urls:
        url = router(urls, HTTPServer)
        with Sender([url], timeout_s=PATIENCE_S, **options) as sender:
            sender.push(models.load_reference(folder), version=version)


def test_each_request_of_a_push_and_of_its_failure_may_reach_another_worker(engine, router):
    push_in_turn(engine, router, engine.b, "b")
    engine.assert_serves(engine.b, "b")
    engine.fail(engine.a)
    engine.assert_dirty()
    push_in_turn(engine, router, engine.a, "a")
    engine.assert_serves(engine.a, "a")


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport(engine, router, transport):
    engine.push(engine.a, "a")
    push_in_turn(engine, router, engine.b, transport, transport=transport, verify="deep", keep_previous=True)
    engine.assert_serves(engine.b, transport)


@pytest.mark.parametrize("pause", ["retract", "wait", "abort"])
def test_requests_of_both_workers_and_their_labels_survive_a_push(engine, pause):
    engine.push(engine.a, "a")
    begun = engine.begin_with_each(600)
    engine.push(engine.b, pause, pause=pause)
    for events in begun:
        *_, last = events
        about = last["meta_info"]
        labels = [span["version"] for span in about["weight_versions"]]
        assert (labels, about["weight_version"]) == ((["a", pause], pause) if pause == "retract" else (["a"], "a"))
        ended = "abort" if pause == "abort" else "length"
        assert (about["finish_reason"]["type"], about["completion_tokens"] == 600) == (ended, ended == "length")
    engine.assert_serves(engine.b, pause)


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_a_push_does_not_wait_for_requests_that_a_user_has_paused(engine, pause):
    engine.push(engine.a, "a")
    begun = engine.begin_with_each(600)
    requests.post(f"{engine.url}/pause_generation", json={"mode": "retract"}, timeout=PATIENCE_S).raise_for_status()
    engine.push(engine.b, pause, pause=pause)
    for worker in engine.pids():
        with engine.only(worker):
            assert engine.get("/ready").status_code == 503  # the user's pause is still there
    requests.post(f"{engine.url}/continue_generation", json={}, timeout=PATIENCE_S).raise_for_status()
    for events in begun:
        *_, last = events
        assert {span["version"] for span in last["meta_info"]["weight_versions"]} <= {"a", pause}
    engine.assert_serves(engine.b, pause)


def test_requests_that_do_not_finish_in_time_leave_the_engine_as_it_was(engine):
    engine.push(engine.a, "a")
    begun = engine.begin_with_each(3000)
    with Sender([engine.url], pause="wait", timeout_s=3) as sender, pytest.raises(PushTimeout, match="did not finish"):
        sender.push(models.load_reference(engine.b))
    assert len(engine.ask(4)[0]) == 4  # new requests pass again
    engine.push(engine.b, "b", pause="abort")
    for events in begun:
        *_, last = events
        assert last["meta_info"]["weight_version"] == "a"
    engine.assert_serves(engine.b, "b")


def test_a_failed_load_stops_all_workers_until_a_push_heals_them(engine):
    engine.push(engine.a, "a")
    engine.fail(engine.b)
    engine.assert_dirty()
    waiting = [engine.send_to(worker, 4) for worker in engine.pids()]
    aborted = engine.send_to(engine.pids()[0], 4, rid="aborted")
    with engine.sender() as sender, pytest.raises(ManifestMismatch):
        sender.push({"lm_head.weight": models.load_reference(engine.b).lm_head.weight})
    engine.assert_dirty()
    requests.post(f"{engine.url}/abort_request", json={"rid": "aborted"}, timeout=PATIENCE_S).raise_for_status()
    assert answered(aborted)[2]["finish_reason"]["type"] == "abort"
    assert not any_answered(waiting)
    engine.push(engine.b, "healed")
    for connection in waiting:
        about = answered(connection)[2]
        assert (about["completion_tokens"], about["weight_version"]) == (4, "healed")
    engine.assert_serves(engine.b, "healed")


def test_a_failed_load_is_undone(engine):
    with engine.sender(keep_previous=True) as sender:
        sender.push(models.load_reference(engine.b), version="b")
        sender.push(models.load_reference(engine.a), version="a")
        engine.order("raise", engine.ranks[-1])
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(models.load_reference(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        engine.assert_serves(engine.a, "a")
        sender.push(models.load_reference(engine.b), version="b again")
        assert sender.rollback().version == "a"
    engine.assert_serves(engine.a, "a")


def test_a_label_that_a_user_sets_is_that_of_all_workers(engine):
    engine.push(engine.a, "a")
    body = {"new_version": "a user's", "abort_all_requests": False}
    requests.post(f"{engine.url}/update_weight_version", json=body, timeout=PATIENCE_S).raise_for_status()
    engine.assert_serves(engine.a, "a user's")


def test_a_killed_worker_comes_back_with_the_engines_label_and_state(engine):
    engine.push(engine.a, "a")
    engine.kill(engine.pids()[0])
    engine.assert_serves(engine.a, "a")
    engine.fail(engine.b)
    engine.kill(engine.pids()[0])
    engine.assert_dirty()
    engine.push(engine.b, "b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("pause", ["retract", "wait"])
def test_a_frozen_worker_holds_nothing_and_is_not_behind_afterwards(engine, pause):
    engine.push(engine.a, "a")
    frozen, other = engine.pids()
    with engine.only(frozen):
        begun = engine.begin(600)
    with engine.only(other):
        engine.push(engine.b, "b", pause=pause)
    with engine.only(frozen):
        assert engine.get("/model_info").json()["weight_version"] == "b"
        *_, last = begun
    labels = [span["version"] for span in last["meta_info"]["weight_versions"]]
    assert labels == (["a", "b"] if pause == "retract" else ["a"])
    engine.assert_serves(engine.b, "b")


def test_a_frozen_main_process_is_named_and_goes_on(engine):
    main = engine.server.process.pid
    engine.push(engine.a, "a")
    with Sender([engine.url], timeout_s=3) as sender:
        os.kill(main, signal.SIGSTOP)
        try:
            with pytest.raises(PushTimeout, match=rf"\(process {main}\) is stopped"):
                sender.push(models.load_reference(engine.b))
            answer = engine.get("/health")
            assert (answer.status_code, "is stopped" in answer.text) == (503, True)
        finally:
            os.kill(main, signal.SIGCONT)
    engine.push(engine.b, "thawed")
    engine.assert_serves(engine.b, "thawed")


def test_an_engine_that_waits_for_its_first_push(model_folder, tmp_path, router):
    with workers(model_folder, tmp_path, *WAITING["sglang"]) as engine:
        for worker in engine.pids():
            with engine.only(worker):
                for path in ("/health", "/ready"):
                    answer = engine.get(path)
                    assert (answer.status_code, "first push" in answer.text) == (503, True), path
                answer = requests.post(f"{engine.url}/continue_generation", json={}, timeout=PATIENCE_S)
                assert (answer.status_code, "first push" in answer.text) == (503, True)
        killed, other = engine.pids()
        waiting = engine.send_to(other, 4)
        engine.kill(killed)
        assert not any_answered([waiting])
        push_in_turn(engine, router, engine.b, "first")
        assert answered(waiting)[2]["weight_version"] == "first"
        engine.assert_serves(engine.b, "first")


class GroupsOfWorkers(Workers):
    ranks = (0, 1)

    def sender(self, **options):
        return super().sender(**{"pause": "wait", **options})


@pytest.mark.parametrize("option", ["--dp-size", "--pp-size"])
def test_two_workers_of_two_groups_of_ranks(model_folder, tmp_path, router, option):
    env = {**ENVIRONMENT, **OPTIONS["sglang"][1]}
    with workers(model_folder, tmp_path, option, "2", env=env, make=GroupsOfWorkers) as engine:
        push_in_turn(engine, router, engine.b, "b", transport="nccl", pause="wait")
        engine.assert_serves(engine.b, "b")
        begun = engine.begin_with_each(200)
        engine.push(engine.a, "a")
        for events in begun:
            *_, last = events
            assert [span["version"] for span in last["meta_info"]["weight_versions"]] == ["b"]
        engine.fail(engine.b)
        engine.assert_dirty()
        waiting = [engine.send_to(worker, 4) for worker in engine.pids()]
        push_in_turn(engine, router, engine.b, "healed", pause="wait")
        assert [answered(connection)[2]["weight_version"] for connection in waiting] == ["healed"] * COUNT
        engine.assert_serves(engine.b, "healed")
