"""A Ray of several nodes, each in a network namespace of its own, with engines and a trainer in actors on them."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time

import pytest

from tests.hosts.network import network_for_tests
from tests.ray.test_ray import ENVIRONMENT
from tools import servers, versions

pytestmark = pytest.mark.frameworks

PORT = 6379
START_S = 120
#: Seconds of a push over a path that is not there, and what it may take more.
LIMIT_S, LATE_S = 20.0, 20.0
RAY = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1")
#: Names are resolved from a file alone: servers of names cannot be reached, and Ray waits for them again and again.
NAMES = 'mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf'
PATH = os.pathsep.join(map(str, (servers.ROOT, versions.folder("ray", versions.RAY))))


class Nodes:
    """Hosts with a node of Ray each, and the driver on the first."""

    def __init__(self, network, names, made):
        self.network, self._made, self._processes = network, made, {}
        guarded = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self._env = {**ENVIRONMENT, **guarded, "PYTHONPATH": PATH}
        names.write_text("".join(f"{host.address} {name}\n" for name, host in network.hosts.items()))
        for host in network.hosts.values():
            assert host.popen("sh", "-c", NAMES, str(names)).wait(START_S) == 0
        head = network.hosts["head"].address
        self._address = f"{head}:{PORT}"
        self.start("head", "--head", "--port", str(PORT), "--include-dashboard", "false")

    def start(self, name, *how):
        """Start the node of a host. They share a folder, so Ray does not start two at once."""
        host = self.network.hosts[name]
        where = ("--node-ip-address", host.address, "--resources", json.dumps({name: 8}))
        how = how or ("--address", self._address)
        self._processes[name] = host.popen(*RAY, *where, *how, environment=self._env, stdout=subprocess.PIPE, text=True)
        self._made.callback(self.end, name)
        assert any("Ray runtime started" in line for line in self._processes[name].stdout)

    def end(self, name):
        """End the node of a host, with its actors; idempotent."""
        process = self._processes[name]
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=START_S)

    def drive(self):
        """Start the driver."""
        self._driver = self.network.hosts["head"].popen(
            *(sys.executable, "-m", "tests.ray.nodes", self._address),
            environment=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._made.callback(self._driver.stdout.close)
        self._made.callback(self._driver.wait, START_S)
        self._made.callback(self._driver.stdin.close)

    def ask(self, *step):
        """Have the driver do something; its reply."""
        self._driver.stdin.write(json.dumps(step) + "\n")
        self._driver.stdin.flush()
        return json.loads(self._driver.stdout.readline())

    def do(self, *step):
        """The same, which has to succeed; the value."""
        reply = self.ask(*step)
        assert "error" not in reply, reply
        return reply["value"]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with network_for_tests("head", "a", "b", "c") as network, contextlib.ExitStack() as made:
        nodes = Nodes(network, tmp_path_factory.mktemp("names") / "hosts", made)
        for name in ("a", "b"):
            nodes.start(name)
        nodes.drive()
        yield nodes


@pytest.fixture(scope="module")
def folders(model_folder):
    return str(model_folder("llama", 0)), str(model_folder("llama", 1))


@pytest.fixture(scope="module")
def fresh(nodes, folders):
    return [nodes.do("fresh", folder) for folder in folders]


@pytest.fixture(scope="module")
def engines(nodes, folders):
    """The nodes with engines, which serve the first folder."""
    for name in ("a", "b"):
        assert nodes.do("place", "engine", name, folders[0]) == name
    return ["a", "b"]


@pytest.fixture(params=["nixl", "nccl", "rdt"])
def transport(request):
    return request.param


def test_engines_on_other_nodes_are_pushed_to_and_nodes_join_and_leave(nodes, engines, folders, fresh, transport):
    nodes.do("build", engines, {"transport": transport})
    for which in (1, 0):
        assert nodes.do("push", folders[which]) == [transport] * 2
        assert nodes.do("answers", engines) == [fresh[which]] * 2
    nodes.do("push", folders[1])
    nodes.start("c")
    assert nodes.do("place", "engine", "c", folders[0]) == "c"
    nodes.do("join", "c")
    assert nodes.do("answers", [*engines, "c"]) == [fresh[1]] * 3
    nodes.end("c")
    begin = time.monotonic()
    told = nodes.ask("push", folders[0])["error"]
    assert time.monotonic() - begin < START_S
    assert nodes.do("names", ["c"])[0] in told
    nodes.do("leave", "c")
    nodes.do("push", folders[0])
    assert nodes.do("answers", engines) == [fresh[0]] * 2
    nodes.do("close")


def test_a_trainer_on_a_node_without_a_path_to_an_engine_is_told_which(nodes, engines, folders, fresh):
    assert nodes.do("place", "trainer", "b") == "b"
    before = nodes.do("answers", engines)
    options = {"timeout_s": LIMIT_S}
    with nodes.network.apart("a", "b"):
        begin = time.monotonic()
        told = nodes.ask("train", "b", engines, folders[1], options)["error"]
        assert time.monotonic() - begin < LIMIT_S + LATE_S
    assert nodes.do("names", ["a"])[0] in told
    assert nodes.do("answers", engines) == before
    end = time.monotonic() + START_S  # Ray notices later than the network
    while "error" in nodes.ask("train", "b", engines, folders[1], options):
        assert time.monotonic() < end
    assert nodes.do("answers", engines) == [fresh[1]] * 2
