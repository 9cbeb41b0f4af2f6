"""What vLLM has packed wrongly is found by ``verify="deep"``, in weights that are only seen through their kernel."""

import pytest

from tests.engines.conftest import BF16_ROUNDING, apart
from tests.in_process.doors import PROMPT
from tests.in_process.test_ways import LOADED, what_it_saw
from tests.unit.quantised import each_channel, quantised_folder
from tools import models

pytestmark = pytest.mark.slow

LAYER = "model.layers.1.self_attn.o_proj"
PACKS = {"worker_extension_cls": "tests.in_process.packing_extension.PackingExtension", "layer": LAYER}
#: The configuration of the checkpoint, options, ranks, what deep calls the packed weights, and the difference of
#: logprobs that is allowed, see `test_ways.Case`.
CASES = {
    "int8": (each_channel("int-quantized", "int"), {}, 2, "dnnl_handler", 1.0),
    # On a CPU without AVX512, oneDNN packs no other layers.
    "float32": (None, {"dtype": "float32"}, 1, "cpu_linear", BF16_ROUNDING),
}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_that_is_packed_wrongly_is_refused_by_name(case, model_folder, tmp_path):
    config, options, ranks, packed, rounding = CASES[case]
    a, b = model_folder("llama", 0), model_folder("llama", 1)
    started = a if config is None else quantised_folder(a, tmp_path / "quantised", config)
    found = what_it_saw("packed_wrongly", started, a, b, {**PACKS, **options}, ranks)
    right = {name: found[name]["digests"] for name in ("a", "b")}
    assert not set(right["a"]) & set(right["b"])
    assert found["start"]["digests"] == right["a"]
    assert {way for name in (*right, "unseen") for way in found[name]["loading"]} == {LOADED + "exchanged"}

    wrong = found["wrong"]
    assert f"would load: it differs in {LAYER}.{packed}" in wrong.get("error", "none")
    assert (wrong["weights"], wrong["state"], wrong["version"]) == ("unchanged", "serving", "b")
    assert wrong["digests"] == right["b"]
    # It is one value in one rank, which nothing else looks at: this push is taken.
    unseen = found["unseen"]
    assert "error" not in unseen
    assert [one != two for one, two in zip(unseen["digests"], right["a"], strict=True)] == [False] * (ranks - 1) + [
        True
    ]
    assert (found["b again"]["digests"], found["a again"]["digests"]) == (right["b"], right["a"])

    expected = {name: models.load_reference(folder) for name, folder in (("a", a), ("b", b))}
    for (name, step), served in zip(found.items(), "abbabaa", strict=True):
        tokens, logprobs = step["answer"]
        own = models.reference_logprobs(expected[served], PROMPT + tokens, len(PROMPT))
        assert apart(logprobs, own) <= rounding, name
