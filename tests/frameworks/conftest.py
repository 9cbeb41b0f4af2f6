"""The server of the tests in this folder."""

import pytest

from tools import servers


@pytest.fixture(scope="package")
def server(model_folder):
    with servers.start("vllm", model_folder("qwen3", 0), args=["--logprobs-mode", "processed_logprobs"]) as started:
        yield started
