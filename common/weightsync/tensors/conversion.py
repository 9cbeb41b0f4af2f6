"""What one of the trainer's tensors becomes on its way into an arena: cast, or quantised, which makes several of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple, Protocol

import torch

from weightsync.protocol.http import TensorSpec
from weightsync.tensors.casting import Casting
from weightsync.tensors.formats import Format
from weightsync.tensors.layout import DTYPES, Entry, Layout
from weightsync.tensors.quantising import Quantising


class Making(Protocol):
    """One tensor that is converted."""

    def restart(self) -> None:
        """The tensor has other values now."""

    def write(self, which: int, start: int, target: torch.Tensor) -> int:
        """Write ``target``, 1-D: elements from ``start`` on of output number ``which``. A cast has one output, 0.

        Values, output 0, are written before what follows from them, such as scales; no two threads write at a time.
        Returns how many elements of the trainer's tensor are not finite, each counted once. Raises `SourceError`,
        naming it, if a finite one would become infinite.
        """


class Conversion(NamedTuple):
    """How the trainer's tensor ``source`` is converted: quantised to ``format``, or cast if there is none.

    Its outputs stand next to each other in the manifest.
    """

    source: TensorSpec
    format: Format | None = None

    @property
    def makes(self) -> int:
        """How many tensors cross of it."""
        return 1 if self.format is None else len(self.format.names)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trainer's tensor."""
        return DTYPES[self.source.dtype]

    def begin(self, tensor: torch.Tensor) -> Making:
        """Convert ``tensor``, which is as ``source`` describes it."""
        if self.format is None:
            return Casting(self.source.name, tensor)
        return Quantising(self.source.name, tensor, self.format)


Conversions = Mapping[int, Conversion]
"""Conversions by the number, in the manifest, of the first tensor that they make."""
NO_CONVERSIONS: Final[Conversions] = {}


def by_source(layout: Layout, conversions: Conversions) -> Iterator[tuple[Entry, ...]]:
    """For each of the trainer's tensors, in order, what crosses of it."""
    entries = iter(layout.entries)
    for entry in entries:
        more = conversions[entry.number].makes - 1 if entry.number in conversions else 0
        yield entry, *itertools.islice(entries, more)
