"""The main job, refusals and a few faults on every supported version of both engines."""

import signal
import subprocess
import sys

import pytest
import requests

from tests.frameworks.running import run
from tests.versions.conftest import VLLM
from tools import models, servers
from weightsync import bench
from weightsync.errors import ManifestMismatch, UnsupportedOption


def test_bench_of_an_engine_that_nobody_has_pushed_to(engine):
    before = engine.status()
    found = bench.measure([engine.server.url], commit=False)
    assert found.usual["transfer"] > 0
    assert engine.status().committed == before.committed == ""
    found = bench.measure([engine.server.url], commit=True)
    assert found.usual["pause"] > 0
    after = engine.status()
    assert after.version == before.version
    assert [rank.digest for rank in after.ranks] == [rank.digest for rank in before.ranks]
    engine.assert_answers(engine.a)


@pytest.mark.shows("push")
def test_push(engine):
    for transport in ("ipc_zmq", "nccl", "nixl"):
        engine.push(engine.a, "a")
        assert engine.push(engine.b, f"b-{transport}", transport=transport).version == f"b-{transport}"
        engine.assert_serves(engine.b, f"b-{transport}")
    route = {"vllm": "/version", "sglang": "/server_info"}[engine.name]
    assert requests.get(engine.server.url + route, timeout=30).json()["version"].startswith(engine.version)
    assert "tests" not in engine.status().off


@pytest.mark.shows("refusals")
def test_refusals(engine):
    engine.push(engine.a, "before")
    before = engine.digests()
    incomplete = dict(models.load_reference(engine.b).named_parameters())
    left_out = next(name for name in incomplete if "layers.1" in name)
    del incomplete[left_out]
    with engine.sender() as sender, pytest.raises(ManifestMismatch, match=left_out):
        sender.push(incomplete)
    with pytest.raises(UnsupportedOption, match="keep"):
        engine.push(engine.b, "kept", pause="keep")
    assert engine.digests() == before
    engine.assert_serves(engine.a, "before")


@pytest.mark.shows("vLLM's own transfer")
@pytest.mark.parametrize("engine", VLLM, indirect=True)
def test_vllms_own_weight_transfer(engine):
    engine.push(engine.a, "before")
    program = ("-m", "tests.frameworks.weight_transfer", "over_http")
    run(*program, engine.a, engine.b, engine.server.url, vllm=engine.version)
    engine.assert_answers(engine.b)


FAILING = """
import sys, time
from types import SimpleNamespace as Meta
from tools import models
from weightsync import Sender

class Source:
    def __init__(self, model):
        self.weights = {name: tensor.data for name, tensor in model.named_parameters()}
    def metadata(self):
        return [Meta(name=name, dtype=tensor.dtype, shape=tensor.shape) for name, tensor in self.weights.items()]
    def __iter__(self):
        for number, pair in enumerate(self.weights.items()):
            if number == 8:
                print("half", flush=True)
                time.sleep(600)
            yield pair

Sender([sys.argv[1]], bucket_bytes=65536).push(Source(models.load_reference(sys.argv[2])))
"""


@pytest.mark.shows("a killed trainer")
def test_a_trainer_that_is_killed_midway(engine):
    engine.push(engine.a, "before")
    before = engine.digests()
    command = [sys.executable, "-c", FAILING, engine.server.url, str(engine.b)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=servers.ROOT) as trainer:
        assert trainer.stdout.readline() == b"half\n"
        trainer.send_signal(signal.SIGKILL)
    assert engine.digests() == before
    engine.assert_answers(engine.a)
    engine.push(engine.b, "after")
    engine.assert_serves(engine.b, "after")


@pytest.mark.shows('`verify="deep"`')
def test_deep_verification(engine):
    engine.push(engine.b, "deep", verify="deep")
    engine.assert_serves(engine.b, "deep")


@pytest.mark.shows("rollback")
def test_rollback(engine):
    with engine.sender(keep_previous=True) as sender:
        sender.push(models.load_reference(engine.a), version="kept")
        sender.push(models.load_reference(engine.b), version="next")
        engine.assert_serves(engine.b, "next")
        sender.rollback()
    engine.assert_serves(engine.a, "kept")


#: Routes that put weights and KV to sleep, and that wake first the weights and then the KV.
SLEEP = {
    "vllm": ["/sleep?level=1", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"],
    "sglang": ["/release_memory_occupation", "/resume_memory_occupation", "/resume_memory_occupation"],
}


@pytest.mark.shows("sleep")
def test_sleep(engine):
    engine.push(engine.a, "awake")
    sleep, *wake = (engine.server.url + route for route in SLEEP[engine.name])
    assert requests.post(sleep, json={}, timeout=60).ok
    with pytest.raises(UnsupportedOption, match="wake"):
        engine.push(engine.b, "asleep")
    for url, tag in zip(wake, ("weights", "kv_cache"), strict=True):
        assert requests.post(url, json={"tags": [tag]}, timeout=60).ok
        engine.push(engine.b, f"woken: {tag}")
    engine.assert_serves(engine.b, "woken: kv_cache")
