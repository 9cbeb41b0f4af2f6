"""vLLM as on a GPU, where weights stay at their addresses: a standby is copied there, or a load plan replayed."""

import json
import os
import subprocess

import pytest

from tests.engines.conftest import BF16_ROUNDING, apart
from tests.in_process.doors import NEW_TOKENS, PROMPT
from tools import models, servers

#: By kind of model: how many ranks, and how they load.
WAYS = {
    "qwen3_moe": (2, "into a standby, by the engine's own loader, and copied"),
    "llama": (1, "load plan, 21 copies; no standby: weights stay where they are on an accelerator"),
}
PATIENCE_S = 560


@pytest.fixture(scope="module", params=WAYS)
def pushed(request, model_folder):
    """The kind of model, and by version what the engine was after its push."""
    a, b = model_folder(request.param, 0), model_folder(request.param, 1)
    ranks, _ = WAYS[request.param]
    python = servers.ROOT / ".venv-vllm" / "bin" / "python"
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(servers.ROOT))))
    done = subprocess.run(
        [str(python), "-m", "tests.in_process.stays", str(a), str(b), str(ranks)],
        env={**os.environ, **servers.environment_of("vllm", ranks), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [step.pop("asked") for step in found] == ["b", "a", "b again", "fails", "healed", "kept", "deep", "back"]
    return request.param, {"a": a, "b": b}, found


def test_every_push_is_served_and_no_weight_moves(pushed):
    kind, folders, found = pushed
    expected = {folder: models.load_reference(path) for folder, path in folders.items()}
    digests = {"b": found[0]["digests"], "a": found[1]["digests"]}
    for step, served in zip(found, "babaaaba", strict=True):
        assert step["stayed"]
        assert step["digests"] == digests[served]
        assert step["loading"] == [WAYS[kind][1]] or step is found[0]
        if step["state"] == "serving":
            tokens, logprobs = step["answer"]
            assert len(tokens) == NEW_TOKENS
            own = models.reference_logprobs(expected[served], PROMPT + tokens, len(PROMPT))
            assert apart(logprobs, own) <= BF16_ROUNDING
    assert found[-1]["version"] == "kept"


def test_a_copy_that_fails_leaves_no_version_and_the_next_push_heals(pushed):
    kind, _, found = pushed
    failed, healed = found[3], found[4]
    if kind == "llama":  # copied by its load plan
        assert (failed["state"], failed["version"]) == ("serving", "fails")
    else:
        assert (failed["state"], failed["weights"]) == ("dirty", "dirty")
        assert "rank 1 failed while loading: OSError: no luck" in failed["error"]
    assert (healed["state"], healed["version"]) == ("serving", "healed")
