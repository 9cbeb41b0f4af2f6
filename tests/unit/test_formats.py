"""What quantising makes of a tensor: in every bit what the format's own library makes, in whatever pieces."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from tests.unit.quantised import CONFIGS, FINE, format_of, made, same
from weightsync.errors import ManifestMismatch
from weightsync.tensors.boxes import Box
from weightsync.tensors.conversion import Conversion, by_source
from weightsync.tensors.formats import FORMATS
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.subset import Subset, Wanted
from weightsync.trainer.pack_plan import pack_plan
from weightsync.trainer.packing import Packer

DTYPES_OF_TRAINERS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def drawn(shape, size, dtype):
    """Random weights of about this size, with a block of zeros, a row of them, and zeros with a sign."""
    generator = torch.Generator().manual_seed(shape[-2])
    weights = torch.randn(shape, generator=generator, dtype=torch.float64).mul(size).to(dtype)
    weights[..., :128, :128] = weights[..., 131:132, :] = 0
    weights[..., 2:3, 3:9] = -0.0
    weights[..., 140:141, 140:150] *= 1e-4
    return weights


@pytest.mark.parametrize("dtype", DTYPES_OF_TRAINERS)
@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
@pytest.mark.parametrize("shape", [(256, 384), (3, 256, 256)])
def test_fine_grained_fp8_is_what_transformers_makes(shape, scale_fmt, dtype):
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt=scale_fmt)
    reference = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    how = format_of({**FINE, "scale_fmt": scale_fmt})
    for size in (1, 1e-3, 1e-20, 1e-38, 1e4):
        weights = drawn(shape, size, dtype)
        for name in ("experts.w.weight", "experts.gate_up"):
            wanted = reference._quantize_one(name, weights)
            for cut in (0, 512, 1000, 70_000):
                found = made(how, name, weights, cut)
                assert list(found) == [name, name + "_scale_inv"]
                assert same(found[name], wanted[name])
                assert same(found[name + "_scale_inv"], wanted[name + "_scale_inv"].float())


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_may_be_cut_at_the_edge_and_tensors_may_be_strided(config):
    how, weights = format_of(CONFIGS[config]), drawn((200, 384), 0.02, torch.bfloat16)
    wanted = made(how, "w", weights)
    strided = torch.stack([weights, weights], -1)[..., 0]
    for tensor, cut in ((strided, 0), (weights, 24), (weights, 4096)):
        found = made(how, "w", tensor, cut)
        assert all(same(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("config", [name for name in CONFIGS if "tensor" not in name])
def test_each_expert_is_quantised_by_itself(config):
    how, experts = format_of(CONFIGS[config]), drawn((3, 200, 256), 0.02, torch.bfloat16)
    values, scales, *_ = made(how, "w", experts, 1000).values()
    for expert, *found in zip(experts, values, scales, strict=True):
        wanted = list(made(how, "w", expert).values())
        assert all(same(one, other) for one, other in zip(found, wanted[:2], strict=True))


@pytest.mark.parametrize("config", [name for name in CONFIGS if "int4" not in name])
def test_small_weights_are_not_lost(config):
    """Scales have no floor, or one far below any weight."""
    how, weights = format_of(CONFIGS[config], "float32"), torch.full((128, 128), 1e-6)
    values, scales = made(how, "w", weights).values()
    torch.testing.assert_close(values.float() * scales.float().view(-1, 1), weights, rtol=0.07, atol=0)


def test_a_group_has_to_divide_a_row():
    how = format_of(CONFIGS["int4, group"])
    for shape in ((4, 130), (0, 128)):
        with pytest.raises(ManifestMismatch, match=r"w .*cannot be quantised to compressed-tensors pack-q"):
            how.made_of(spec_of("w", torch.empty(shape)))


def test_no_two_formats_are_chosen_by_the_same_words():
    words = [(each.method, stored, each.weights) for each in FORMATS for stored in each.stored]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bucket_bytes", [48 << 10, 4 << 20])
def test_packing_again_by_a_plan_gives_the_same_bytes_and_digests(config, bucket_bytes):
    how = format_of(CONFIGS[config])
    tensors = [drawn(shape, 0.02, torch.bfloat16) for shape in ((256, 384), (2048, 1024), (1280, 1024))]
    tensors += [torch.randn(70_000), torch.randn(9, dtype=torch.bfloat16)]
    crossing, conversions = [], {}
    for at, tensor in enumerate(tensors):
        conversion = Conversion(spec_of(f"t{at}", tensor), how) if at < 3 else Conversion(spec_of(f"t{at}", tensor))
        if tensor.dtype is not torch.bfloat16 or at < 3:
            conversions[len(crossing)] = conversion
        crossing += how.made_of(conversion.source) if at < 3 else [spec_of(f"t{at}", tensor.bfloat16())]
    layout = Layout(crossing)
    slots = layout.buckets(bucket_bytes)
    arenas = [torch.zeros(slots * bucket_bytes, dtype=torch.uint8) for _ in range(2)]
    box = Box((100, 0), (40, crossing[0].shape[1]))
    demand = Wanted([Subset(layout, {}), Subset(layout, {0: box})])
    settings = (bucket_bytes, slots, "xxh3_64", demand)
    plan = pack_plan(layout, arenas[1], *settings, [tensor.data_ptr() for tensor in tensors], conversions)
    for _ in range(2):
        packer = Packer(layout, arenas[0], *settings, conversions)
        for one, other in zip(packer.fill(tensors, id), plan.fill(id), strict=True):
            assert (one.number, one.nbytes) == (other.number, other.nbytes)
            assert all(one.digests.get(name, ()) == other.digests.get(name, ()) for name in demand.names)
        assert torch.equal(*arenas)
        for entries, tensor in zip(by_source(layout, conversions), tensors, strict=True):
            wanted = [tensor.bfloat16()] if len(entries) == 1 else made(how, "w", tensor).values()
            for entry, one in zip(entries, wanted, strict=True):
                assert same(entry.view(arenas[0]), one.to(entry.dtype))
            tensor.mul_(1.01)
