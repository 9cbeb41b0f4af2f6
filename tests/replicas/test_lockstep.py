"""vLLM with a load balancer of its users' (`--data-parallel-external-lb`, `--data-parallel-hybrid-lb`).

Each server has some of the replicas. Those of a dense model are engines of their own. Those of a mixture of experts
take every step together, so a push reaches all servers or none.
"""

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, PROMPT, apart
from tests.faults.harness import SITE
from tests.replicas.test_experts import ENV, PATIENCE_S, QUIET_S, load
from tests.replicas.test_replicas import CPU_EXPERTS, ask_vllm
from tools import models, servers
from weightsync import Sender
from weightsync.errors import ApplyFailed, PushTimeout, UnsupportedOption, WeightSyncError
from weightsync.trainer import push as push_module

pytestmark = pytest.mark.slow


class Together:
    """Two servers, each with one of the two replicas; ``a`` is the model that they were started on, ``b`` another."""

    def __init__(self, running, folder, a, b):
        self.servers, self._folder, self.a, self.b = running, folder, a, b
        self.urls = [server.url for server in running]

    def sender(self, **options):
        return Sender(self.urls, **{"timeout_s": PATIENCE_S, **options})

    def push(self, folder, version, **options):
        with self.sender(**options) as sender:
            return sender.push(load(folder), version=version)

    def order(self, server, action, point="rank loads", **where):
        """Order a fault in a server."""
        ordered = {"point": point, "where": where, "action": action}
        (self._folder / str(server) / "order").write_text(json.dumps(ordered))

    def ask(self, server, tokens=8, timeout=PATIENCE_S):
        return ask_vllm(self.servers[server], None, tokens, timeout)

    def assert_serves(self, folder, version):
        with self.sender() as sender:
            found = sender.status(digest=True)
        assert [(reply.state, reply.version) for reply in found.values()] == [("serving", version)] * 2
        assert [[rank.rank for rank in reply.ranks] for reply in found.values()] == [[0], [0]]
        for server in (0, 1):
            tokens, logprobs = self.ask(server)
            own = models.reference_logprobs(load(folder), PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING, server

    def stop(self):
        for server in self.servers:
            server.stop()


def start(kind, args_of, model_folder, folder):
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    path = f"{SITE}:{CPU_EXPERTS}:{servers.ROOT}"
    port = str(servers.free_port())

    def one(number):
        (folder / str(number)).mkdir()
        env = {**ENV, "PYTHONPATH": path, "FAULT_FILE": str(folder / str(number) / "order")}
        args = ("--data-parallel-rpc-port", port, "--no-enable-prefix-caching", *args_of(number))
        return servers.start("vllm", a, args=args, env=env)

    with ThreadPoolExecutor(2) as threads:  # a server of experts waits for the others
        return Together(list(threads.map(one, (0, 1))), folder, a, b)


def external(number):
    return ("-dp", "2", "--data-parallel-rank", str(number))


@pytest.fixture(scope="module")
def engines(model_folder, tmp_path_factory):
    found = start("qwen3_moe", external, model_folder, tmp_path_factory.mktemp("engines"))
    yield found
    found.stop()


@pytest.mark.parametrize("given", [0, 1])
def test_a_sender_without_all_servers_is_refused_by_name_and_changes_nothing(engines, given):
    engines.push(engines.a, "a")
    said = rf"{engines.urls[given]} serves some of the 2 replicas.*those of replica {1 - given}:"
    with pytest.raises(UnsupportedOption, match=said):
        Sender([engines.urls[given]], timeout_s=PATIENCE_S)
    with engines.sender() as sender:
        sender.remove_engine(engines.urls[1 - given])
        with pytest.raises(UnsupportedOption, match="give the Sender the URLs of all servers") as raised:
            sender.push(load(engines.b), version="never")
    assert raised.value.engines == {engines.urls[given]: "unchanged"}
    engines.assert_serves(engines.a, "a")


def test_servers_refuse_what_not_all_were_asked_to_commit(engines, monkeypatch):
    """A sender of an earlier release does not know which engines are in lockstep."""
    engines.push(engines.a, "a")
    with engines.sender(timeout_s=12) as sender, ThreadPoolExecutor(1) as threads:
        sender.remove_engine(engines.urls[1])
        monkeypatch.setattr(push_module, "check_lockstep", lambda engines: None)
        asked = threads.submit(engines.ask, 1, 200)
        with pytest.raises(UnsupportedOption, match="were not asked to commit this push") as raised:
            sender.push(load(engines.b), version="never")
        assert raised.value.engines == {engines.urls[0]: "unchanged"}
        assert len(asked.result(PATIENCE_S)[0]) == 200
    engines.assert_serves(engines.a, "a")


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport_brings_the_weights_to_all_servers(engines, transport):
    engines.push(engines.a, "a")
    engines.push(engines.b, f"b by {transport}", transport=transport, verify="deep")
    engines.assert_serves(engines.b, f"b by {transport}")


@pytest.mark.parametrize("busy", [(), (1,), (0, 1)], ids=["idle", "second busy", "both busy"])
@pytest.mark.parametrize("pause", ["keep", "retract", "wait", "abort"])
def test_requests_survive_a_push(engines, pause, busy):
    engines.push(engines.a, "a")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engines.ask, server, 100) for server in busy]
        engines.push(engines.b, pause, pause=pause)
        lengths = [len(request.result(PATIENCE_S)[0]) for request in asked]
    assert pause == "abort" or lengths == [100] * len(busy)
    engines.assert_serves(engines.b, pause)


@pytest.mark.parametrize("server", [0, 1])
def test_a_load_that_fails_in_one_server_stops_all_until_a_push_heals_them(engines, server):
    engines.push(engines.a, "a")
    engines.order(server, "raise", tensor=5)
    with engines.sender(staging="none") as sender, ThreadPoolExecutor(2) as threads:
        with pytest.raises(ApplyFailed, match="rank 0 failed") as raised:
            sender.push(load(engines.b), version="never")
        assert "a replica of another server" in str(raised.value)
        assert raised.value.engines == dict.fromkeys(engines.urls, "dirty")
        assert [requests.get(f"{url}/health", timeout=PATIENCE_S).status_code for url in engines.urls] == [503, 503]
        waiting = [threads.submit(engines.ask, number, 4) for number in (0, 1)]
        assert not wait(waiting, timeout=QUIET_S).done
        sender.push(load(engines.b), version="healed")
        assert [len(request.result(PATIENCE_S)[0]) for request in waiting] == [4, 4]
    engines.assert_serves(engines.b, "healed")


@pytest.mark.parametrize("server", [0, 1])
def test_a_load_that_fails_in_one_server_is_undone_in_all(engines, server):
    with engines.sender(keep_previous=True) as sender:
        sender.push(load(engines.b), version="b")
        sender.push(load(engines.a), version="a")
        engines.order(server, "raise", "rank exchanges", tensor=5)
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(load(engines.b), version="never")
        assert raised.value.engines == dict.fromkeys(engines.urls, "unchanged")
        engines.assert_serves(engines.a, "a")
        sender.push(load(engines.b), version="b again")
        assert sender.rollback().version == "a"
    engines.assert_serves(engines.a, "a")


@pytest.mark.parametrize("server", [0, 1])
def test_a_pause_that_fails_in_one_server_releases_all(engines, server):
    engines.push(engines.a, "a")
    engines.order(server, "raise", "replica stops")
    with engines.sender(timeout_s=12) as sender:
        with pytest.raises(WeightSyncError) as raised:
            sender.push(load(engines.b), version="never")
        assert raised.value.engines == dict.fromkeys(engines.urls, "unchanged")
        engines.assert_serves(engines.a, "a")
        sender.push(load(engines.b), version="b")
    engines.assert_serves(engines.b, "b")


@pytest.mark.parametrize("server", [0, 1])
def test_a_server_that_is_frozen_ends_a_push_by_its_deadline(engines, server):
    engines.push(engines.a, "a")
    with engines.sender(timeout_s=8) as sender:
        engines.servers[server].process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(PushTimeout):
                sender.push(load(engines.b), version="never")
        finally:
            engines.servers[server].process.send_signal(signal.SIGCONT)
    engines.push(engines.b, "b")
    engines.assert_serves(engines.b, "b")


def stopped(url):
    """Whether the server says that it generates nothing, or has ended."""
    try:
        return requests.get(f"{url}/health", timeout=PATIENCE_S).status_code == 503
    except requests.ConnectionError:
        return True


def until(true):
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_engines_in_lockstep_are_caught_up_together(engines):
    with engines.sender() as sender:
        sender.push(load(engines.b), version="b")
        body = {"new_version": "a user's"}
        requests.post(f"{engines.urls[1]}/update_weight_version", json=body, timeout=PATIENCE_S).raise_for_status()
        assert sorted(sender.catch_up()) == sorted(engines.urls)
    engines.assert_serves(engines.b, "b")


def test_a_server_that_is_killed_while_it_loads_leaves_no_mixture(model_folder, tmp_path):
    """vLLM ends all servers of a mixture of experts when one of their replicas has died."""
    engines = start("qwen3_moe", external, model_folder, tmp_path)
    try:
        with engines.sender(timeout_s=20) as sender:
            sender.push(load(engines.a), version="a")
            engines.order(1, "kill", tensor=5)
            with pytest.raises(WeightSyncError) as raised:
                sender.push(load(engines.b), version="b")
            assert not {"unchanged", "committed"} & set(raised.value.engines.values())
            until(lambda: stopped(engines.urls[0]))  # long before its server would give up a load
        with pytest.raises(requests.RequestException):
            engines.ask(0, 4, timeout=5)
    finally:
        engines.stop()


def test_servers_of_a_dense_model_are_engines_of_their_own(model_folder, tmp_path):
    """vLLM itself refuses dense models with one replica a server: their servers are started without these options."""

    def hybrid(number):
        sizes = "-dp", "4", "--data-parallel-size-local", "2"
        return *sizes, "--data-parallel-hybrid-lb", "--data-parallel-start-rank", str(2 * number)

    engines = start("qwen3", hybrid, model_folder, tmp_path)
    try:
        with engines.sender() as sender:
            sender.push(load(engines.b), version="both")
            found = sender.status(digest=True)
        assert [[rank.rank for rank in reply.ranks] for reply in found.values()] == [[0, 1], [0, 1]]
        with Sender([engines.urls[1]], timeout_s=PATIENCE_S) as sender:
            sender.push(load(engines.a), version="second alone")
        with engines.sender() as sender:
            assert [reply.version for reply in sender.status().values()] == ["both", "second alone"]
    finally:
        engines.stop()
