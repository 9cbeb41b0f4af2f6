"""SGLang with layers that it packs after it has loaded them: they are packed in a standby, before the pause."""

import os

import pytest

from tools import models, servers
from weightsync import Sender

from .conftest import BF16_ROUNDING, HERE, NEW_TOKENS, PROMPT, apart

pytestmark = pytest.mark.slow


def assert_serves(server, folder):
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= BF16_ROUNDING


@pytest.mark.parametrize("tp", [1, 2])
def test_packed_layers_are_loaded_into_a_standby_and_exchanged(model_folder, tp):
    a, b = (model_folder("qwen3", seed) for seed in (0, 1))
    path = os.pathsep.join(filter(None, (str(HERE / "packing_site"), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    with (
        servers.start("sglang", a, tp=tp, args=["--sleep-on-idle"], env={"PYTHONPATH": path}) as server,
        Sender([server.url]) as sender,
    ):
        assert_serves(server, a)
        for folder in (b, a, b, a, b):
            (result,) = sender.push(models.load_reference(folder)).engines.values()
            assert_serves(server, folder)
        assert result.loading == ("into a standby, by the engine's own loader, and exchanged",)
        sender.rollback()
        assert_serves(server, a)
