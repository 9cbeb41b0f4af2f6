"""vLLM with several API servers in front of one engine: every one of them answers for all."""

import os
import re
import signal

import pytest
import requests

from tests.engines.conftest import BF16_ROUNDING, PROMPT, apart
from tests.replicas.test_replicas import PATIENCE_S, ask_vllm
from tools import models, servers
from weightsync import Sender
from weightsync.errors import PushTimeout, WeightSyncError
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.slow  # the same code with the reference engine is in tests/unit/test_servers.py


class ApiServers:
    """A running engine; ``first`` is the process of the API server with the front end, ``other`` that of the other."""

    def __init__(self, server, a, b):
        self.server, self.url, self.a, self.b = server, server.url, a, b
        named = dict(re.findall(r"\(ApiServer_(\d) pid=(\d+)\)", server.log.read_text(errors="replace")))
        self.first, self.other = int(named["0"]), int(named["1"])

    def push(self, folder, version, **options):
        with Sender([self.url], **{"timeout_s": PATIENCE_S, **options}) as sender:
            return sender.push(models.load_reference(folder), version=version)

    def assert_serves(self, folder, version):
        with Sender([self.url], timeout_s=PATIENCE_S) as sender:
            (reply,) = sender.status().values()
        assert (reply.state, reply.version) == ("serving", version)
        for _ in range(4):  # of whichever server
            tokens, logprobs = ask_vllm(self.server, 0, 16, PATIENCE_S)
            own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING


@pytest.fixture
def engine(model_folder):
    a, b = model_folder("qwen3", 0), model_folder("qwen3", 1)
    with servers.start("vllm", a, args=("--api-server-count", "2")) as server:
        yield ApiServers(server, a, b)


def test_a_push_and_a_frozen_or_killed_server(engine, model_folder):
    for number, transport in enumerate(("ipc_zmq", "nccl", "nixl")):
        folder = (engine.b, engine.a)[number % 2]
        engine.push(folder, transport, transport=transport, verify="deep")
        engine.assert_serves(folder, transport)

    os.kill(engine.other, signal.SIGSTOP)
    engine.push(engine.a, "other is frozen")
    os.kill(engine.other, signal.SIGCONT)
    engine.assert_serves(engine.a, "other is frozen")

    os.kill(engine.first, signal.SIGSTOP)
    with pytest.raises(PushTimeout, match=rf"\(process {engine.first}\) is stopped"):
        engine.push(engine.b, "never", timeout_s=5)
    assert "is stopped" in requests.get(f"{engine.url}/health", timeout=PATIENCE_S).text
    os.kill(engine.first, signal.SIGCONT)
    engine.push(engine.b, "thawed")
    engine.assert_serves(engine.b, "thawed")

    with ReferenceEngine(engine.a) as beside, Sender([engine.url, beside.url], timeout_s=PATIENCE_S) as sender:
        os.kill(engine.other, signal.SIGKILL)  # vLLM then ends the engine
        engine.server.process.wait(PATIENCE_S)
        with pytest.raises(WeightSyncError) as raised:
            sender.push(models.load_reference(engine.a), version="on")
        assert not isinstance(raised.value, PushTimeout)
        assert raised.value.engines[engine.url] == "unknown"
        sender.remove_engine(engine.url)
        sender.push(models.load_reference(engine.a), version="on")
        assert sender.status()[beside.url].version == "on"
