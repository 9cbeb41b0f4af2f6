"""Hugging Face's Trainer pushes into a real vLLM, on this CPU."""

import pytest

from tests.frameworks.running import NEWEST, ROUNDING, apart, label, run
from tools import models, servers

pytestmark = pytest.mark.frameworks
EXAMPLE = servers.ROOT / "examples" / "hf_trainer.py"


@pytest.mark.parametrize("processes", [1, 2])
def test_the_server_generates_with_what_was_trained(server, model_folder, tmp_path, processes):
    run(EXAMPLE, model_folder("qwen3", 0), server.url, tmp_path, trl=NEWEST, processes=processes)
    assert apart(server, models.load_reference(tmp_path)) <= ROUNDING
    assert apart(server, models.load_reference(model_folder("qwen3", 0))) > ROUNDING
    assert label(server.url) == "step 5"
