"""Tensors that a loader skips silently: refused by name if every rank skips them and a parameter stays unwritten."""

import sys

import pytest
import requests
import torch

from tests.unit.loaders import AdapterOf, Model
from weightsync import Sender
from weightsync.cli import main
from weightsync.engine.coverage import check_read
from weightsync.engine.loading.loader import Loading
from weightsync.errors import ManifestMismatch, ManifestUnknown
from weightsync.tensors.layout import spec_of
from weightsync.testing import ReferenceEngine

LAYER = "model.layers.1.mlp"

#: An engine that wraps a layer, as LoRA does, and whose loader skips names that it does not find.
WRAPPED = f"""
import torch
from weightsync import testing
made, load = testing.ModelAdapter.__init__, testing.ModelAdapter.load
class Wrapped(torch.nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
    def forward(self, x):
        return self.base_layer(x)
def wrapped(self, *args):
    made(self, *args)
    mlp = self.model.get_submodule("{LAYER}")
    mlp.up_proj = Wrapped(mlp.up_proj)
def known_alone(self, weights):
    load(self, (pair for pair in weights if pair[0] in self.model.state_dict()))
testing.ModelAdapter.__init__, testing.ModelAdapter.load = wrapped, known_alone
testing.main()
"""


@pytest.fixture(scope="module")
def wrapped(model_folder):
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", WRAPPED)) as engine:
        yield engine


def test_an_engine_whose_loader_skips_a_layer_refuses_by_name_and_keeps_serving(wrapped, trained):
    with Sender([wrapped.url]) as sender:
        before = sender.status(digest=True)[wrapped.url].ranks[0].digest
        for _ in range(2):  # the second time the manifest is known
            with pytest.raises(ManifestMismatch) as raised:
                sender.push(trained)
            assert f"nothing is loaded into {LAYER}.up_proj.base_layer.weight" in str(raised.value)
            assert f"no rank loads {LAYER}.up_proj.weight" in str(raised.value)
            assert raised.value.engines == {wrapped.url: "unchanged"}
        assert requests.get(f"{wrapped.url}/health", timeout=10).status_code == 200
        assert sender.status(digest=True)[wrapped.url].ranks[0].digest == before


def test_status_reports_what_is_loaded_and_what_was_compared(engine, trained, capsys):
    with Sender([engine.url]) as sender:
        for _ in range(3):
            sender.push(trained)
        (rank,) = sender.status()[engine.url].ranks
        names = dict(trained.named_parameters())
        assert (rank.model.parameters, rank.model.written) == (len(names), len(names))
        assert (rank.model.unwritten, rank.model.unread_tensors, rank.model.pushes) == ((), 0, 2)
        assert [(one.what, one.fault) for one in rank.model.compared] == [
            ("what the engine loaded", ""),
            ("what the loader does", ""),
            ("what is in the model", ""),
        ]
        assert all(one.push for one in rank.model.compared)
    assert main(["status", engine.url]) == 0
    shown = capsys.readouterr().out
    assert f"{len(names)} of {len(names)} parameters are loaded; pushes loaded by this plan: 2" in shown
    assert "what the loader does matches the load plan: yes (push " in shown


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda w: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in w.items()},
            r"casts between.*tensor\.to\(torch\.bfloat16\)",
        ),
        (lambda w: {n: t for n, t in w.items() if ".1." not in n}, r"missing: model\.layers\.1\..*multi-token.*folder"),
    ],
)
def test_common_mistakes_are_refused_with_advice(engine, trained, change, said):
    with Sender([engine.url]) as sender:
        before = sender.status(digest=True)[engine.url].ranks[0].digest
        with pytest.raises(ManifestMismatch, match=said):
            sender.push(change(trained.state_dict()))
        assert sender.status(digest=True)[engine.url].ranks[0].digest == before


# --- what ranks read --------------------------------------------------------------------------------------------------


def skips(model, weights):
    """A loader that copies what it finds, only in part if the parameter is larger."""
    for name, tensor in weights:
        if name in model.state_dict():
            model.state_dict()[name][: len(tensor)].copy_(tensor)


def accepted(checkpoint, *parameters, load=skips):
    """The answers of ranks with these parameters to a push of the checkpoint that the engine was started with."""
    specs = tuple(spec_of(name, torch.zeros(shape)) for name, shape in checkpoint.items())
    found = []
    for shapes in parameters:
        model = Model({name.replace(".", "_"): torch.zeros(shape) for name, shape in shapes.items()})
        named = dict(zip((name.replace(".", "_") for name in shapes), shapes, strict=True))
        loading = Loading(AdapterOf(_Renamed(model, named), load, specs))
        loading.accept(specs)
        found.append(loading.accepted())
    return found, specs


class _Renamed(torch.nn.Module):
    """A module with parameters under dotted names, in nested modules."""

    def __init__(self, flat, names):
        super().__init__()
        for key, name in names.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, flat.get_parameter(key))


EXPERTS = {f"layers.0.experts.{number}.w": (4, 8) for number in range(4)} | {"layers.0.norm": (8,), "norm": (8,)}
NORMS = {"layers.0.norm": (8,), "norm": (8,)}


@pytest.mark.parametrize(
    ("checkpoint", "ranks"),
    [
        pytest.param({**NORMS, "layers.0.rotary.inv_freq": (64,)}, [NORMS], id="a table that nobody needs"),
        pytest.param(NORMS, [{**NORMS, "layers.0.bias": (8,)}], id="a parameter with a default"),
        pytest.param(
            {**NORMS, "layers.0.rotary.inv_freq": (64,)}, [{**NORMS, "layers.0.attn.k_scale": ()}], id="a scale of KV"
        ),
        pytest.param(
            {**NORMS, "layers.1.norm": (8,), "layers.1.eh_proj": (8, 16)},
            [{**NORMS, "layers.0.bias": (8,)}],
            id="a layer for prediction that the engine skips",
        ),
        pytest.param(
            {"layers.0.norm": (8,), "layers.1.norm": (8,)},
            [{"layers.0.norm": (8,), "layers.0.bias": (8,)}, {"layers.1.norm": (8,)}],
            id="pipeline stages",
        ),
        pytest.param(
            EXPERTS,
            [
                {**NORMS, "layers.0.experts.0.w": (4, 8), "layers.0.experts.1.w": (4, 8)},
                {**NORMS, "layers.0.experts.2.w": (5, 8), "layers.0.experts.3.w": (4, 8)},
            ],
            id="experts on two ranks, one padded",
        ),
    ],
)
def test_unneeded_tensors_and_parameters_with_defaults_are_accepted(checkpoint, ranks):
    found, specs = accepted(checkpoint, *ranks)
    check_read(found, specs)


@pytest.mark.parametrize(
    ("checkpoint", "ranks", "unwritten", "unread"),
    [
        pytest.param(
            EXPERTS,
            [{**NORMS, "layers.0.experts.base_layer.w13": (4, 8, 8)}] * 2,
            r"layers\.0\.experts\.base_layer",
            r"layers\.0\.experts\.0\.w, layers\.0\.experts\.1\.w, layers\.0\.experts\.2\.w, layers\.0\.experts\.3\.w:",
            id="experts under another name on every rank",
        ),
        pytest.param(
            {"layers.0.norm": (8,), "layers.1.norm": (8,)},
            [{"layers.0.norm": (8,)}, {"layers.1.base_layer.norm": (8,)}],
            r"layers\.1\.base_layer\.norm",
            r"layers\.1\.norm:",
            id="on one stage of a pipeline",
        ),
        pytest.param({"norm": (8,)}, [{"base_layer.norm": (8,)}], r"base_layer\.norm", "norm:", id="in no layer"),
    ],
)
def test_a_tensor_that_every_rank_skips_is_refused_if_its_parameter_stays_unwritten(
    checkpoint, ranks, unwritten, unread
):
    found, specs = accepted(checkpoint, *ranks)
    with pytest.raises(ManifestMismatch, match=f"loaded into {unwritten}.*no rank loads {unread}"):
        check_read(found, specs)
    with pytest.raises(ManifestUnknown):
        check_read(found)


def test_a_skipped_part_of_a_fused_parameter_is_detected():
    checkpoint = {"layers.0.q": (4, 8), "layers.0.k": (2, 8), "layers.0.inv_freq": (8,)}

    def load(model, weights):
        fused = model.get_parameter("layers.0.qkv").data
        for name, tensor in weights:
            if name == "layers.0.q":
                fused[:4].copy_(tensor)

    found, specs = accepted(checkpoint, {"layers.0.qkv": (6, 8)}, load=load)
    with pytest.raises(ManifestMismatch, match=r"into layers\.0\.qkv, or not into all of it, .*no rank loads .*\.k:"):
        check_read(found, specs)


def test_a_rank_that_cannot_be_recorded_counts_as_reading_everything():
    checkpoint = {"layers.0.norm": (8,)}
    found, specs = accepted(checkpoint, {"layers.0.base_layer.norm": (8,)})
    blind = Loading(AdapterOf(Model({"norm": torch.zeros(8)}), lambda model, weights: 1 / 0, specs))
    blind.accept(specs)
    check_read([*found, blind.accepted()], specs)
