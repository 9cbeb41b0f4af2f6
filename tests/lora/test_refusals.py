"""Engines that take no adapter say so, and serve what they served."""

import pytest

from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_same
from tests.lora.adapters import make_adapter
from tools import servers
from weightsync import Sender
from weightsync.errors import UnsupportedOption

#: What each engine says that was started without LoRA.
SAID = {
    "vllm": "this vllm takes no adapter: start vLLM with --enable-lora",
    "sglang": "this sglang takes no adapter: start SGLang with --enable-lora",
}


@pytest.mark.parametrize("engine", SAID)
def test_an_engine_without_lora_refuses_an_adapter(engine, model_folder, tmp_path):
    base = model_folder("llama", 0)
    folder = make_adapter(tmp_path, base, seed=1)
    with servers.start(engine, base) as server, Sender([server.url]) as sender:
        sender.push(base, version="base")
        before = servers.greedy(server, PROMPT, NEW_TOKENS)
        with pytest.raises(UnsupportedOption, match=SAID[engine]) as refused:
            sender.push(folder, lora="policy")
        assert refused.value.weights == "unchanged"
        (status,) = sender.status().values()
        assert (status.version, status.state) == ("base", "serving")
        assert_same(servers.greedy(server, PROMPT, NEW_TOKENS), before)
        assert sender.push(base).version == "1"
