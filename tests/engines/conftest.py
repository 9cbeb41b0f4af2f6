"""Real engines, started once for each configuration and shared by the tests that use it."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tools import models, servers
from weightsync import Sender
from weightsync.errors import PluginNotLoaded

PROMPT = list(b"Once upon a time there was a policy that ")
NEW_TOKENS = 24
#: Natural-log units between a pushed engine and a fresh one of the same kind.
SAME_ENGINE = 1e-3
#: Natural-log units between an engine and transformers: both round bfloat16, in different orders. Other weights are
#: several units away.
BF16_ROUNDING = 0.2


@dataclass
class Served:
    """A server that was started on model A, and what a server freshly started on model B answers."""

    server: servers.Server
    kind: str
    tp: int
    a: Path
    b: Path
    fresh_b: "Answers"
    refusal: Exception
    """What a sender says of a server of this engine that runs without the plugin, or with half of it."""

    def sender(self, **options):
        return Sender([self.server.url], **options)

    def push(self, path, **options):
        """Push a transformers model loaded from a folder."""
        with self.sender(**options) as sender:
            return sender.push(models.load_reference(path))

    def state(self):
        with self.sender() as sender:
            return sender.status()[self.server.url]

    def digests(self):
        """What each rank computes with."""
        with self.sender() as sender:
            return [rank.digest for rank in sender.status(digest=True)[self.server.url].ranks]


@dataclass
class Answers:
    """Greedy tokens and logprobs of the two prompts that the tests ask about."""

    short: tuple[list[int], list[float]]
    long: tuple[list[int], list[float]]


def long_prompt():
    """200 tokens."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (200,), generator=generator).tolist()


def ask(server):
    return Answers(servers.greedy(server, PROMPT, NEW_TOKENS), servers.greedy(server, long_prompt(), NEW_TOKENS))


def assert_same(got, want, tolerance=SAME_ENGINE):
    """Same tokens, and logprobs that close."""
    assert got[0] == want[0]
    assert max(abs(x - y) for x, y in zip(got[1], want[1], strict=True)) <= tolerance


def differ(got, want):
    return got[0] != want[0] or max(abs(x - y) for x, y in zip(got[1], want[1], strict=True)) > 2 * BF16_ROUNDING


def assert_agrees(server, model: PreTrainedModel, answer, prompt=PROMPT):
    """The engine's logprobs are transformers' own for the same tokens, within bf16 rounding."""
    own = models.reference_logprobs(model, prompt + answer[0], len(prompt))
    assert max(abs(x - y) for x, y in zip(answer[1], own, strict=True)) <= BF16_ROUNDING


HERE = Path(__file__).parent
#: vLLM's prefix cache is off by default on some CPUs, and the tests are about it.
ARGS = {"vllm": ["--enable-prefix-caching"], "sglang": []}
#: One configuration of vLLM runs a user's own extension class, derived from ours, and shows its worker RPC.
USERS_OWN = {
    "args": [*ARGS["vllm"], "--worker-extension-cls", "user_extension.UserExtension"],
    "env": {"PYTHONPATH": str(HERE), "VLLM_SERVER_DEV_MODE": "1"},
}


def without_plugin(engine, kind):
    """How to start a server that cannot be pushed to: without our plugin, or in one case with the routes alone."""
    half = {"env": {"VLLM_PLUGINS": "weightsync"}} if (engine, kind) == ("vllm", "llama") else {}
    return {"args": ARGS[engine], "plugin": False, **half}


@pytest.fixture(scope="module")
def served(request, model_folder):
    """A `Served` for the configuration (engine, kind, tp) that the module asks for."""
    engine, kind, tp = request.param
    a, b = model_folder(kind, 0), model_folder(kind, 1)
    with servers.start(engine, b, tp=tp, **without_plugin(engine, kind)) as fresh:
        fresh_b = ask(fresh)
        with pytest.raises(PluginNotLoaded) as refusal:
            Sender([fresh.url])
    options = USERS_OWN if (engine, kind) == ("vllm", "llama") else {"args": ARGS[engine]}
    with servers.start(engine, a, tp=tp, **options) as server:
        yield Served(server, kind, tp, a, b, fresh_b, refusal.value)


def configurations(*wanted):
    """Parametrize a module over configurations of `served`."""
    return pytest.mark.parametrize("served", wanted, indirect=True, ids=lambda c: "-".join(map(str, c)), scope="module")
