"""The formats to which a push quantises weights: one table, in which a new format is one entry.

Each gives, bit by bit, what the library gives that defines it: transformers for fine-grained FP8, and
compressed-tensors for its own. They follow from the weights alone, by rounding to the nearest value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import torch

from weightsync.errors import ManifestMismatch
from weightsync.protocol.codec import from_plain
from weightsync.protocol.http import TensorSpec

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale; 0 stands for all of them."""


class Format(NamedTuple):
    """How a weight becomes values and scales, and what these are called."""

    method: str
    """The ``quant_method`` of the model's configuration."""
    stored: tuple[str, ...]
    """Its ``format``, or its ``scale_fmt``: one of these."""
    weights: tuple[str, int]
    """The ``type`` and the ``num_bits`` of its weights."""
    dtype: str
    """The dtype in which the values cross."""
    names: tuple[str, ...]
    """What is appended to a weight's name for its values, its scales, and its shape, if that crosses too."""
    half: float
    """What the largest value of a block becomes, before it is rounded."""
    limits: tuple[float, float]
    """The least and the greatest value."""
    scaling: Callable[[Format, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """From the largest magnitude in each block to the scales, and to what weights are multiplied with or divided by."""
    divides: bool
    """Whether they are divided by it."""
    work: str = ""
    """The dtype of this arithmetic; empty: that of the scales in the engine's checkpoint."""
    scales: tuple[str, ...] = ("bfloat16", "float16", "float32")
    """The dtypes that these may have."""
    zeros: float | None = None
    """The scale of a block of zeros; None: the smallest number that changes 1 when it is added, in the work's dtype."""
    floor: float = 0.0
    """The least scale where scales are rounded up to powers of two."""
    zero_point: bool = False
    """Whether a zero point of 0 is added, which makes -0.0 of the weights 0.0."""
    block: Block = (0, 0)

    @property
    def text(self) -> str:
        """The format, for messages."""
        rows, columns = self.block
        shared = f"blocks of {rows} x {columns}" if rows and columns else "each row" if rows else "each tensor"
        return f"{' '.join(filter(None, (self.method, self.stored[0])))}, with a scale for {shared}"

    @property
    def packed(self) -> int:
        """How many values are packed into one element that crosses."""
        return 32 // self.weights[1] if self.dtype == "int32" else 1

    def made_of(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """What crosses of a weight; its scales in the dtype of the work, if that is known.

        Raises `ManifestMismatch` for a shape that cannot be quantised so.
        """
        *before, rows, columns = weight.shape
        together = self.block[1] if self.block[0] == 1 else 0
        if 0 in weight.shape or columns % (together or 1) or columns % self.packed or together % self.packed:
            raise ManifestMismatch(f"{weight.name} {list(weight.shape)} cannot be quantised to {self.text}")
        grid = [-(-size // (length or size)) for size, length in zip((rows, columns), self.block, strict=True)]
        shapes = (
            (*before, rows, columns // self.packed),
            (*before, *grid) if any(self.block) else (1,),
            (len(weight.shape),),
        )
        dtypes = self.dtype, self.work or self.scales[0], "int64"
        made = zip(self.names, dtypes, shapes, strict=False)
        return tuple(TensorSpec(weight.name + name, dtype, shape) for name, dtype, shape in made)


def _inverse(how: Format, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of transformers: the inverses of what weights are multiplied with."""
    factors = how.half / torch.where(largest > 0, largest, 1.0)
    factors = torch.where(largest > 0, factors, 1.0 if how.zeros is None else 1.0 / how.zeros)
    return 1.0 / factors, factors


def _power(how: Format, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, as powers of two."""
    scales = _inverse(how, largest)[0].clamp(min=how.floor)
    scales = torch.pow(2.0, torch.ceil(torch.log2(scales))).to(torch.float8_e8m0fnu).to(largest.dtype)
    return scales, 1.0 / scales


def _quotient(how: Format, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of compressed-tensors, by which weights are divided."""
    scales = largest / how.half
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps if how.zeros is None else how.zeros, scales)
    return scales, scales


_FINE: Final = Format(
    method="fp8",
    stored=("",),
    weights=("float", 8),
    dtype="float8_e4m3fn",
    names=("", "_scale_inv"),
    half=448.0,
    limits=(-448.0, 448.0),
    scaling=_inverse,
    divides=False,
    work="float32",
    scales=("float32", "bfloat16"),
    zeros=1.0,
)
_FLOAT: Final = Format(
    method="compressed-tensors",
    stored=("float-quantized", "naive-quantized"),
    weights=("float", 8),
    dtype="float8_e4m3fn",
    names=("", "_scale"),
    half=448.0,
    limits=(-448.0, 448.0),
    scaling=_quotient,
    divides=True,
    zero_point=True,
)
_INT: Final = _FLOAT._replace(
    stored=("int-quantized", "naive-quantized"),
    weights=("int", 8),
    dtype="int8",
    half=127.5,
    limits=(-128.0, 127.0),
    zero_point=False,
)
_PACKED: Final = _INT._replace(stored=("pack-quantized",), dtype="int32", names=("_packed", "_scale", "_shape"))

#: Every format, but for its block, which the model's configuration says.
FORMATS: Final = (
    _FINE,
    _FINE._replace(
        stored=("ue8m0",), scaling=_power, scales=("float32", "float8_e8m0fnu"), floor=torch.finfo(torch.float32).tiny
    ),
    _FLOAT,
    _INT,
    _PACKED,
    _PACKED._replace(weights=("int", 4), half=7.5, limits=(-8.0, 7.0)),
)


#: Methods that choose values by what a model computes from samples, and not from the weights alone.
_CALIBRATED: Final = frozenset(("aqlm", "auto-round", "awq", "gptq", "gptq_marlin", "vptq"))

#: The values of ``actorder`` with which groups are of columns that follow each other.
_IN_ORDER: Final = (None, False, "weight", "static")
_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Weights(msgspec.Struct):
    """How compressed-tensors describes quantised weights."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[_Size, _Size] | None = None
    actorder: Any = None
    scale_dtype: str | None = None

    def block(self) -> Block | None:
        """The block of its strategy; None if there is none."""
        group = (1, self.group_size) if self.group_size is not None and self.group_size > 0 else None
        blocks = {"tensor": (0, 0), "channel": (1, 0), "group": group, "block": self.block_structure}
        return blocks.get(self.strategy or "")


class _Group(msgspec.Struct):
    weights: _Weights | None = None
    format: str | None = None


class _Config(msgspec.Struct):
    """What the formats need of a model's ``quantization_config``."""

    quant_method: str = ""
    format: str = ""
    fmt: str = "e4m3"
    scale_fmt: str | None = None
    weight_block_size: tuple[_Size, _Size] | None = None
    config_groups: dict[str, _Group] = {}
    transform_config: Any = None
    sparsity_config: dict[str, Any] | None = None


def formats_of(config: Mapping[str, Any]) -> tuple[Format, ...]:
    """The formats of a model's weights, by its ``quantization_config``.

    Raises `ManifestMismatch`, saying what is not known, for one to which a push does not quantise.
    """
    try:
        found = from_plain(config, _Config)
    except msgspec.MsgspecError as error:
        raise ManifestMismatch(f"its quantization_config cannot be read: {error}") from error
    if found.quant_method in _CALIBRATED:
        raise ManifestMismatch(f"{found.quant_method} is calibrated: its values do not follow from the weights alone")
    if found.quant_method == "fp8":
        if found.weight_block_size is None or found.fmt != "e4m3":
            raise ManifestMismatch("fp8 is known as e4m3, and with weight_block_size")
        return (_known("fp8", found.scale_fmt or "", ("float", 8), found.weight_block_size),)
    sparse = found.sparsity_config or {}
    if found.transform_config or sparse.get("format", "dense") != "dense":
        raise ManifestMismatch("weights that were rotated or pruned before they were quantised are not known")
    groups = [(group, group.weights) for group in found.config_groups.values() if group.weights is not None]
    if not groups:
        raise ManifestMismatch(f"quant_method {found.quant_method or 'none'} is not known")
    for _, weights in groups:
        if not weights.symmetric or weights.scale_dtype or weights.actorder not in _IN_ORDER:
            raise ManifestMismatch(
                f"{found.quant_method} is known with symmetric weights, groups in the order of columns, and without "
                "scale_dtype"
            )
    return tuple(
        _known(found.quant_method, group.format or found.format, (weights.type, weights.num_bits), weights.block())
        for group, weights in groups
    )


def _known(method: str, stored: str, weights: tuple[str, int], block: Block | None) -> Format:
    for each in FORMATS:
        if each.method == method and stored in each.stored and each.weights == weights and block is not None:
            return each._replace(block=block)
    raise ManifestMismatch(f"{method} {stored} of {weights[0]} {weights[1]} is not known with its strategy")
