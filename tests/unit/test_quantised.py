"""Engines of quantised checkpoints: a trainer's weights are quantised on the way out, as the checkpoint is."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers import keen
from tests.unit.quantised import CONFIGS, FINE, Adapter, Engine, compressed, format_of, made, same
from weightsync import Sender
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.errors import ManifestMismatch, SourceError
from weightsync.protocol.expected import ExpectedReply
from weightsync.tensors.layout import spec_of
from weightsync.trainer.fit import fit

NORM, ROUTER, BIAS = "model.norm.weight", "layers.0.gate.weight", "layers.0.q.bias"
SMALL, LARGE, EXPERTS = QUANTISED = "layers.0.q.weight", "layers.0.up.weight", "layers.0.experts.gate_up"
#: As buckets of a large model cut it.
NARROW = 24 << 10


def weights(dtype, seed=0):
    """A trainer's weights: of those that are `QUANTISED` a part is zero."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {NORM: (256,), ROUTER: (8, 256), BIAS: (192,), SMALL: (192, 256), LARGE: (2304, 512)}
    shapes[EXPERTS] = (4, 200, 512)
    found = {name: torch.randn(shape, generator=generator).mul(0.05).to(dtype) for name, shape in shapes.items()}
    found[SMALL][:128, :128] = found[LARGE][300:301] = found[EXPERTS][1, :128, :128] = found[EXPERTS][2] = 0
    found[SMALL][128:130] = -0.0
    return found


def checkpoint(config, tensors, work=""):
    """What an engine of this configuration should hold; scales in the dtype ``work``, or one that is usual for it.

    The router is in float32, and what else is not quantised in bfloat16.
    """
    work = work or ("float8_e8m0fnu" if "scale_fmt" in config else "bfloat16")
    how, found = format_of(config, work), {}
    for name, tensor in tensors.items():
        dtype = torch.float32 if name == ROUTER else torch.bfloat16
        found |= made(how, name, tensor) if name in QUANTISED else {name: tensor.to(dtype, copy=True)}
    scales = {name + how.names[1] for name in QUANTISED}
    return {name: tensor.to(getattr(torch, work)) if name in scales else tensor for name, tensor in found.items()}


@contextlib.contextmanager
def serving(config, sealed=False, says=None, **changed):
    """An engine of this configuration, or that ``says`` it is another; tensors of its checkpoint may be ``changed``."""
    tensors = {**checkpoint(config, weights(torch.bfloat16, seed=1)), **changed}
    engine = Engine({name: tensor for name, tensor in tensors.items() if tensor is not None}, says or config, sealed)
    try:
        yield engine
    finally:
        engine.close()


def differing(engine, wanted):
    assert engine.served.keys() == wanted.keys()
    return [name for name, tensor in wanted.items() if not same(engine.served[name], tensor)]


# --- pushes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", CONFIGS)
def test_an_engine_gets_what_its_checkpoint_would_hold(config, dtype):
    tensors = weights(dtype)
    with serving(CONFIGS[config]) as engine, Sender([engine]) as sender:
        for _ in range(4):  # by the loader, then by the load plan, then packed by a plan too
            tensors[NORM].add_(1)
            tensors[LARGE].mul_(1.01)
            result = sender.push(tensors)
            assert (result.quantised, result.not_finite) == (3, 0)
            assert result.cast == (1 if dtype is torch.bfloat16 else 2)  # the router; or the norm and the bias
            assert differing(engine, checkpoint(CONFIGS[config], tensors)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"bucket_bytes": NARROW},
        {"verify": "off"},
        {"verify": "deep"},
        {"staging": "none"},
        {"transport": "nixl"},
        {"keep_previous": True},
    ],
)
@pytest.mark.parametrize("sealed", [False, True])
def test_every_way_of_the_bytes(options, sealed):
    config, tensors = CONFIGS["fp8, channel"], weights(torch.float32)
    with serving(config, sealed) as engine, Sender([engine], **options) as sender:
        for _ in range(3):
            tensors[SMALL].mul_(1.01)
            assert sender.push(tensors).quantised == 3
            assert differing(engine, checkpoint(config, tensors)) == []


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": NARROW}])
def test_tensors_of_an_iterator_are_quantised_as_they_come(options):
    config = CONFIGS["fine-grained"]
    with serving(config) as engine, Sender([engine], **options) as sender:
        for seed in range(2):
            tensors = weights(torch.float32, seed)
            result = sender.push(iter(reversed(tensors.items())))
            assert (result.quantised, result.cast) == (3, 2)
            assert differing(engine, checkpoint(config, tensors)) == []
        twice = [*tensors.items(), (SMALL + "_scale_inv", engine.served[SMALL + "_scale_inv"])]
        with pytest.raises(SourceError, match=rf"yielded {SMALL}_scale_inv twice"):
            sender.push(iter(twice))


def test_a_trainer_may_push_in_inference_mode():
    """Several tensors are large enough for threads, which are not in that mode."""
    names = [f"layers.{number}.up.weight" for number in range(3)]
    tensors = {name: weights(torch.float32, seed)[LARGE] for seed, name in enumerate(names)}
    how = format_of(FINE)
    made_of = lambda: {key: t for name in names for key, t in made(how, name, tensors[name]).items()}  # noqa: E731
    engine = Engine(made_of(), FINE)
    with torch.inference_mode(), Sender([engine]) as sender:
        for _ in range(5):
            sender.push(tensors)
            assert differing(engine, made_of()) == []
    engine.close()


def test_a_push_in_the_background_is_quantised_before_the_trainer_goes_on():
    config, tensors = CONFIGS["fine-grained"], weights(torch.bfloat16)
    wanted = checkpoint(config, tensors)
    with serving(config) as engine, Sender([engine]) as sender:
        future = sender.push_async(tensors)
        for tensor in tensors.values():
            tensor.zero_()
        assert future.result().quantised == 3
        assert differing(engine, wanted) == []


@pytest.mark.parametrize("verify", ["digest", "deep"])
def test_a_delta_is_of_the_quantised_bytes(verify):
    """Where the trainer's weights change by less than a bit of these, nothing crosses."""
    config, tensors = CONFIGS["fp8, channel"], weights(torch.float32)
    tensors[SMALL] = tensors[SMALL].bfloat16().float()  # the dtype of the scales, to which weights are rounded
    with keen(), serving(config) as engine, Sender([engine], transport="nixl", verify=verify) as sender:
        assert sender.push(tensors).delta is None
        for row in range(2):
            before = checkpoint(config, tensors)
            tensors[SMALL].mul_(1 + 2**-20)
            tensors[LARGE][row, :4] = 0
            wanted = checkpoint(config, tensors)
            assert [name for name in wanted if not same(before[name], wanted[name])] == [LARGE]
            result = sender.push(tensors)
            assert (result.delta.changed, result.delta.whole, result.delta.same) == (1, 0, len(wanted) - 1)
            assert result.delta.nbytes < result.nbytes / 100
            assert (result.quantised, result.verify) == (3, verify)
            assert differing(engine, wanted) == []


def test_a_quantised_checkpoint_is_pushed_as_it_is():
    config, tensors = CONFIGS["int4, group"], weights(torch.bfloat16)
    with serving(config) as engine, Sender([engine]) as sender:
        assert sender.push(checkpoint(config, tensors)).quantised == 0
        assert differing(engine, checkpoint(config, tensors)) == []


def test_a_scale_has_the_dtype_of_its_parameter_if_it_is_only_copied_there():
    """The checkpoint has the scales in bfloat16, and the engine keeps them in float32, as vLLM does."""
    config, tensors = CONFIGS["fine-grained"], weights(torch.bfloat16)
    with serving(config) as engine:
        for name, scales in engine.model.named_buffers():
            if name.endswith("_scale_inv"):
                scales.data = scales.float()
        with Sender([engine]) as sender:
            sender.push(tensors)
        assert differing(engine, checkpoint(config, tensors, work="float32")) == []


def test_a_layer_that_the_trainer_lacks_stays_as_the_engine_has_it():
    config, tensors = CONFIGS["fp8, channel"], weights(torch.bfloat16)
    with serving(config) as engine, Sender([engine]) as sender:
        sender.push(tensors)
        before = tensors.pop(SMALL)
        tensors[LARGE] *= 2
        assert sender.push(tensors, allow_missing=["layers.0.q.*"]).kept == (SMALL, SMALL + "_scale")
        assert differing(engine, checkpoint(config, {**tensors, SMALL: before})) == []


def test_scales_of_activations_stay_as_the_engine_has_them():
    config, tensors, scale = CONFIGS["fp8, channel"], weights(torch.bfloat16), "layers.0.q.input_scale"
    with serving(config, **{scale: torch.ones(1)}) as engine, Sender([engine]) as sender:
        with pytest.raises(ManifestMismatch, match=rf"missing: {scale}"):
            sender.push(tensors)
        assert sender.push(tensors, allow_missing=["*.input_scale"]).kept == (scale,)
        assert differing(engine, {**checkpoint(config, tensors), scale: torch.zeros(1)}) == []


def test_what_is_not_finite_is_counted_and_what_would_become_infinite_is_refused_by_name():
    config, tensors = CONFIGS["fp8, channel"], weights(torch.float32)
    half = {name + "_scale": checkpoint(config, tensors, "float16")[name + "_scale"] for name in QUANTISED}
    with serving(config, **half) as engine, Sender([engine]) as sender:
        for _ in range(3):
            sender.push(tensors)
        before = {name: tensor.clone() for name, tensor in engine.served.items()}
        tensors[LARGE][7, 7] = 1e5
        with pytest.raises(
            SourceError, match=rf"{LARGE}: 1 finite values, up to 100000, would be infinite in torch.fl"
        ):
            sender.push(tensors)
        assert differing(engine, before) == []
        tensors[LARGE][7, 7:9] = torch.tensor([torch.inf, torch.nan])
        assert sender.push(tensors).not_finite == 2


# --- what is refused, before a byte is sent


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
SCALE = torch.zeros(2, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (
            FINE,
            {SMALL + "_scale_inv": None},
            rf"{SMALL} cannot be .*: its checkpoint has no {SMALL}_scale_inv, which be",
        ),
        (FINE, {SMALL + "_scale_inv": SCALE[:1]}, rf"{SMALL}_scale_inv has shape \[1, 2\], and \[2, 2\] in fp8, with"),
        ({**FINE, "weight_block_size": [64, 64]}, {}, r"_scale_inv has shape \[2, 2\], and \[3, 4\] in .*64 x 64"),
        (FINE, {SMALL + "_scale_inv": SCALE.half()}, rf"{SMALL}_scale_inv is float16, which does not belong to fp8"),
        ({**FINE, "weight_block_size": None}, {}, "fp8 is known as e4m3, and with weight_block_size"),
        ({**FINE, "scale_fmt": "other"}, {}, "fp8 other of float 8 is not known"),
        (CONFIGS["int8, channel"], {}, rf"{SMALL} is float8_e4m3fn, which does not belong to compressed-tensors int-q"),
        (compressed("float-quantized", "float", 8, "token"), {}, "is not known with its strategy"),
        (compressed("float-quantized", "float", 8, "channel", symmetric=False), {}, "known with symmetric weights"),
        (compressed("float-quantized", "float", 8, "channel", actorder="group"), {}, "groups in the order of columns"),
        (AWQ, {}, "awq is calibrated: its values do not follow from the weights alone; push what its checkpoint has"),
        ({**AWQ, "quant_method": "gptq"}, {}, "gptq is calibrated"),
        ({"quant_method": "unheard_of"}, {}, "quant_method unheard_of is not known"),
        ({**CONFIGS["fp8, channel"], "transform_config": {"config_groups": {"r": {}}}}, {}, "rotated or pruned before"),
        (
            {**CONFIGS["fp8, channel"], "sparsity_config": {"format": "sparse-24-bitmask"}},
            {},
            "rotated or pruned before",
        ),
        ({**FINE, "weight_block_size": "128"}, {}, "quantization_config cannot be read"),
        ({**FINE, "weight_block_size": [0, 128]}, {}, "quantization_config cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(config, changed, said):
    with serving(FINE, says=config, **changed) as engine, Sender([engine]) as sender:
        with pytest.raises(ManifestMismatch, match=said) as raised:
            sender.push(weights(torch.bfloat16))
        assert all(not tensor.float().any() for tensor in engine.served.values())
    assert raised.value.engines in (None, {}, {next(iter(raised.value.engines)): "unchanged"})


def test_names_of_a_calibrated_checkpoint_are_refused_with_its_method():
    tensors = {"layers.0.q.qweight": torch.zeros(4, 4, dtype=torch.int32), NORM: torch.zeros(4)}
    reply = ExpectedReply(tuple(spec_of(*each) for each in tensors.items()), quantization=AWQ)
    with pytest.raises(
        ManifestMismatch, match=rf"{SMALL} cannot be quantised as http://a expects it: awq is calibrated"
    ):
        fit([spec_of(SMALL, torch.zeros(4, 32))], {"http://a": reply})


def test_a_shape_that_cannot_be_divided_is_refused():
    tensors = {SMALL + "_packed": torch.zeros(8, 16, dtype=torch.int32)}
    reply = ExpectedReply(tuple(spec_of(*each) for each in tensors.items()), quantization=CONFIGS["int4, group"])
    with pytest.raises(ManifestMismatch, match=rf"{SMALL} \[8, 130\] cannot be quantised to compressed-tensors pack"):
        fit([spec_of(SMALL, torch.zeros(8, 130))], {"http://a": reply})


def test_a_tensor_that_a_calibrated_checkpoint_has_nothing_of_is_unknown_and_not_calibrated():
    tensors = {"layers.0.q.qweight": torch.zeros(4, 4, dtype=torch.int32), NORM: torch.zeros(4)}
    reply = ExpectedReply(tuple(spec_of(*each) for each in tensors.items()), quantization=AWQ)
    pushed = [spec_of("extra.weight", torch.zeros(4, 32)), spec_of("layers.0.q.bias", torch.zeros(4))]
    assert fit(pushed, {"http://a": reply}).manifest == tuple(pushed)


def test_experts_of_three_dimensions_have_a_shape_of_three_sizes():
    shape = format_of(CONFIGS["int4, group"]).made_of(spec_of("experts", torch.zeros(2, 8, 128)))[2]
    assert (shape.name, shape.shape) == ("experts_shape", (3,))


def test_a_scale_that_the_push_makes_may_not_be_pushed_too():
    tensors = weights(torch.bfloat16)
    with serving(FINE) as engine, Sender([engine]) as sender:
        tensors[SMALL + "_scale_inv"] = SCALE
        with pytest.raises(
            ManifestMismatch, match=rf"{SMALL}_scale_inv: a push makes these of the weights; leave them"
        ):
            sender.push(tensors)


@pytest.mark.parametrize("config", ["fine-grained", "int4, group"])
def test_a_draft_is_not_quantised_but_refused_by_name(config):
    tensors = weights(torch.bfloat16)
    draft = checkpoint(CONFIGS[config], tensors)
    engine = Engine(tensors, None, draft=Adapter(draft, CONFIGS[config]))
    with contextlib.closing(engine), Sender([engine]) as sender:
        with pytest.raises(ManifestMismatch, match=rf"draft:{SMALL}: the draft .*is quantised, .* in bfloat16"):
            sender.push(tensors, draft=tensors)
        assert not any(tensor.float().any() for tensor in engine.served.values())
        assert sender.push(tensors, draft=draft).quantised == 0
        assert differing(engine, tensors) == []
        drafted = engine.draft.state_dict()
        assert all(same(drafted[name], tensor) for name, tensor in draft.items())


def test_engines_of_other_formats_take_a_sender_each():
    tensors = weights(torch.bfloat16)
    with serving(FINE) as one, serving(CONFIGS["fp8, channel"]) as other, Sender([one, other]) as sender:
        for pushed in (tensors, iter(tensors.items())):
            with pytest.raises(ManifestMismatch, match="push to them with one sender each"):
                sender.push(pushed)


def test_the_configuration_is_read_where_the_checkpoint_is(tmp_path):
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert expected_of(str(tmp_path), None, "bfloat16").quantization is None
    told = {**FINE, "modules_to_not_convert": ["lm_head"], "ignore": ["a"]}
    for config in ({"quantization_config": told}, {"text_config": {"quantization_config": told}}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert expected_of(str(tmp_path), None, "bfloat16").quantization == FINE
