"""One SGLang over two hosts (``--nnodes 2``): its front end is on the trainer's, rank 1 on another."""

import contextlib
import json
import os
import subprocess

import psutil
import pytest

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.faults.harness import SITE
from tests.hosts.programs import ASK_S, PORT, Engine
from tools import models, servers

pytestmark = pytest.mark.slow
STORE = 5000
#: Seconds; the limit of a push into a node that is frozen.
LIMIT_S = 10.0


class Nodes(Engine):
    """SGLang over several hosts; the first has its front end."""

    start_s = 300.0

    def __init__(self, hosts, folder, work):
        self._hosts, self._work, self.orders = hosts, work, work / "order"
        super().__init__(hosts[0], folder)

    def start(self):
        path = os.pathsep.join([str(SITE), str(servers.ROOT)])
        common = {**servers.environment_of("sglang", tp=1), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        command = servers.command_of("sglang", self._folder, len(self._hosts), PORT)
        several = ("--nnodes", str(len(self._hosts)), "--dist-init-addr", f"{self._hosts[0].address}:{STORE}")
        self._processes = []
        for rank, host in enumerate(self._hosts):
            own = {
                "SGLANG_CPU_OMP_THREADS_BIND": str(rank),
                "SGLANG_HOST_IP": host.address,
                "GLOO_SOCKET_IFNAME": "eth0",
                "FAULT_FILE": str(self.orders),
            }
            with (self._work / f"node-{rank}.log").open("wb") as log:
                self._processes.append(
                    host.popen(
                        *(*command, *several, "--host", host.address, "--node-rank", str(rank)),
                        environment=common | own,
                        cwd=self._work,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        self._process = self._processes[0]

    def answer(self, prompt, tokens):
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        reply = self._ask("/generate", input_ids=prompt, sampling_params=sampling, return_logprob=True)
        pairs = reply["meta_info"]["output_token_logprobs"]
        return [token for _, token, *_ in pairs], [logprob for logprob, *_ in pairs]

    def order(self, action, rank):
        """Order a fault in the next load of a rank."""
        where = {"tensor": 5, "rank": rank}
        self.orders.write_text(json.dumps({"point": "rank loads", "where": where, "action": action}))

    def assert_serves(self, folder, version):
        reply = self.status()
        assert (reply["state"], reply["version"]) == ("serving", version)
        tokens, logprobs = self.answer(PROMPT, NEW_TOKENS)
        own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
        assert apart(logprobs, own) <= BF16_ROUNDING

    @contextlib.contextmanager
    def frozen(self, node):
        """For the duration of the block, stop the processes of a node."""
        root = psutil.Process(self._processes[node].pid)
        stopped = [root, *root.children(recursive=True)]
        for process in stopped:
            process.suspend()
        try:
            yield
        finally:
            for process in stopped:
                process.resume()

    def kill(self):
        for process in self._processes:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait(ASK_S)


@pytest.fixture(scope="module")
def nodes(network, model_folder, tmp_path_factory):
    hosts = network.hosts["trainer"], network.hosts["a"]
    engine = Nodes(hosts, model_folder("qwen3", 0), tmp_path_factory.mktemp("nodes"))
    with contextlib.ExitStack() as running:
        running.callback(engine.kill)
        engine.wait()
        yield engine


def test_the_whole_engine_takes_a_transport_that_reaches_all_ranks(trainer, nodes, model_folder):
    for transport in ("auto", "nccl", "nixl"):
        for seed in (0, 1):
            version = f"{seed} by {transport}"
            said = trainer.push([nodes], model_folder("qwen3", seed), version=version, transport=transport)
            assert not said["error"], said
        nodes.assert_serves(model_folder("qwen3", 1), version)
        engine = said["engines"][nodes.url]
        assert transport in ("auto", engine["transport"])
        if transport == "auto":
            assert "several hosts, with rank 1 on another" in engine["reason"]


def test_ipc_zmq_is_refused_and_names_the_far_rank(trainer, nodes, model_folder):
    said = trainer.push([nodes], model_folder("qwen3", 1), transport="ipc_zmq")
    assert said["error"] == "UnsupportedOption"
    assert f"{nodes.url} runs on several hosts, with rank 1 on another" in said["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_host_stops_the_engine_until_a_push_heals_it(trainer, nodes, model_folder, rank):
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a")["error"]
    nodes.order("raise", rank)
    said = trainer.push([nodes], model_folder("qwen3", 1), version="never")
    assert (said["error"], said["engines"]) == ("ApplyFailed", {nodes.url: "dirty"})
    assert f"rank {rank} failed" in said["message"]
    assert nodes.status()["state"] == "dirty"
    assert not trainer.push([nodes], model_folder("qwen3", 1), version="healed")["error"]
    nodes.assert_serves(model_folder("qwen3", 1), "healed")


def test_a_frozen_node_ends_the_push_in_time_and_the_next_push_succeeds(trainer, nodes, model_folder):
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a", timeout_s=LIMIT_S)["error"]
    with nodes.frozen(1):
        said = trainer.push([nodes], model_folder("qwen3", 1), version="b", timeout_s=LIMIT_S)
        assert said["error"] in ("PushTimeout", "TransferFailed")
        assert nodes.url in said["message"]
        assert said["seconds"] < LIMIT_S + 3.0
        assert said["engines"][nodes.url] in ("unchanged", "unknown")
    nodes.assert_serves(model_folder("qwen3", 0), "a")
    assert not trainer.push([nodes], model_folder("qwen3", 1), version="after")["error"]
    nodes.assert_serves(model_folder("qwen3", 1), "after")


def test_a_node_that_is_killed_while_it_loads_ends_its_engine_alone(trainer, nodes, model_folder):
    """The last test of this module: the engine is gone after it."""
    options = {"timeout_s": LIMIT_S}
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a", **options)["error"]
    nodes.order("kill", 1)
    said = trainer.push([nodes], model_folder("qwen3", 1), version="b", **options)
    assert said["engines"][nodes.url] in ("dirty", "unknown")
    assert said["seconds"] < LIMIT_S + 3.0
