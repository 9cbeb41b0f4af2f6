"""Every way in which vLLM's weights get served, and kinds of models and options that go each of them."""

import json
import os
import subprocess
from typing import NamedTuple

import pytest

from tests.engines.conftest import BF16_ROUNDING, apart
from tests.in_process.doors import NEW_TOKENS, PROMPT
from tests.unit.quantised import FINE, each_channel, quantised_folder
from tools import models, servers

#: As on a GPU, where weights stay at their addresses.
STAY = {"worker_extension_cls": "tests.in_process.staying_extension.StayingExtension"}
#: With kernels for FP8 on any CPU.
FP8 = {"worker_extension_cls": "tests.in_process.fp8_extension.Fp8Extension"}
LOADED = "into a standby, by the engine's own loader, and "


class Case(NamedTuple):
    kind: str
    loading: str
    options: dict
    ranks: int = 1
    rounding: float = BF16_ROUNDING
    """Allowed mean difference of logprobs to those of transformers; other weights differ by 6."""
    config: dict | None = None
    """The ``quantization_config`` of the checkpoint from which the engine starts."""


CASES = {
    "experts that stay": Case("qwen3_moe", LOADED + "copied", STAY, ranks=2),
    "plain layers that stay": Case(
        "llama", "load plan, 21 copies; no standby: weights stay where they are on an accelerator", STAY
    ),
    # The engine computes most of it in float32, and transformers in other chunks.
    "linear attention": Case("qwen3_next", LOADED + "exchanged", {}, ranks=2, rounding=3 * BF16_ROUNDING),
    # vLLM keeps two more parameters for it, which it computes of one that the checkpoint has.
    "latent attention": Case("deepseek_v2", LOADED + "exchanged", {}, ranks=2),
    "latent attention that stays": Case("deepseek_v2", LOADED + "copied", STAY, ranks=2),
    # vLLM quantises with scales that fit all ranks, which ask each other for them.
    "adapters, quantised": Case(
        *("llama", LOADED + "exchanged", {"enable_lora": True, "quantization": "fp8_per_channel"}, 2, 1.0)
    ),
    "quantised with one scale": Case("llama", LOADED + "exchanged", {**FP8, "quantization": "fp8"}, 2, 1.0),
    "checkpoint in FP8": Case(
        "llama", LOADED + "exchanged", {}, rounding=1.0, config=each_channel("float-quantized", "float")
    ),
    "checkpoint in blocks of FP8": Case(
        "llama", LOADED + "exchanged", FP8, ranks=2, rounding=1.0, config={**FINE, "weight_block_size": [32, 32]}
    ),
    "checkpoint in INT8": Case(
        "llama", LOADED + "exchanged", {}, ranks=2, rounding=1.0, config=each_channel("int-quantized", "int")
    ),
    # Neither experts nor linear attention are computed in INT8 on a CPU; the attention beside them is.
    "experts beside INT8": Case(
        "qwen3_moe", LOADED + "exchanged", {}, 2, 1.0, config=each_channel("int-quantized", "int", ".*mlp")
    ),
    "linear attention beside INT8": Case(
        *("qwen3_next", LOADED + "exchanged", {}, 2, 1.0),
        config=each_channel("int-quantized", "int", ".*mlp", ".*linear_attn"),
    ),
}
#: `make test` uses one whose weights are copied; those of its servers are exchanged.
FAST = ("experts that stay",)
PATIENCE_S = 560


def told_by(program, *arguments, ranks, patience_s=PATIENCE_S):
    """What a program of this folder, run by vLLM's Python, printed last, which is JSON."""
    python = servers.ROOT / ".venv-vllm" / "bin" / "python"
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(servers.ROOT))))
    done = subprocess.run(
        [str(python), "-m", f"tests.in_process.{program}", *map(str, arguments)],
        env={**os.environ, **servers.environment_of("vllm", ranks), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def what_it_saw(program, started, a, b, options, ranks):
    """What a program, which takes what `ways` takes, saw of an engine after each step, by its name."""
    options = json.dumps({**options, "tensor_parallel_size": ranks})
    return {step.pop("asked"): step for step in told_by(program, started, a, b, options, ranks=ranks)}


@pytest.fixture(scope="module", params=[pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CASES])
def pushed(request, model_folder, tmp_path_factory):
    """A case, the folders of its models, and what the engine was after each push, by its name."""
    case = CASES[request.param]
    a, b = model_folder(case.kind, 0), model_folder(case.kind, 1)
    started = a if case.config is None else quantised_folder(a, tmp_path_factory.mktemp("quantised"), case.config)
    found = what_it_saw("ways", started, a, b, case.options, case.ranks)
    return case, {"a": a, "b": b}, found


def test_every_push_is_served_as_by_an_engine_that_starts_with_it(pushed):
    case, folders, found = pushed
    expected = {folder: models.load_reference(path) for folder, path in folders.items()}
    digests = {"a": found["start"]["digests"], "b": found["b"]["digests"]}
    assert not set(digests["a"]) & set(digests["b"])
    for (name, step), served in zip(found.items(), "ababababab", strict=True):
        if step["state"] == "dirty":  # half of it was copied
            assert step["digests"] not in digests.values(), name
            continue
        assert step["digests"] == digests[served], name
        tokens, logprobs = step["answer"]
        assert len(tokens) == NEW_TOKENS
        own = models.reference_logprobs(expected[served], PROMPT + tokens, len(PROMPT))
        assert apart(logprobs, own) <= case.rounding, name
    assert found["back"]["version"] == "kept"


def test_every_push_goes_the_same_way(pushed):
    case, _, found = pushed
    steps = list(found.values())
    assert {way for step in steps[2:] for way in step["loading"]} == {case.loading}
    assert all(step["stayed"] for step in steps)


def test_a_copy_that_fails_leaves_no_version_and_the_next_push_heals(pushed):
    case, _, found = pushed
    if not case.loading.endswith("copied"):
        pytest.skip("no standby is copied in this case, so none can fail")
    failed, healed = found["fails"], found["next"]
    assert (failed["state"], failed["weights"]) == ("dirty", "dirty")
    assert "rank 1 failed while loading: OSError: no luck" in failed["error"]
    assert (healed["state"], healed["version"]) == ("serving", "next")
