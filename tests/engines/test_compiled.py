"""vLLM with its default compilation, as `vllm serve` has it without ``--enforce-eager``."""

import re

import pytest

from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_agrees, assert_same, is_plain
from tools import models, servers
from weightsync import Sender

pytestmark = pytest.mark.slow  # it compiles for a minute


@pytest.fixture(scope="module")
def server(model_folder):
    found = servers.start(
        "vllm",
        model_folder("qwen3", 0),
        args=["--no-enforce-eager", "--enable-prefix-caching"],
        env={"TORCH_COMPILE_DISABLE": "0"},
    )
    with found:
        assert "enforce_eager=False" in found.log.read_text(errors="replace")
        yield found


def test_a_compiled_model_serves_what_was_pushed(server, model_folder):
    a, b = (models.load_reference(model_folder("qwen3", seed)) for seed in (0, 1))

    def ask():
        return servers.greedy(server, PROMPT, NEW_TOKENS)

    first = ask()
    assert_agrees(server, a, first)
    with Sender([server.url], verify="deep", keep_previous=True) as sender:
        for module, version in ((b, "b"), (a, "a"), (b, "b again")):
            result = sender.push(module, version=version)
            assert_agrees(server, module, ask())
        (rank,) = sender.status()[server.url].ranks
        sender.rollback()
        assert_same(ask(), first)
    assert result.version == "b again"
    if is_plain("vllm", "qwen3"):
        assert re.fullmatch(r"load plan, \d+ copies, into a standby", rank.loading)
    else:
        assert rank.loading == "into a standby, by the engine's own loader, and exchanged"
