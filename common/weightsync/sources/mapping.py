"""A mapping of names to tensors, sent as it is."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources import fingerprint
from weightsync.sources.base import check_same, describe, finish
from weightsync.sources.dtensor import LocalShard, boxes_of, is_dtensor, local_of, whole_tensor
from weightsync.tensors.boxes import Box, is_inside, whole
from weightsync.tensors.held import HeldShards


class MappingSource:
    """Every entry of a mapping under its key, even if two keys have the same tensor.

    Values are tensors, DTensors, or `LocalShard` (this process's part of a tensor). A tensor whose name is not in the
    mapping is not held by this process. Values are looked up one at a time, when the source is opened and in every
    pass, so a mapping may make them on demand.
    """

    specs: tuple[TensorSpec, ...]
    held: tuple[HeldShards, ...]
    device: torch.device

    def __init__(self, weights: Mapping[Any, Any], before: Remembered | None = None):
        self._weights = weights
        #: What is remembered of this mapping after the source is gone; None if it cannot be recognised again.
        self.seen: Remembered | None = None
        if before is not None and before.matches(weights):
            self.seen, self.held, self.specs, self.device = before, before.held, before.specs, before.device
            return
        self.held = tuple(_held(name, value) for name, value in weights.items())
        self.specs, self.device = (), torch.device("cpu")
        if self.held:  # a rank of a trainer may hold nothing
            self.specs = finish((shards.spec for shards in self.held), "the mapping")
            self.device = _tensor(next(iter(weights.values()))).device
        if type(weights) is dict and fingerprint.are_plain(list(weights.values())):
            self.seen = Remembered(weights, self)

    @property
    def lasts(self) -> bool:
        """Whether a value is there before and after it is looked up, and looking it up asks no other rank."""
        return type(self._weights) in (dict, OrderedDict)

    def identity(self) -> object | None:
        """See `Source.identity`; None unless the mapping is a plain dictionary of plain tensors."""
        return self.seen

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        for held, parts in zip(self.held, self.parts(), strict=True):
            yield whole_tensor(held, parts)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        for expected in self.held:
            name = expected.spec.name
            try:
                value = self._weights[name]
            except KeyError as error:
                raise SourceError(f"{name}: no longer in the mapping; open the source again") from error
            found = _held(name, value)
            check_same(expected.spec, found.spec)
            if found != expected:
                raise SourceError(f"{name}: this process now holds another part of it; open the source again")
            if is_dtensor(value):
                local = local_of(value)
                yield [box.of(local) for box in boxes_of(name, value)]
            else:
                yield [_tensor(value).detach()]


class Remembered:
    """What is remembered of a dictionary of plain tensors, to recognise it or an equal one. Keeps no tensor alive.

    An equal one has tensors of the same shapes at the same addresses under the same names, in the same order.
    """

    def __init__(self, weights: dict[Any, torch.Tensor], source: MappingSource):
        self.held, self.specs, self.device = source.held, source.specs, source.device
        self._names = list(weights)
        self._identities = fingerprint.Identities(list(weights.values()))

    def matches(self, weights: Mapping[Any, Any]) -> bool:
        """Whether ``weights`` has the same names, shapes and addresses as the remembered mapping.

        Has no per-tensor Python cost.
        """
        if type(weights) is not dict or len(weights) != len(self._names):
            return False
        values = list(weights.values())
        if not fingerprint.are_plain(values) or not all(map(operator.eq, weights, self._names)):
            return False
        try:
            return self._identities.hold(values)
        except RuntimeError:  # a tensor without strides or memory
            return False


def _tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.tensor if isinstance(value, LocalShard) else value
    return tensor


def _held(name: object, value: Any) -> HeldShards:
    """Describe one entry. Raises `SourceError`, naming it, if it cannot be sent as plain bytes."""
    found = describe(name, _tensor(value))
    if is_dtensor(value):
        return HeldShards(found, tuple(local.box for local in boxes_of(found.name, value)), replicated=True)
    if not isinstance(value, LocalShard):
        return HeldShards(found, (whole(found),))
    full = TensorSpec(found.name, found.dtype, tuple(value.shape))
    box = Box(tuple(value.start), found.shape)
    if not is_inside(box, full.shape):
        raise SourceError(
            f"{name}: a shard of shape {list(found.shape)} that starts at {list(value.start)} does not lie in a tensor "
            f"of shape {list(full.shape)}"
        )
    return HeldShards(full, (box,), replicated=True)
