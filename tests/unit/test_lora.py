"""Adapters as they are read from folders, and what refuses them before anything crosses."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from msgspec import UNSET, structs

from tests.lora.adapters import ALPHA, RANK, TARGETS, make_adapter
from weightsync import Sender, errors
from weightsync.engine.engine_front_end import addressed
from weightsync.protocol import http
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import LoraSpec
from weightsync.sources.lora import open_lora
from weightsync.testing import ReferenceEngine
from weightsync.trainer import lora_plan


@pytest.fixture
def model(model_folder):
    return model_folder("llama", 0)


def test_a_folder_of_peft_is_read_under_the_names_of_its_checkpoint(model, tmp_path):
    source = open_lora(make_adapter(tmp_path, model, seed=1), "policy")
    assert source.adapter == LoraSpec("policy", RANK, ALPHA)
    assert len(source.specs) == 2 * 2 * len(TARGETS)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    assert TensorSpec(name, "float32", (RANK, 256)) in source.specs
    assert source.weights["model.layers.1.mlp.down_proj"] == (128, 256)
    assert all(spec.shape == tuple(tensor.shape) for spec, tensor in zip(source.specs, source.tensors(), strict=True))


def test_scaling_and_ranks_of_single_layers_are_read(model, tmp_path):
    said = {"use_rslora": True, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 3.5}}

    def narrower(tensors):
        return {
            name: (value[:4] if "lora_A" in name else value[:, :4]).contiguous() if "q_proj" in name else value
            for name, value in tensors.items()
        }

    source = open_lora(make_adapter(tmp_path, model, seed=1, change=narrower, **said), "policy")
    assert source.adapter == LoraSpec("policy", RANK, ALPHA, True, {"q_proj": 4}, {"q_proj": 3.5})


REFUSED = {
    "use_dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "bias='lora_only'": {"bias": "lora_only"},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "of the kind IA3": {"peft_type": "IA3"},
    "configuration that cannot be read": {"r": 0},
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_more_than_lora_is_refused_by_name(model, tmp_path, named):
    with pytest.raises(errors.SourceError, match=named):
        open_lora(make_adapter(tmp_path, model, seed=1, **REFUSED[named]), "policy")


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
BROKEN = {
    "q_proj has .lora_A.weight": lambda tensors: {
        name: value for name, value in tensors.items() if name != f"{LAYER}.lora_B.weight"
    },
    "do not belong to rank 8": lambda tensors: {**tensors, f"{LAYER}.lora_A.weight": torch.zeros(4, 128)},
    "embed_tokens.weight is no tensor": lambda tensors: {**tensors, "embed_tokens.weight": torch.zeros(4, 128)},
}


@pytest.mark.parametrize("named", BROKEN)
def test_tensors_that_make_no_adapter_are_refused_by_name(model, tmp_path, named):
    with pytest.raises(errors.SourceError, match=named):
        open_lora(make_adapter(tmp_path, model, seed=1, change=BROKEN[named]), "policy")


def test_what_holds_no_adapter_is_refused(model, tmp_path):
    with pytest.raises(errors.SourceError, match=r"no adapter that PEFT has written.*adapter_config.json"):
        open_lora(model, "policy")
    with pytest.raises(errors.SourceError, match="push a PEFT model, or a folder"):
        open_lora({}, "policy")
    folder = make_adapter(tmp_path, model, seed=1)
    with pytest.raises(errors.UnsupportedOption, match="no name of a model"):
        open_lora(folder, "")
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(errors.SourceError, match="of the kind None"):
        open_lora(folder, "policy")


def test_an_adapter_of_another_model_is_refused_by_the_engine_s_list(model, tmp_path):
    source = open_lora(make_adapter(tmp_path, model, seed=1, targets=["q_proj"]), "policy")
    layers = [f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2)]

    def reply(*shapes):
        specs = (TensorSpec(name, "bfloat16", shape) for name, shape in zip(layers, shapes, strict=False))
        return {"http://engine": ExpectedReply(tuple(specs))}

    lora_plan.check(source, reply((128, 128), (128, 128)))
    lora_plan.check(source, reply())
    with pytest.raises(errors.ManifestMismatch, match=r"another model than http://engine.*layers\.1.*\[256, 128\]"):
        lora_plan.check(source, reply((128, 128), (256, 128)))


def test_an_engine_without_lora_refuses_and_serves_what_it_served(model, tmp_path):
    folder = make_adapter(tmp_path, model, seed=1)
    without = "testing.ReferenceLora = lambda: 'the reference engine has no LoRA'"
    launched = f"from weightsync import testing; {without}; testing.main()"
    with ReferenceEngine(model, launcher=(sys.executable, "-c", launched)) as engine, Sender([engine.url]) as sender:
        sender.push(model, version="base")
        for call in (sender.push, lambda *args, **more: sender.push_async(*args, **more).result()):
            with pytest.raises(errors.UnsupportedOption, match="the reference engine has no LoRA") as refused:
                call(folder, lora="policy")
            assert refused.value.weights == "unchanged"
        with pytest.raises(errors.UnsupportedOption, match="allow_missing is for weights"):
            sender.push(folder, lora="policy", allow_missing=["x"])
        assert sender.status()[engine.url].version == "base"
        assert sender.push(model).version == "1"


def test_an_engine_that_does_not_generate_takes_weights_first():
    asked = http.UpdateRequest("p", "a", "s", 512, 1.0, (), adapter=LoraSpec("policy", RANK, ALPHA))
    front = SimpleNamespace(engine="vllm", lora=SimpleNamespace(number=lambda name: 3, versions={}))
    assert addressed(asked, front, "").adapter.number == 3
    with pytest.raises(errors.WrongState, match=r"does not generate \(it waits\); push the weights first"):
        addressed(asked, front, "it waits")
    weights = structs.replace(asked, adapter=UNSET)
    assert addressed(weights, front, "it waits") is weights


def test_an_engine_of_an_earlier_release_is_not_asked(model, tmp_path):
    folder = make_adapter(tmp_path, model, seed=1)
    launched = "from weightsync import testing; testing.http.PROTOCOL = (1, 6); testing.main()"
    with ReferenceEngine(model, launcher=(sys.executable, "-c", launched)) as engine, Sender([engine.url]) as sender:  # noqa: SIM117
        with pytest.raises(errors.UnsupportedOption, match="takes no adapters; update it"):
            sender.push(folder, lora="policy")
