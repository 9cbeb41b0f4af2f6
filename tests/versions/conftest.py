"""Real engines of every supported version, each started once for one rank and once for two."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_agrees
from tools import models, servers, versions
from weightsync import Sender

#: Each version of each engine; all other tests run the newest.
EVERY = [
    pytest.param((engine, version), id=f"{engine}-{version}", marks=pytest.mark.versions)
    for engine, found in versions.VERSIONS.items()
    for version in found
]
#: SGLang has no registry of weight transfers.
VLLM = [param for param in EVERY if param.values[0][0] == "vllm"]


@dataclass
class Engine:
    """A running engine of one version, and the folders of two models of its kind."""

    name: str
    version: str
    server: servers.Server
    a: Path
    b: Path

    def sender(self, **options):
        return Sender([self.server.url], **options)

    def push(self, folder, version, **options):
        with self.sender(**options) as sender:
            return sender.push(models.load_reference(folder), version=version)

    def status(self):
        with self.sender() as sender:
            return sender.status(digest=True)[self.server.url]

    def digests(self):
        return [rank.digest for rank in self.status().ranks]

    def assert_answers(self, folder):
        """Assert that the engine answers with the weights of a folder."""
        answer = servers.greedy(self.server, PROMPT, NEW_TOKENS)
        assert_agrees(self.server, models.load_reference(folder), answer)

    def assert_serves(self, folder, version):
        """Assert that the engine answers with the weights of a folder, and reports this version."""
        self.assert_answers(folder)
        status = self.status()
        assert (status.state, status.version) == ("serving", version)


def start(engine, version, kind, tp, model_folder):
    if not versions.there(engine, version):
        pytest.skip(f"{engine} {version} is not installed: make test-versions")
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    # vLLM's routes that sleep and wake up, and those of its own weight transfer; SGLang has its own always.
    env = {**versions.environment(engine, version), "VLLM_SERVER_DEV_MODE": "1"}
    args = ["--weight-transfer-config", '{"backend": "weightsync"}'] if engine == "vllm" else []
    server = servers.start(engine, a, tp=tp, args=args, env=env)
    return Engine(engine, version, server, a, b)


@pytest.fixture(scope="module", params=EVERY)
def engine(request, model_folder):
    """An engine with one rank and a dense model."""
    found = start(*request.param, "qwen3", 1, model_folder)
    with found.server:
        yield found


@pytest.fixture(scope="module", params=EVERY)
def experts(request, model_folder):
    """An engine with two ranks and a mixture of experts."""
    found = start(*request.param, "qwen3_moe", 2, model_folder)
    with found.server:
        yield found
