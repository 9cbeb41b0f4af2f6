"""Tensors in other floating-point dtypes than the engine's: cast on the way out, verified after it."""

import math

import pytest
import torch

from tests.helpers import served_digest
from tools import models
from weightsync import Sender
from weightsync.errors import ManifestMismatch, SourceError
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.casting import cast
from weightsync.tensors.conversion import Conversion
from weightsync.tensors.layout import CASTABLE, DTYPES, Layout, digest_of, spec_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.testing import ReferenceEngine
from weightsync.trainer.fit import fit
from weightsync.trainer.pack_plan import pack_plan
from weightsync.trainer.packing import Packer

NARROW = 1 << 12
NORM = "model.norm.weight"


@pytest.fixture
def masters(trained):
    """The trained weights in float32, none of which bfloat16 holds exactly."""
    return {name: tensor.float() * 1.001 for name, tensor in trained.state_dict().items()}


def rounded(weights):
    return digest_of((name, tensor.to(torch.bfloat16)) for name, tensor in weights.items())


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": NARROW}, {"verify": "off"}, {"staging": "none"}])
def test_float32_masters_are_cast_and_arrive_as_the_engine_holds_them(engine, masters, options):
    with Sender([engine.url], **options) as sender:
        for _ in range(4):  # the first by the loader, then by the load plan, then packed by a plan too
            masters[NORM].add_(1)
            result = sender.push(masters)
            assert (result.cast, result.not_finite) == (len(masters), 0)
            assert result.nbytes == 2 * sum(tensor.numel() for tensor in masters.values())
            assert served_digest(engine) == rounded(masters)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_they_are_cast_over_every_transport(engine, masters, transport):
    with Sender([engine.url], transport=transport) as sender:
        for _ in range(3):
            masters[NORM].add_(1)
            assert sender.push(masters).cast == len(masters)
            assert served_digest(engine) == rounded(masters)


def test_a_module_in_float32_is_cast_and_one_in_the_engines_dtype_is_not(engine, trained, model_folder):
    module = models.load_reference(model_folder("llama", 0)).float()
    with Sender([engine.url]) as sender:
        for _ in range(3):
            with torch.no_grad():
                module.get_parameter(NORM).mul_(1.01)
            assert sender.push(module).cast == len(module.state_dict())
            assert served_digest(engine) == rounded(module.state_dict())
        assert sender.push(trained).cast == 0
    assert served_digest(engine) == digest_of(trained.state_dict().items())


def test_dtypes_may_be_mixed(engine, masters):
    for name, dtype in zip(masters, [torch.float64, torch.bfloat16, torch.float16] * len(masters), strict=False):
        masters[name] = masters[name].to(dtype)
    with Sender([engine.url], verify="deep") as sender:
        for _ in range(3):
            result = sender.push(masters)
            assert result.cast == sum(tensor.dtype is not torch.bfloat16 for tensor in masters.values())
            assert served_digest(engine) == rounded(masters)


def test_strided_tensors_are_cast(engine, masters):
    strided = {name: torch.stack([t, t], -1)[..., 0] for name, t in masters.items()}
    with Sender([engine.url], bucket_bytes=NARROW) as sender:
        for _ in range(3):
            sender.push(strided)
            assert served_digest(engine) == rounded(masters)


def test_inf_and_nan_cross_as_they_are_and_are_counted(engine, masters):
    masters[NORM].view(-1)[:3] = torch.tensor([math.inf, -math.inf, math.nan])
    with Sender([engine.url]) as sender:
        for _ in range(3):
            assert sender.push(masters).not_finite == 3
            assert served_digest(engine) == rounded(masters)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": NARROW}])
def test_a_cast_that_makes_a_finite_value_infinite_is_refused_by_name(model_folder, tmp_path, options):
    half = models.make_model(tmp_path / "half", "llama", dtype=torch.float16)
    weights = {name: tensor.float() for name, tensor in models.load_reference(half).state_dict().items()}
    with ReferenceEngine(half) as engine, Sender([engine.url], **options) as sender:
        for _ in range(3):
            sender.push(weights)
        before = served_digest(engine)
        kept, weights[NORM] = weights[NORM], weights[NORM].clone()
        weights[NORM][0], weights[NORM][1] = 70000.0, math.inf
        with pytest.raises(SourceError, match=rf"{NORM}: 1 finite values, up to 70000, would be infinite in") as raised:
            sender.push(weights)
        assert raised.value.engines == {engine.url: "unchanged"}
        assert served_digest(engine) == before
        weights[NORM] = kept
        sender.push(weights)


def test_what_is_cast_follows_the_parameter_where_the_checkpoint_is_in_another_dtype(model_folder, masters, tmp_path):
    """The engine was started from a checkpoint in float32, and holds its weights in bfloat16."""
    folder = models.make_model(tmp_path / "wide", "llama", dtype=torch.float32)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    with ReferenceEngine(folder) as engine, Sender([engine.url]) as sender:
        for _ in range(3):
            result = sender.push(masters)
            assert (result.cast, result.nbytes) == (len(masters), 2 * sum(t.numel() for t in masters.values()))
            assert served_digest(engine) == rounded(masters)
        sender.push({name: tensor.bfloat16() for name, tensor in masters.items()})
        assert served_digest(engine) == rounded(masters)
        with pytest.raises(ManifestMismatch, match="wrong dtype"):
            sender.push({name: tensor.to(torch.float8_e5m2) for name, tensor in masters.items()})


def test_an_engine_of_an_earlier_release_is_not_asked(engine, masters, monkeypatch):
    monkeypatch.setattr("weightsync.trainer.engines.SINCE_MINOR", 99)
    with Sender([engine.url]) as sender, pytest.raises(ManifestMismatch, match="wrong dtype"):
        sender.push(masters)


# --- which dtype


def expected(*specs, served=None):
    return ExpectedReply(tuple(TensorSpec(name, dtype, (2,)) for name, dtype in specs), served=served or {})


def planned(dtype, *engines):
    found = fit([TensorSpec("w", dtype, (2,))], {f"http://{at}": engine for at, engine in enumerate(engines)})
    return found.manifest[0].dtype, {at: DTYPES[each.source.dtype] for at, each in found.conversions.items()}


@pytest.mark.parametrize("dtype", sorted(CASTABLE - {"bfloat16"}))
def test_a_tensor_is_cast_to_what_the_checkpoint_has(dtype):
    assert planned(dtype, expected(("w", "bfloat16"))) == ("bfloat16", {0: DTYPES[dtype]})


def test_a_tensor_is_cast_to_what_the_parameter_has_unless_the_loader_only_widens_it():
    wide, narrow = {"w": "float32"}, {"w": "bfloat16"}
    assert planned("float32", expected(("w", "float32"), served=narrow)) == ("bfloat16", {0: torch.float32})
    assert planned("bfloat16", expected(("w", "float32"), served=narrow)) == ("bfloat16", {})
    assert planned("bfloat16", expected(("w", "bfloat16"), served=wide)) == ("bfloat16", {})
    assert planned("float32", expected(("w", "bfloat16"), served=wide)) == ("float32", {})
    assert planned("float16", expected(("w", "bfloat16"), served=wide)) == ("float32", {0: torch.float16})


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "uint8"])
def test_other_dtypes_are_left_to_the_engine_to_refuse(dtype):
    assert planned(dtype, expected(("w", "bfloat16"))) == (dtype, {})
    assert planned("bfloat16", expected(("w", dtype))) == ("bfloat16", {})
    assert planned("bfloat16", expected(("other", "float32"))) == ("bfloat16", {})


def test_engines_that_need_different_dtypes_are_named():
    assert planned("float32", expected(), expected(("w", "bfloat16"))) == ("bfloat16", {0: torch.float32})
    with pytest.raises(ManifestMismatch, match=r"http://0 and http://1 need.*w \(bfloat16 and float16\)"):
        planned("float32", expected(("w", "bfloat16")), expected(("w", "float16")))


# --- packing


@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("bucket_bytes", [1 << 16, 1 << 22])
def test_packing_again_by_a_plan_gives_the_same_bytes_and_digests(wide, bucket_bytes):
    torch.manual_seed(0)
    tensors = [torch.randn(size, dtype=dtype) for size in (0, 7, 40_000, 700_001) for dtype in (wide, torch.bfloat16)]
    tensors[4][5] = math.nan
    layout = Layout([spec_of(str(at), tensor.to(torch.bfloat16)) for at, tensor in enumerate(tensors)])
    conversions = {at: Conversion(spec_of(str(at), t)) for at, t in enumerate(tensors) if t.dtype is not torch.bfloat16}
    slots = layout.buckets(bucket_bytes)
    arenas = [torch.zeros(slots * bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    demand = Wanted([Subset(layout, {})])
    how = [bucket_bytes, slots, "xxh3_64", demand]
    plan = pack_plan(layout, arenas[1], *how, [tensor.data_ptr() for tensor in tensors], conversions)
    for turn in range(2):
        packer = Packer(layout, arenas[0], *how, conversions)
        for one, other in zip(packer.fill(tensors, id), plan.fill(id), strict=True):
            assert (one.number, one.nbytes) == (other.number, other.nbytes)
            assert all(one.digests.get(name, ()) == other.digests.get(name, ()) for name in demand.names)
        assert torch.equal(*arenas)
        assert packer.not_finite == plan.not_finite == 1
        for entry, tensor in zip(layout.entries, tensors, strict=True):
            found, want = entry.view(arenas[0]), tensor.to(torch.bfloat16)
            assert torch.equal(found.nan_to_num(7), want.nan_to_num(7)), turn
            tensor.add_(1)


def test_values_that_only_sum_to_infinity_are_finite():
    source = torch.full((5000,), 3e38)
    assert cast("w", torch.empty(5000, dtype=torch.bfloat16), source) == 0
    with pytest.raises(SourceError, match="w: 1 finite values"):
        cast("w", torch.empty(3, dtype=torch.bfloat16), torch.tensor([1.0, 3.4e38, math.inf]))
