"""Compares what a push quantises with compressed-tensors, in an interpreter that has that library: prints what differs.

The weights go through a module to which the library applies a configuration, and through its compressor.
"""

import itertools
import json
import sys

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant

from tests.unit.quantised import format_of, made, same

#: Formats, with the type and the bits of their weights.
FORMATS = (
    ("float-quantized", "float", 8),
    ("naive-quantized", "float", 8),
    ("naive-quantized", "int", 8),
    ("int-quantized", "int", 8),
    ("pack-quantized", "int", 4),
    ("pack-quantized", "int", 8),
)
TENSOR, GROUP = {"strategy": "tensor"}, {"strategy": "group", "group_size": 128}
CHANNEL, BLOCK = {"strategy": "channel"}, {"strategy": "block", "block_structure": [128, 128]}
#: Shapes, with the strategies for which the library knows them: of experts it has no scales by channel or block.
SHAPES = (((200, 384), (TENSOR, CHANNEL, GROUP, BLOCK)), ((2, 140, 256), (TENSOR, GROUP)))
#: dtypes of the trainer and of the scales. The library's scales have the dtype of the weights that it is given.
DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
)
SIZES = (1.0, 1e-3, 1e-6, 1e-20, 1e-38, 3e4)


def extremes(weights, args):
    """The least and the greatest weight of each block, as an observer gives them to the library."""
    if args.strategy == "tensor":
        return weights.amin(), weights.amax()
    if args.strategy == "block":
        tall, wide = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weights, (tall, wide))
        blocks = padded.unflatten(0, (-1, tall)).unflatten(2, (-1, wide))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    rows = weights.unflatten(-1, (-1, args.group_size or weights.shape[-1]))
    return rows.amin(-1), rows.amax(-1)


def reference(weights, config, stored):
    """What the library makes of the weights, and the configuration as it is saved."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(weights, requires_grad=False)
    config = QuantizationConfig(**config)
    apply_quantization_config(torch.nn.Sequential(layer), config)
    scale, zero_point = calculate_qparams(
        *extremes(weights, layer.quantization_scheme.weights), layer.quantization_scheme.weights
    )
    layer.weight_scale.data.copy_(scale)
    layer.weight_zero_point.data.copy_(zero_point)
    state = {name: parameter.data for name, parameter in layer.named_parameters()}
    compressor = BaseCompressor.get_value_from_registry(stored)
    return compressor.compress(state, layer.quantization_scheme), config.model_dump(mode="json")


def weights_of(shape, size, dtype):
    """Random weights with a block of zeros, a row of them, and zeros with a sign."""
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(size).to(dtype)
    weights[..., :128, 128:256] = weights[..., 131, :] = 0
    weights[..., 2, 3:9] = -0.0
    return weights


def main():
    differing, compared = [], 0
    ways = [(shape, strategy) for shape, strategies in SHAPES for strategy in strategies]
    for (stored, kind, bits), (shape, strategy) in itertools.product(FORMATS, ways):
        weights = {"num_bits": bits, "type": kind, **strategy}
        config = {"config_groups": {"g": {"targets": ["Linear"], "weights": weights}}, "format": stored}
        for (dtype, scales), size in itertools.product(DTYPES, SIZES):
            tensor = weights_of(shape, size, dtype)
            if not tensor.isfinite().all():
                continue
            wanted, saved = reference(tensor.to(scales), config, stored)
            found = made(format_of(saved, str(scales).removeprefix("torch.")), "weight", tensor)
            compared += 1
            if found.keys() != wanted.keys() or not all(same(found[name], wanted[name]) for name in found):
                differing.append(f"{stored} {kind} {bits} {list(shape)} {strategy} {dtype} {scales} {size}")
    print(json.dumps({"compared": compared, "differing": differing}))


if __name__ == "__main__":
    sys.exit(main())
