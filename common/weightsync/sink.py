"""What an engine adapter must offer for one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch

from weightsync.wire import TensorSpec


class Expected(NamedTuple):
    """The complete checkpoint of an engine's model; ``optional`` names may be left out (tied weights)."""

    specs: tuple[TensorSpec, ...]
    optional: frozenset[str] = frozenset()


class Sink(Protocol):
    """One rank of an engine. Only `Receiver` calls it; `load` and `digest` run in the engine's own loop."""

    rank: int
    """Unique among all ranks of the engine, from 0."""
    device: torch.device
    """Where the rank's weights live."""

    def expected(self) -> Expected:
        """What a push must consist of. Raises `ManifestMismatch` if that cannot be known."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a complete checkpoint through the engine's own path, post-load steps included.

        The tensors are views of the stage: read them, keep none. Raises whatever the engine raises.
        """

    def digest(self) -> str:
        """BLAKE2b of the weights this rank computes with, in hex; equal weights, equal digest."""
