"""What an engine adapter must offer for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from weightsync.protocol.http import TensorSpec


class Expected(NamedTuple):
    """The complete checkpoint of an engine's model; ``optional`` names may be left out (tied weights)."""

    specs: tuple[TensorSpec, ...]
    optional: frozenset[str] = frozenset()


class LoaderHooks(NamedTuple):
    """An engine's loader laid open, so that what it does can be recorded once and then done without it."""

    model: torch.nn.Module
    """Its parameters and buffers are what the loader writes to."""
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]
    """The loader alone, for any of the checkpoint's tensors."""
    around: Callable[[], AbstractContextManager[None]]
    """What the engine needs to be done before and after weights are written by somebody else than its loader."""


class Sealed(NamedTuple):
    """A loader that nobody else can do the work of."""

    model: torch.nn.Module
    """What it writes to."""
    why: str
    """Why nothing but `Adapter.load` will do: ``"it packs layers"``."""


class Adapter(Protocol):
    """One rank of an engine. Only `Receiver` calls it; loading and hashing run in the engine's own loop."""

    rank: int
    """Unique among all ranks of the engine, from 0."""
    device: torch.device
    """Where the rank's weights live."""

    def expected(self) -> Expected:
        """What a push must consist of. Raises `ManifestMismatch` if that cannot be known."""

    def loader_hooks(self) -> LoaderHooks | Sealed | str:
        """The engine's loader, or why nothing but `load` will do, without the model where there is not one."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a complete checkpoint through the engine's own path, post-load steps included.

        The tensors are views of the stage, or come one by one as they arrive: read them, keep none longer than the load
        takes. Raises whatever the engine or the iterator raises.
        """

    def digest(self) -> str:
        """BLAKE2b of the weights this rank computes with, in hex; equal weights, equal digest."""

    def fresh_digest(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        """What `digest` of a fresh engine that loads this complete checkpoint would be."""
