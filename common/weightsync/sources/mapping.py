"""A mapping of names to tensors, sent as it stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weightsync.errors import SourceError
from weightsync.sources.base import check_same, describe, finish
from weightsync.wire import TensorSpec


class MappingSource:
    """Every entry of a mapping under its own key, two names of one tensor included.

    Values are looked up one at a time, at opening and at every `tensors`, so a mapping may make them on demand.
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, weights: Mapping[Any, Any]):
        self._weights = weights
        self.specs = finish((describe(name, tensor) for name, tensor in weights.items()), "the mapping")
        self.device = next(iter(weights.values())).device

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        for expected in self.specs:
            try:
                tensor = self._weights[expected.name]
            except KeyError as error:
                raise SourceError(f"{expected.name}: no longer in the mapping; open the source again") from error
            check_same(expected, describe(expected.name, tensor))
            yield tensor.detach()
