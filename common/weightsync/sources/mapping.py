"""A mapping of names to tensors, sent as it stands."""

from __future__ import annotations

import operator
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
    """Every entry of a mapping under its own key, two names of one tensor included.

    Values are tensors, DTensors, or `LocalShard`: what this process holds of a tensor. A name that it lacks is held by
    other ranks, or by nobody. They are looked up one at a time, at opening and at every pass, so a mapping may make
    them on demand.
    """

    specs: tuple[TensorSpec, ...]
    held: tuple[HeldShards, ...]
    device: torch.device

    def __init__(self, weights: Mapping[Any, Any], before: Remembered | None = None):
        self._weights = weights
        #: What is left of this source when it is gone.
        self.seen: Remembered | None = None
        if before is not None and before.is_of(weights):
            self.seen, self.held, self.specs, self.device = before, before.held, before.specs, before.device
            return
        self.held = tuple(_held(name, value) for name, value in weights.items())
        self.specs = finish((one.spec for one in self.held), "the mapping")
        self.device = _tensor(next(iter(weights.values()))).device
        if type(weights) is dict and fingerprint.are_plain(list(weights.values())):
            self.seen = Remembered(weights, self)

    def identity(self) -> object | None:
        """See `Source.identity`; None for what makes its values on demand, or holds parts of tensors."""
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
    """What is remembered of a dictionary of plain tensors, so that it, or one like it, is known again; no tensor is.

    One like it has tensors of the same shapes at the same addresses under the same names, in the same order.
    """

    def __init__(self, weights: dict[Any, torch.Tensor], source: MappingSource):
        self.held, self.specs, self.device = source.held, source.specs, source.device
        self._names = list(weights)
        self._identities = list(fingerprint.identities(list(weights.values())))

    def is_of(self, weights: Mapping[Any, Any]) -> bool:
        """Whether these are such. Runs no Python for each tensor."""
        if type(weights) is not dict or len(weights) != len(self._names):
            return False
        values = list(weights.values())
        if not fingerprint.are_plain(values) or not all(map(operator.eq, weights, self._names)):
            return False
        try:
            return all(map(operator.eq, fingerprint.identities(values), self._identities))
        except RuntimeError:  # one has no strides, or no memory
            return False


def _tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.tensor if isinstance(value, LocalShard) else value
    return tensor


def _held(name: object, value: Any) -> HeldShards:
    """Describe one entry. Raises `SourceError` by name for whatever cannot cross as plain bytes."""
    found = describe(name, _tensor(value))
    if is_dtensor(value):
        return HeldShards(found, tuple(local.box for local in boxes_of(found.name, value)), replicated=True)
    if not isinstance(value, LocalShard):
        return HeldShards(found, (whole(found),))
    of = TensorSpec(found.name, found.dtype, tuple(value.shape))
    box = Box(tuple(value.start), found.shape)
    if not is_inside(box, of.shape):
        raise SourceError(
            f"{name}: a part of {list(found.shape)} that starts at {list(value.start)} is not in a tensor of "
            f"{list(of.shape)}"
        )
    return HeldShards(of, (box,), replicated=True)
