"""Engines with LoRA, each started once: a server of model A that has loaded adapters A and B from folders."""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import requests

from tests.engines.conftest import NEW_TOKENS, PROMPT
from tests.lora.adapters import TARGETS, make_adapters, targets_of
from tools import servers
from weightsync import Sender

SITE = servers.ROOT / "tests" / "faults" / "site"
PATH = os.pathsep.join(filter(None, (str(SITE), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
#: How many adapters SGLang may have loaded.
SGLANG_MOST = 6
#: With room for one adapter at a time beside the model itself.
OPTIONS = {
    "vllm": ["--enable-lora", "--max-lora-rank", "16", "--enable-prefix-caching", "--enable-prompt-tokens-details"],
    "sglang": [
        *("--enable-lora", "--max-lora-rank", "16", "--max-loras-per-batch", "2", "--lora-backend", "torch_native"),
        *("--max-loaded-loras", str(SGLANG_MOST), "--lora-target-modules", *TARGETS),
    ],
}
FOLDERS = {"vllm": "--lora-modules", "sglang": "--lora-paths"}


@dataclass
class Served:
    """A server, its folders, and the file that orders a fault in it."""

    server: servers.Server
    tp: int
    base: Path
    other: Path
    folders: dict[str, Path]
    fault: Path

    @property
    def engine(self):
        return self.server.engine

    def asked(self, name):
        """The server, as a request asks for a model or an adapter."""
        return dataclasses.replace(self.server, adapter="" if name == "base" else name)

    def ask(self, name, prompt=PROMPT, n=NEW_TOKENS):
        return servers.greedy(self.asked(name), prompt, n)

    def names(self):
        """What it lists as its models."""
        return [model["id"] for model in requests.get(f"{self.server.url}/v1/models", timeout=10).json()["data"]]

    def serves(self):
        """What it says that it serves, and what it answers."""
        with Sender([self.server.url]) as sender:
            (status,) = sender.status().values()
        said = status.version, status.adapters, status.state, sorted(self.names())
        return said, [self.ask(name) for name in ("base", "policy") if name == "base" or name in said[3]]


#: With an adapter of all layers of a model without experts.
OF_SGLANG = pytest.param(("sglang", "llama", 2), marks=pytest.mark.slow)
#: One of them is in `make test`. On a CPU vLLM serves no experts beside adapters: its experts then need Triton. Its
#: hybrid models have experts, or need Triton or torchvision themselves.
SERVERS = [
    ("vllm", "llama", 1),
    pytest.param(("vllm", "qwen3", 2), marks=pytest.mark.slow),
    pytest.param(("sglang", "qwen3", 1), marks=pytest.mark.slow),
    OF_SGLANG,
    pytest.param(("sglang", "qwen3_moe", 1), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=SERVERS, ids=lambda param: "-".join(map(str, param)))
def served(request, model_folder, tmp_path_factory):
    engine, kind, tp = request.param
    base, root = model_folder(kind, 0), tmp_path_factory.mktemp("adapters")
    folders = make_adapters(root, base, "ab")
    loaded = [f"loaded-{name}={folder}" for name, folder in folders.items()]
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONPATH": PATH, "FAULT_FILE": str(root / "fault")}
    # SGLang takes the last of the two lists.
    targets = ["--lora-target-modules", *targets_of(base)] if engine == "sglang" else []
    args = [*OPTIONS[engine], *targets, FOLDERS[engine], *loaded]
    with servers.start(engine, base, tp=tp, args=args, env=environment) as server:
        yield Served(server, tp, base, model_folder(kind, 1), folders, root / "fault")


@pytest.fixture
def sender(served):
    with Sender([served.server.url]) as made:
        yield made
