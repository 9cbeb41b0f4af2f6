"""Trainers that fuse, rename and split tensors, as Megatron does: a table of rules maps them to the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import check_same, describe, finish
from weightsync.tensors.boxes import Box
from weightsync.tensors.held import HeldShards

_FIELD: Final = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Rule:
    """Maps one tensor of the trainer, or one per layer, to checkpoint tensors.

    ``name`` is the trainer's name. ``holds`` is the checkpoint's: one name; a mapping of several names, which are fused
    into the trainer's tensor, to their rows in a unit; or None for a tensor that is not sent. In both, ``{layer}`` or
    any other word in braces stands for a number.

    Along dimension ``dim`` the tensor is a sequence of units, each with the rows of every fused tensor in turn. In
    attention, a unit is a group: the rows of its queries, then of its key, then of its value. If the rows are None, the
    tensor is one unit with equal shares, as gate and up of an MLP. Units, or the rows of a tensor that is not fused,
    are split among the ranks in order; with a ``dim`` of None every rank holds the whole tensor. ``rows`` is the
    checkpoint's size in ``dim`` of a tensor that is not fused, if the trainer has padded it.
    """

    name: str
    holds: str | Mapping[str, int | None] | None
    dim: int | None = 0
    rows: int | None = None


@dataclass(frozen=True)
class Fused:
    """A trainer's tensors by the trainer's names, and the rules that map them to the checkpoint.

    This process is rank ``rank`` of ``size`` that split the tensors. ``shift`` is added to the numbers in names:
    ``{"expert": 8}`` if this rank's first expert is the ninth. The first rule that matches a name applies.
    """

    weights: Mapping[str, torch.Tensor]
    rules: Sequence[Rule]
    rank: int = 0
    size: int = 1
    shift: Mapping[str, int] = field(default_factory=dict)


class _Part(NamedTuple):
    """A checkpoint tensor in a tensor of the trainer: boxes of ``rows`` rows, at ``starts`` in dimension ``dim``."""

    dim: int
    rows: int
    starts: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The current values of the boxes."""
        return [tensor.narrow(self.dim, start, self.rows) for start in self.starts] if tensor.ndim else [tensor]


class FusedSource:
    """See `Source` and `Fused`. Tensors are looked up when the source is opened and in every pass."""

    specs: tuple[TensorSpec, ...]

    def __init__(self, fused: Fused):
        if not 0 <= fused.rank < fused.size:
            raise SourceError(f"rank {fused.rank} is out of range: size is {fused.size}")
        self._fused = fused
        #: For each tensor of the trainer that is sent: name, spec when opened, and its checkpoint tensors.
        self._steps: list[tuple[str, TensorSpec, list[_Part]]] = []
        held: list[HeldShards] = []
        rules = [(_pattern(rule.name), rule) for rule in fused.rules]
        for name, tensor in fused.weights.items():
            found = next(((match, rule) for pattern, rule in rules if (match := pattern.fullmatch(name))), None)
            if found is None:
                raise SourceError(f"{name}: no rule matches it; Rule({name!r}, None) would leave it out")
            match, rule = found
            if rule.holds is None:
                continue
            spec = describe(name, tensor)
            numbers = {key: int(value) + fused.shift.get(key, 0) for key, value in match.groupdict().items()}
            entries = list(_parts(spec, rule, numbers, fused))
            held += [shards for shards, _ in entries]
            self._steps.append((name, spec, [part for _, part in entries]))
        self.held = tuple(held)
        self.specs = finish((shards.spec for shards in held), "the result of the rules")
        self.device = next(iter(fused.weights.values())).device

    def identity(self) -> None:
        """See `Source.identity`; None, because tensors are looked up by name in every pass."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`; a tensor whose rows are not adjacent is concatenated."""
        if self._fused.size != 1:
            raise SourceError(
                f"this process is one of {self._fused.size} that share the weights: every rank of a distributed "
                "trainer builds a Sender and calls push"
            )
        for held, parts in zip(self.held, self.parts(), strict=True):
            dim = next((at for at, n in enumerate(held.boxes[0].shape) if n != held.spec.shape[at]), 0)
            yield parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        for name, expected, parts in self._steps:
            try:
                tensor = self._fused.weights[name]
            except KeyError as error:
                raise SourceError(f"{name}: no longer among the weights; push them as they are now") from error
            check_same(expected, describe(name, tensor))
            for part in parts:
                yield part.of(tensor.detach())


def _pattern(name: str) -> re.Pattern[str]:
    parts = _FIELD.split(name)
    fields = parts[1::2]
    if len(set(fields)) != len(fields) or not all(word.isidentifier() for word in fields):
        raise SourceError(f"{name}: the words in braces must be different identifiers")
    return re.compile("".join(f"(?P<{part}>\\d+)" if at % 2 else re.escape(part) for at, part in enumerate(parts)))


def _parts(
    spec: TensorSpec, rule: Rule, numbers: Mapping[str, int], fused: Fused
) -> Iterator[tuple[HeldShards, _Part]]:
    """What a tensor of the trainer holds of each checkpoint tensor. Raises `SourceError` if the rule does not fit."""
    holds: Mapping[str, Any] = {rule.holds: None} if isinstance(rule.holds, str) else dict(rule.holds or {})
    dim, ranks, rank = (0, 1, 0) if rule.dim is None else (rule.dim, fused.size, fused.rank)
    size = spec.shape[dim] if dim < len(spec.shape) else 1
    unit = [size // len(holds) if rows is None else rows for rows in holds.values()]
    count = size // sum(unit) if sum(unit) else 1
    if not 0 <= dim < max(1, len(spec.shape)) or count * sum(unit) != size or not count:
        raise SourceError(
            f"{spec.name}: dimension {dim} of {list(spec.shape)} cannot be divided into units of {unit} rows"
        )
    before = 0
    for pattern, rows in zip(holds, unit, strict=True):
        try:
            name = pattern.format(**numbers)
        except (KeyError, IndexError, ValueError) as error:
            raise SourceError(f"{pattern}: {error} has no value, since {rule.name} does not contain it") from error
        shape = list(spec.shape)
        if shape:
            shape[dim] = rows * count * ranks
        first = rank * rows * count
        # If nothing else is fused with this tensor, its units are adjacent and form one box.
        runs = [(0, size)] if rows == sum(unit) else [(number * sum(unit) + before, rows) for number in range(count)]
        if rule.rows is not None:
            shape[dim] = _without_padding(spec, rule, shape[dim])
            runs = [(0, left)] if (left := min(size, rule.rows - first)) > 0 else []
        whole = TensorSpec(name, spec.dtype, tuple(shape))
        boxes = tuple(_box(spec.shape, dim, first + number * length, length) for number, (_, length) in enumerate(runs))
        yield (
            HeldShards(whole, boxes, replicated=True),
            _Part(dim, runs[0][1] if shape and runs else 0, tuple(at for at, _ in runs)),
        )
        before += rows


def _without_padding(spec: TensorSpec, rule: Rule, padded: int) -> int:
    """The checkpoint's size, where the trainer has ``padded``."""
    assert rule.rows is not None
    if not isinstance(rule.holds, str) or not 0 < rule.rows <= padded:
        raise SourceError(
            f"{spec.name}: {padded} rows, fused or not, are not {rule.rows} rows of {rule.holds} and padding"
        )
    return rule.rows


def _box(shape: Sequence[int], dim: int, start: int, length: int) -> Box:
    return Box(
        tuple(start if at == dim else 0 for at in range(len(shape))),
        tuple(length if at == dim else size for at, size in enumerate(shape)),
    )
