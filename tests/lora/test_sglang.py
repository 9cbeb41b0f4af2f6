"""What SGLang alone does with adapters: what it fuses, and how many it may have loaded. Slow: a start of an engine."""

import pytest
import requests

from tests.engines.conftest import assert_same, differ
from tests.lora.adapters import make_adapter
from tests.lora.conftest import OF_SGLANG, SGLANG_MOST
from weightsync import errors

pytestmark = pytest.mark.parametrize("served", [OF_SGLANG], indirect=True, ids=str)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("gate_proj",), ("o_proj", "down_proj")], ids="-".join)
def test_some_layers_are_served_as_sglang_loads_them(served, sender, tmp_path, targets):
    folder = make_adapter(tmp_path, served.base, seed=5, targets=targets)
    sender.push(served.folders["a"], lora="policy")  # in a slot where the other layers are not zero
    served.ask("policy")
    sender.push(folder, lora="policy")
    route = f"{served.server.url}/load_lora_adapter"
    requests.post(route, json={"lora_name": "some", "lora_path": str(folder)}, timeout=60).raise_for_status()
    try:
        assert_same(served.ask("policy"), served.ask("some"))
        assert differ(served.ask("policy"), served.ask("base"))
    finally:
        requests.post(f"{served.server.url}/unload_lora_adapter", json={"lora_name": "some"}, timeout=60)


@pytest.mark.parametrize(
    ("targets", "lacking"),
    [(("q_proj", "k_proj"), "v_proj"), (("k_proj",), "q_proj, v_proj"), (("up_proj",), "gate_proj")],
    ids=lambda found: "-".join(found) if isinstance(found, tuple) else "",
)
def test_parts_that_sglang_would_leave_out_are_refused(served, sender, tmp_path, targets, lacking):
    sender.push(served.folders["a"], lora="policy")
    before = served.serves()
    with pytest.raises(errors.ManifestMismatch, match=rf"of model\.layers\.0\.\w+ only with {lacking}"):
        sender.push(make_adapter(tmp_path, served.base, seed=5, targets=targets), lora="policy")
    assert served.serves() == before


def test_several_ranks_or_alphas_are_refused(served, sender, tmp_path):
    folder = make_adapter(tmp_path, served.base, seed=5, rank_pattern={"q_proj": 8})
    with pytest.raises(errors.ManifestMismatch, match="several ranks or alphas, and SGLang takes one"):
        sender.push(folder, lora="policy")


def test_no_more_are_loaded_than_sglang_may_have(served, sender):
    free = SGLANG_MOST - (len(served.names()) - 1)
    pushed = [f"more-{number}" for number in range(free)]
    for name in pushed:
        sender.push(served.folders["a"], lora=name)
    with pytest.raises(errors.UnsupportedOption, match=f"--max-loaded-loras {SGLANG_MOST}; unload one"):
        sender.push(served.folders["a"], lora="one-more")
    for name in pushed:
        requests.post(f"{served.server.url}/unload_lora_adapter", json={"lora_name": name}, timeout=60)
    sender.push(served.folders["b"], lora="policy")
    assert_same(served.ask("policy"), served.ask("loaded-b"))
