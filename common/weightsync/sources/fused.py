"""Trainers that fuse, rename and split tensors, as Megatron does: a table says what they are in the checkpoint."""

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
    """What a trainer's tensor is in the checkpoint.

    ``name`` is the trainer's, ``holds`` the checkpoint's: one name, or several that are fused into it, each with its
    rows in a unit; None for a tensor that is not sent. In both, ``{layer}`` or any other word in braces stands for a
    number. Along dimension ``dim`` the tensor is unit after unit, each the rows of every fused tensor in turn: of
    attention a unit is a group, with the rows of its queries, of its key and of its value. Rows of None are equal
    shares of a tensor that is one unit, as gate and up of an MLP are. What a rank holds are its units, or its rows,
    in the order of the ranks; a tensor with a ``dim`` of None is held by every rank as a whole.
    """

    name: str
    holds: str | Mapping[str, int | None] | None
    dim: int | None = 0


@dataclass(frozen=True)
class Fused:
    """A trainer's tensors by its own names, as the ``rank``-th of ``size`` that share them, and what they are.

    ``shift`` is added to the numbers that fields stand for: ``{"expert": 8}`` where this rank's first expert is the
    ninth. Of rules that match a name the first counts.
    """

    weights: Mapping[str, torch.Tensor]
    rules: Sequence[Rule]
    rank: int = 0
    size: int = 1
    shift: Mapping[str, int] = field(default_factory=dict)


class _Part(NamedTuple):
    """A checkpoint tensor in one of the trainer's: where ``boxes`` of it begin in dimension ``dim``, ``rows`` each."""

    dim: int
    rows: int
    starts: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The current values of the boxes."""
        return [tensor.narrow(self.dim, start, self.rows) for start in self.starts] if tensor.ndim else [tensor]


class FusedSource:
    """See `Source` and `Fused`. Tensors are looked up at opening and at every pass."""

    specs: tuple[TensorSpec, ...]

    def __init__(self, fused: Fused):
        if not 0 <= fused.rank < fused.size:
            raise SourceError(f"rank {fused.rank} of {fused.size} is none")
        self._fused = fused
        #: Of the trainer's tensors that are sent: name, what it was, and its parts.
        self._steps: list[tuple[str, TensorSpec, list[_Part]]] = []
        held: list[HeldShards] = []
        rules = [(_pattern(rule.name), rule) for rule in fused.rules]
        for name, tensor in fused.weights.items():
            found = next(((match, rule) for pattern, rule in rules if (match := pattern.fullmatch(name))), None)
            if found is None:
                raise SourceError(f"{name}: no rule is for it; Rule({name!r}, None) would leave it out")
            match, rule = found
            if rule.holds is None:
                continue
            one = describe(name, tensor)
            numbers = {key: int(value) + fused.shift.get(key, 0) for key, value in match.groupdict().items()}
            entries = list(_parts(one, rule, numbers, fused))
            held += [entry for entry, _ in entries]
            self._steps.append((name, one, [part for _, part in entries]))
        self.held = tuple(held)
        self.specs = finish((one.spec for one in held), "what the rules make of the weights")
        self.device = next(iter(fused.weights.values())).device

    def identity(self) -> None:
        """See `Source.identity`: tensors are looked up by name."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`; those whose rows are apart are put together."""
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
    if len(set(fields)) != len(fields) or not all(one.isidentifier() for one in fields):
        raise SourceError(f"{name}: what stands in braces must be different words")
    return re.compile("".join(f"(?P<{one}>\\d+)" if at % 2 else re.escape(one) for at, one in enumerate(parts)))


def _parts(one: TensorSpec, rule: Rule, numbers: Mapping[str, int], fused: Fused) -> Iterator[tuple[HeldShards, _Part]]:
    """What a tensor of the trainer's holds of each tensor of the checkpoint. Raises `SourceError` by name."""
    holds: Mapping[str, Any] = {rule.holds: None} if isinstance(rule.holds, str) else dict(rule.holds or {})
    dim, ranks, rank = (0, 1, 0) if rule.dim is None else (rule.dim, fused.size, fused.rank)
    size = one.shape[dim] if dim < len(one.shape) else 1
    unit = [size // len(holds) if rows is None else rows for rows in holds.values()]
    count = size // sum(unit) if sum(unit) else 1
    if not 0 <= dim < max(1, len(one.shape)) or count * sum(unit) != size or not count:
        raise SourceError(f"{one.name}: dimension {dim} of {list(one.shape)} is not units of {unit} rows")
    before = 0
    for pattern, rows in zip(holds, unit, strict=True):
        try:
            name = pattern.format(**numbers)
        except (KeyError, IndexError, ValueError) as error:
            raise SourceError(f"{pattern}: {rule.name} does not say what {error} is") from error
        shape = list(one.shape)
        if shape:
            shape[dim] = rows * count * ranks
        whole = TensorSpec(name, one.dtype, tuple(shape))
        # Units whose neighbours lie beside them are one box: where nothing else is fused with them.
        runs = [(0, size)] if rows == sum(unit) else [(number * sum(unit) + before, rows) for number in range(count)]
        first = rank * rows * count
        boxes = tuple(_box(one.shape, dim, first + number * length, length) for number, (_, length) in enumerate(runs))
        yield (
            HeldShards(whole, boxes, replicated=True),
            _Part(dim, runs[0][1] if shape else 0, tuple(at for at, _ in runs)),
        )
        before += rows


def _box(shape: Sequence[int], dim: int, start: int, length: int) -> Box:
    at = range(len(shape))
    return Box(
        tuple(start if one == dim else 0 for one in at), tuple(length if one == dim else shape[one] for one in at)
    )
