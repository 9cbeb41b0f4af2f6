"""Engines with two replicas (data parallelism), which are one engine: they commit together, or not at all."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.faults.harness import SITE
from tools import models, servers
from weightsync import Sender
from weightsync.errors import ApplyFailed, ManifestMismatch, PushTimeout, WeightSyncError
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.slow  # its servers take minutes to start on two cores

PATIENCE_S = 120
#: A plugin of vLLM, in the servers that name it.
CPU_EXPERTS = Path(__file__).parent / "cpu_experts"


class Replicas:
    """A running engine; ``a`` is the model that it was started on, ``b`` another."""

    def __init__(self, server, orders, a, b):
        self.server, self.orders, self.a, self.b = server, orders, a, b
        self.url = server.url

    def sender(self, **options):
        return Sender([self.url], timeout_s=PATIENCE_S, **options)

    def push(self, folder, version, **options):
        with self.sender(**options) as sender:
            return sender.push(models.load_reference(folder), version=version)

    def status(self):
        with self.sender() as sender:
            return sender.status(digest=True)[self.url]

    def order(self, action, rank, tensor=5):
        """Order a fault in the next load of a rank."""
        self.order_at("rank loads", action, tensor=tensor, rank=rank)

    def order_in_pause(self, action, rank):
        """Order a fault while a rank changes the weights that it serves."""
        self.order_at("rank exchanges", action, tensor=5, rank=rank)

    def order_at(self, point, action, **where):
        """Order a fault at a point of `tests/faults/site`."""
        self.orders.write_text(json.dumps({"point": point, "where": where, "action": action}))

    def ask(self, replica, tokens=NEW_TOKENS, timeout=PATIENCE_S):
        """Tokens and logprobs of one replica."""
        return ASK[self.server.engine](self.server, replica, tokens, timeout)

    def assert_serves(self, folder, version):
        """Assert that both replicas hold and serve the weights of a folder."""
        reply = self.status()
        assert (reply.state, reply.version, [rank.rank for rank in reply.ranks]) == ("serving", version, [0, 1])
        assert len({rank.digest for rank in reply.ranks}) == 1
        model = models.load_reference(folder)
        for replica in (0, 1):
            tokens, logprobs = self.ask(replica)
            own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING, replica


def ask_vllm(server, replica, tokens, timeout):
    body = {"model": str(server.model), "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "logprobs": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    at = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    answer = requests.post(f"{server.url}/v1/completions", json=body, headers=at, timeout=timeout)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def ask_sglang(server, replica, tokens, timeout):
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "routed_dp_rank": replica}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=timeout)
    answer.raise_for_status()
    pairs = answer.json()["meta_info"]["output_token_logprobs"]
    return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]


ASK = {"vllm": ask_vllm, "sglang": ask_sglang}
#: Options and variables; on a CPU every rank of every SGLang replica needs cores of its own, which it takes by polling
#: where it is not told to sleep.
OPTIONS = {
    "vllm": (("-dp", "2"), {"OMP_NUM_THREADS": "1"}),
    "sglang": (("--dp-size", "2", "--sleep-on-idle"), {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}),
}


def start(name, kind, model_folder, folder, options=None, make=Replicas):
    orders = folder / "order"
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    path = os.pathsep.join([str(SITE), str(CPU_EXPERTS), str(servers.ROOT), os.environ.get("PYTHONPATH", "")])
    args, env = options or OPTIONS[name]
    server = servers.start(name, a, args=args, env={"PYTHONPATH": path, "FAULT_FILE": str(orders), **env})
    return make(server, orders, a, b)


#: vLLM's replicas commit by the calls that one engine gets, and SGLang's by steps of their own.
@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request, model_folder, tmp_path_factory):
    found = start(request.param, "qwen3", model_folder, tmp_path_factory.mktemp("replicas"))
    with found.server:
        yield found


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_every_transport_brings_the_weights_to_both_replicas(engine, transport):
    engine.push(engine.a, "a")
    engine.push(engine.b, f"b by {transport}", transport=transport, verify="deep")
    engine.assert_serves(engine.b, f"b by {transport}")


@pytest.mark.parametrize("pause", ["retract", "wait", "abort"])
def test_requests_of_both_replicas_survive_a_push(engine, pause):
    engine.push(engine.a, "a")
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(engine.ask, replica, 300) for replica in (0, 1)]
        engine.push(engine.b, pause, pause=pause)
        lengths = [len(request.result(PATIENCE_S)[0]) for request in asked]
    assert pause == "abort" or lengths == [300, 300]
    engine.assert_serves(engine.b, pause)


def test_an_incomplete_push_changes_no_replica(engine):
    engine.push(engine.a, "a")
    weights = dict(models.load_reference(engine.b).state_dict())
    weights.pop("model.norm.weight")
    with engine.sender() as sender, pytest.raises(ManifestMismatch) as raised:
        sender.push(weights)
    assert raised.value.engines == {engine.url: "unchanged"}
    engine.assert_serves(engine.a, "a")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_replica_stops_both_until_a_push_heals_them(engine, rank):
    engine.push(engine.a, "a")
    engine.order("raise", rank)
    with engine.sender(staging="none") as sender:
        with pytest.raises(ApplyFailed, match=f"rank {rank} failed") as raised:
            sender.push(models.load_reference(engine.b), version="never")
        assert raised.value.engines == {engine.url: "dirty"}
        assert requests.get(f"{engine.url}/health", timeout=10).status_code == 503
        with ThreadPoolExecutor(2) as threads:
            waiting = [threads.submit(engine.ask, replica, 4) for replica in (0, 1)]
            with pytest.raises(ManifestMismatch):
                sender.push({"lm_head.weight": models.load_reference(engine.b).lm_head.weight})
            assert sender.status()[engine.url].state == "dirty"
            assert not any(request.done() for request in waiting)
            sender.push(models.load_reference(engine.b), version="healed")
            assert [len(request.result(PATIENCE_S)[0]) for request in waiting] == [4, 4]
    engine.assert_serves(engine.b, "healed")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_in_one_replica_is_undone_in_both(engine, rank):
    with engine.sender(keep_previous=True) as sender:
        sender.push(models.load_reference(engine.b), version="b")
        sender.push(models.load_reference(engine.a), version="a")
        engine.order_in_pause("raise", rank)
        with pytest.raises(ApplyFailed, match="the version before was loaded again") as raised:
            sender.push(models.load_reference(engine.b), version="never")
        assert raised.value.engines == {engine.url: "unchanged"}
        engine.assert_serves(engine.a, "a")
        sender.push(models.load_reference(engine.b), version="b again")
        assert sender.rollback().version == "a"
    engine.assert_serves(engine.a, "a")


def test_a_frozen_replica_ends_a_push_by_its_deadline_and_is_named(engine):
    engine.push(engine.a, "a")
    with engine.sender() as sender:
        ranks = sender._driver.engines.by_url[engine.url].hello.ranks
    os.kill(ranks[1].pid, 19)
    try:
        with pytest.raises(WeightSyncError, match=rf"rank 1 \(process {ranks[1].pid}\) is stopped"):
            Sender([engine.url], timeout_s=3)
    finally:
        os.kill(ranks[1].pid, 18)
    engine.push(engine.b, "b")
    engine.assert_serves(engine.b, "b")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_replica_that_is_killed_while_it_loads_ends_its_engine_alone(name, model_folder, tmp_path):
    """vLLM ends when one of its processes has ended; SGLang goes on without its replica, and must not generate."""
    engine = start(name, "qwen3", model_folder, tmp_path)
    with engine.server, ReferenceEngine(engine.a) as other:
        with Sender([engine.url, other.url], timeout_s=PATIENCE_S) as sender:
            sender.push(models.load_reference(engine.a), version="a")
            engine.order("kill", 1)
            with pytest.raises(WeightSyncError) as raised:
                sender.push(models.load_reference(engine.b), version="b")
            assert not isinstance(raised.value, PushTimeout)  # nobody waits for the dead
            assert raised.value.engines.pop(engine.url) in ("unknown", "dirty")
            assert raised.value.engines == {other.url: "committed"}
            sender.remove_engine(engine.url)
            sender.push(models.load_reference(engine.a), version="on")
            assert sender.status()[other.url].version == "on"
        with pytest.raises(requests.RequestException):
            engine.ask(0, 4, timeout=5)
