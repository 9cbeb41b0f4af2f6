"""Engines with LoRA: adapters that are pushed, beside those that they load from folders themselves."""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch

from tests.engines.conftest import BF16_ROUNDING, PROMPT, apart, assert_same, differ, long_prompt
from tests.lora.adapters import ALPHA, RANK, make_adapter
from tests.lora.asking import cached_tokens, completed, load, post
from tests.lora.streams import STREAMED, Stream
from tools import models, servers
from weightsync import Sender, errors
from weightsync.cli import main


@pytest.mark.parametrize(
    "transport", ["ipc_zmq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nccl", "nixl"))]
)
def test_an_adapter_is_served_as_one_that_the_engine_loads_from_its_folder(served, transport):
    before = served.ask("base")
    with Sender([served.server.url], transport=transport) as sender:
        for name in "abab":
            result = sender.push(served.folders[name], lora="policy", version=f"{transport}-{name}")
            assert result.lora == "policy"
            assert result.nbytes < 400_000
            assert_same(served.ask("policy"), served.ask(f"loaded-{name}"))
            (status,) = sender.status().values()
            assert status.adapters == {"policy": f"{transport}-{name}"}
            assert status.version != f"{transport}-{name}"
        assert differ(served.ask("loaded-a"), served.ask("loaded-b"))
        assert_same(served.ask("base"), before)


def test_a_request_for_the_model_policy_is_answered_by_the_adapter(served, sender):
    """SGLang alone would answer it, as any name that it does not know, with the base model."""
    sender.push(served.folders["a"], lora="policy")
    assert "policy" in served.names()
    assert apart(completed(served, "policy"), served.ask("policy")[1][:9]) <= BF16_ROUNDING
    assert apart(completed(served, str(served.base)), served.ask("base")[1][:9]) <= BF16_ROUNDING
    if served.engine == "sglang":
        assert apart(completed(served, f"{served.base}:policy"), served.ask("policy")[1][:9]) <= BF16_ROUNDING


def test_status_shows_adapters_with_their_versions(served, sender, capsys):
    sender.push(served.folders["a"], lora="policy", version="shown")
    assert main(["status", served.server.url]) == 0
    assert "adapter policy version shown" in capsys.readouterr().out.splitlines()[0]


def test_an_adapter_is_what_transformers_computes_with_the_merged_weights(served, sender):
    sender.push(served.folders["a"], lora="policy")
    tokens, logprobs = served.ask("policy")
    model = models.load_reference(served.base)
    weights = dict(model.named_parameters())
    pushed = dict(read(served.folders["a"]))
    for name, matrix in pushed.items():
        if ".lora_A." in name:
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = pushed[name.replace("lora_A", "lora_B")].bfloat16().float() @ matrix.bfloat16().float()
            weight = weights[f"{layer}.weight"]
            weight.data = (weight.float() + product * (ALPHA / RANK)).to(weight.dtype)
    own = models.reference_logprobs(model, PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= 2 * BF16_ROUNDING


def read(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


def test_scaling_is_as_the_configuration_says(served, sender, tmp_path):
    sender.push(served.folders["a"], lora="policy")
    as_a = served.ask("policy")
    halves = {"lora_alpha": ALPHA / 2}

    def doubled(tensors):
        return {name: 2 * value if "lora_B" in name else value for name, value in tensors.items()}

    sender.push(make_adapter(tmp_path / "same", served.base, seed=1, change=doubled, **halves), lora="policy")
    assert_same(served.ask("policy"), as_a)
    sender.push(make_adapter(tmp_path / "half", served.base, seed=1, **halves), lora="policy")
    assert differ(served.ask("policy"), as_a)
    root = {"use_rslora": True, "lora_alpha": ALPHA / RANK**0.5}
    sender.push(make_adapter(tmp_path / "root", served.base, seed=1, **root), lora="policy")
    assert_same(served.ask("policy"), as_a)


def test_a_cached_prompt_is_computed_anew_with_a_new_adapter(served, sender):
    prompt = long_prompt() * 2
    sender.push(served.folders["a"], lora="policy")
    first = served.ask("policy", prompt)
    assert cached_tokens(served, prompt) > 100
    sender.push(served.folders["b"], lora="policy")
    assert not cached_tokens(served, prompt)
    got = served.ask("policy", prompt)
    assert_same(got, served.ask("loaded-b", prompt))
    assert differ(got, first)


@pytest.mark.parametrize("pause", ["retract", pytest.param("wait", marks=pytest.mark.slow), "abort"])
def test_requests_in_flight_go_on_as_the_pause_says(served, pause):
    last = 6
    with Sender([served.server.url], pause=pause) as sender:
        sender.push(served.folders["a"], lora="policy")
        stream = Stream(served.asked("policy"))
        sender.push(served.folders["b"], lora="policy")
        after = served.ask("policy")
        tokens = stream.end()
    assert_same(after, served.ask("loaded-b"))
    if pause == "abort":
        assert len(tokens) < STREAMED
        return
    assert len(tokens) == STREAMED
    ended_with = "loaded-b" if pause == "retract" else "loaded-a"
    end = served.ask(ended_with, PROMPT + tokens[:-last], last)
    other = served.ask("loaded-a" if pause == "retract" else "loaded-b", PROMPT + tokens[:-last], last)
    assert end[0][0] == tokens[-last] or end[0] == tokens[-last:]
    assert other[0] != tokens[-last:]


@pytest.mark.parametrize("options", [{}, {"staging": "none"}], ids=str)
def test_a_push_of_the_weights_leaves_adapters_loaded(served, options, tmp_path):
    """Also one whose folder is gone: vLLM drops all adapters when it loads weights, and would read them again."""
    with Sender([served.server.url], **options) as sender:
        sender.push(models.load_reference(served.base))
        sender.push(served.folders["b"], lora="policy", version="kept")
        policy, loaded = served.ask("policy"), served.ask("loaded-a")
        away = shutil.move(served.folders["a"], tmp_path / "away")
        try:
            sender.push(models.load_reference(served.other), version="other")
            assert differ(served.ask("loaded-a"), loaded)
            sender.push(models.load_reference(served.base), version="base")
            assert_same(served.ask("loaded-a"), loaded)
        finally:
            shutil.move(away, served.folders["a"])
        assert_same(served.ask("policy"), policy)
        (status,) = sender.status().values()
        assert (status.version, status.adapters) == ("base", {"policy": "kept"})


def test_an_adapter_goes_back_to_the_one_before_and_forth(served, sender):
    sender.push(served.folders["a"], lora="policy", version="one")
    before = served.ask("base")
    sender.push(served.folders["b"], lora="policy", version="two")
    served.ask("loaded-a"), served.ask("loaded-b")  # which take the slot of the pushed one
    for version, name in (("one", "a"), ("two", "b"), ("one", "a")):
        served.ask("policy" if name == "a" else "base")
        assert sender.rollback(lora="policy").version == version
        assert_same(served.ask("policy"), served.ask(f"loaded-{name}"))
    assert_same(served.ask("base"), before)
    sender.push(models.load_reference(served.base))
    assert sender.rollback(lora="policy").version == "two"
    assert_same(served.ask("policy"), served.ask("loaded-b"))


def test_catch_up_brings_back_an_adapter_that_a_user_has_unloaded(served, sender):
    sender.push(served.folders["a"], lora="policy", version="one")
    post(served, "unload_lora_adapter", lora_name="policy")
    assert "policy" not in served.names()
    assert list(sender.catch_up()) == [served.server.url]
    (status,) = sender.status().values()
    assert status.adapters["policy"] == "one"
    assert_same(served.ask("policy"), served.ask("loaded-a"))
    assert sender.catch_up() == {}


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl"])
def test_kept_versions_of_the_weights_outlast_an_adapter(served, transport):
    with Sender([served.server.url], transport=transport, keep_previous=True) as sender:
        sender.push(models.load_reference(served.base), version="base")
        base = served.ask("base")
        sender.push(models.load_reference(served.other), version="other")
        sender.push(served.folders["a"], lora="policy")
        assert sender.rollback().version == "base"
        assert_same(served.ask("base"), base)
        assert_same(served.ask("policy"), served.ask("loaded-a"))


def test_an_adapter_is_pushed_in_the_background_and_expected_to_be_one(served, sender):
    sender.push(served.folders["a"], lora="policy", version="one")
    future = sender.push_async(served.folders["b"], lora="policy", version="two", expected="one")
    assert future.result().read == "copied"
    assert_same(served.ask("policy"), served.ask("loaded-b"))
    with pytest.raises(errors.WrongState, match="serves version 'two', and this push expects version 'one'"):
        sender.push(served.folders["a"], lora="policy", expected="one")
    assert sender.push(served.folders["a"], lora="second").version == "1"
    assert_same(served.ask("policy"), served.ask("loaded-b"))
    assert_same(served.ask("second"), served.ask("loaded-a"))


def test_a_name_that_the_engine_has_loaded_is_replaced(served, sender, tmp_path):
    folder = make_adapter(tmp_path / "mine", served.base, seed=1)
    load(served, "mine", folder)
    assert_same(served.ask("mine"), served.ask("loaded-a"))
    sender.push(served.folders["b"], lora="mine", version="pushed")
    assert_same(served.ask("mine"), served.ask("loaded-b"))
    (status,) = sender.status().values()
    assert status.adapters["mine"] == "pushed"
    post(served, "unload_lora_adapter", lora_name="mine")
    (status,) = sender.status().values()
    assert "mine" not in status.adapters
    load(served, "mine", folder)
    assert_same(served.ask("mine"), served.ask("loaded-a"))
    (status,) = sender.status().values()
    assert "mine" not in status.adapters
    sender.push(served.folders["b"], lora="mine")
    assert_same(served.ask("mine"), served.ask("loaded-b"))
    post(served, "unload_lora_adapter", lora_name="mine")
    sender.push(served.folders["b"], lora="mine")
    assert_same(served.ask("mine"), served.ask("loaded-b"))


def test_a_name_that_vllm_loads_in_place_is_the_folders(served, sender, tmp_path):
    if served.engine != "vllm":
        pytest.skip("vLLM alone loads an adapter in place of another")
    sender.push(served.folders["b"], lora="policy")
    folder = make_adapter(tmp_path / "mine", served.base, seed=1)
    post(served, "load_lora_adapter", lora_name="policy", lora_path=str(folder), load_inplace=True)
    assert_same(served.ask("policy"), served.ask("loaded-a"))
    (status,) = sender.status().values()
    assert "policy" not in status.adapters


def renamed(tensors):
    return {name.replace("q_proj", "z_proj"): value for name, value in tensors.items()}


def deeper(tensors):
    return {name.replace("layers.1.", "layers.7."): value for name, value in tensors.items()}


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"change": renamed}, "layers without LoRA in this engine: .*z_proj"),
        ({"change": deeper}, r"no rank loads .*layers\.7"),
        ({"rank": 32}, "rank 32 is greater than max_lora_rank 16"),
        ({"model": "qwen3_narrow"}, "belongs to another model"),
    ],
    ids=["target", "layer", "rank", "base"],
)
def test_bad_adapters_are_refused_by_name_and_nothing_changes(served, sender, model_folder, tmp_path, bad, named):
    sender.push(served.folders["a"], lora="policy", version="good")
    before = served.serves()
    other = dict(bad)
    model = model_folder(other.pop("model"), 0) if "model" in bad else served.base
    folder = make_adapter(tmp_path / "bad", model, seed=3, **other)
    with pytest.raises(errors.ManifestMismatch, match=named) as refused:
        sender.push(folder, lora="policy")
    assert refused.value.weights == "unchanged"
    assert served.serves() == before
    sender.push(served.folders["b"], lora="policy", version="next")
    assert_same(served.ask("policy"), served.ask("loaded-b"))


def test_the_name_of_the_base_model_is_refused(served, sender):
    before = served.serves()
    with pytest.raises(errors.UnsupportedOption, match="serves its base model by this name"):
        sender.push(served.folders["a"], lora=str(served.base))
    assert served.serves() == before


def test_a_rank_that_fails_in_the_commit_leaves_the_adapter_before(served, sender):
    sender.push(served.folders["a"], lora="policy", version="before")
    before = served.serves()
    for _ in range(2):
        order = {"point": "rank serves adapter", "where": {"rank": served.tp - 1}, "action": "raise"}
        served.fault.write_text(json.dumps(order))
        with pytest.raises(errors.ApplyFailed) as failed:
            sender.push(served.folders["b"], lora="policy", version="failed")
        assert failed.value.weights == "unchanged"
        assert served.serves() == before
    sender.push(served.folders["b"], lora="policy", version="after")
    assert_same(served.ask("policy"), served.ask("loaded-b"))


def test_an_adapter_that_cannot_go_back_is_served_no_more(served, sender):
    """Its ranks may hold different versions: nothing is answered with these, also what was in flight."""
    sender.push(served.folders["a"], lora="policy")
    base, stream = served.ask("base"), Stream(served.asked("policy"))
    order = {"point": "rank serves adapter", "where": {"rank": served.tp - 1}, "action": "raise", "times": 3}
    served.fault.write_text(json.dumps(order))
    with pytest.raises(errors.ApplyFailed) as failed:
        sender.push(served.folders["b"], lora="policy")
    assert failed.value.weights == "dirty"
    assert len(stream.end()) < STREAMED
    (status,) = sender.status().values()
    assert status.state == "dirty"
    with pytest.raises(errors.WrongState, match="push the weights first"):
        sender.push(served.folders["b"], lora="policy")
    sender.push(models.load_reference(served.base))
    said, (answer,) = served.serves()
    assert said[2:] == ("serving", [name for name in said[3] if name != "policy"])
    assert_same(answer, base)
    sender.push(served.folders["b"], lora="policy")
    assert_same(served.ask("policy"), served.ask("loaded-b"))


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl"])
def test_a_byte_that_changes_on_the_way_is_noticed_before_the_commit(served, transport):
    with Sender([served.server.url], transport=transport) as sender:
        sender.push(served.folders["a"], lora="policy", version="before")
        before = served.serves()
        order = {"point": "rank takes", "where": {"rank": served.tp - 1, "bucket": 0}, "action": "flip"}
        served.fault.write_text(json.dumps(order))
        with pytest.raises(errors.DigestMismatch) as failed:
            sender.push(served.folders["b"], lora="policy")
        assert failed.value.weights == "unchanged"
        assert served.serves() == before
        sender.push(served.folders["b"], lora="policy")
        assert_same(served.ask("policy"), served.ask("loaded-b"))


PROGRAM = """
import sys
from weightsync import Sender
with Sender([sys.argv[1]]) as sender:
    sender.push(sys.argv[2], lora="policy", version="killed")
"""


@pytest.mark.parametrize("point", ["rank connects", "rank serves adapter"])
def test_a_trainer_that_is_killed_leaves_one_version(served, sender, point):
    """Before the commit the one before; once that has begun, the new one, for it runs to its end."""
    sender.push(served.folders["a"], lora="policy", version="before")
    order = {"point": point, "where": {"rank": 0}, "action": "hold"}
    fired = served.fault.with_name("fault.fired")
    fired.unlink(missing_ok=True)  # of an earlier test
    served.fault.write_text(json.dumps(order))
    sender.close()
    command = [sys.executable, "-c", PROGRAM, served.server.url, str(served.folders["b"])]
    with subprocess.Popen(command, cwd=servers.ROOT) as trainer:
        wait_for(fired.exists)
        trainer.kill()
    fired.unlink()
    ends_with = "killed" if point == "rank serves adapter" else "before"

    def settled():
        with Sender([served.server.url]) as other:
            (status,) = other.status().values()
        return status.state == "serving" and status.adapters["policy"] == ends_with

    wait_for(settled)
    assert_same(served.ask("policy"), served.ask("loaded-b" if ends_with == "killed" else "loaded-a"))
    with Sender([served.server.url]) as other:
        other.push(served.folders["a"], lora="policy")
    assert_same(served.ask("policy"), served.ask("loaded-a"))


def wait_for(happened, patience_s=60):
    end = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_first_version_that_fails_is_not_served(served, sender):
    served.fault.write_text(json.dumps({"point": "rank serves adapter", "where": {"rank": 0}, "action": "raise"}))
    with pytest.raises(errors.ApplyFailed):
        sender.push(served.folders["b"], lora="never")
    assert "never" not in served.serves()[0][3]
    assert "never" not in served.serves()[0][1]


def test_tensors_are_those_of_the_push(served, sender, tmp_path):
    """A single stale tensor is heard in the answer."""
    sender.push(served.folders["a"], lora="policy")
    as_a = served.ask("policy")

    def one(tensors):
        name = "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight"
        return {**tensors, name: torch.randn(tensors[name].shape, generator=torch.Generator().manual_seed(9))}

    sender.push(make_adapter(tmp_path / "one", served.base, seed=1, change=one), lora="policy")
    assert differ(served.ask("policy"), as_a)
