"""The interface between a rank's `receiver.Receiver` and one engine."""

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
    """An engine's loader in parts, so that what it writes can be recorded once and replayed without it."""

    model: torch.nn.Module
    """The model whose parameters and buffers the loader writes."""
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]
    """The loader without any step around it, for any subset of the checkpoint's tensors."""
    around: Callable[[], AbstractContextManager[None]]
    """Context in which something other than the engine's loader may write the weights."""


class Sealed(NamedTuple):
    """A loader whose work cannot be replayed."""

    model: torch.nn.Module
    """The model that it writes."""
    why: str
    """Why only `Adapter.load` can load the weights, for example ``"it packs layers"``."""


class Adapter(Protocol):
    """One rank of an engine. Only `Receiver` calls it; loading and hashing run in the engine's loop."""

    rank: int
    """Unique among all ranks of the engine, from 0."""
    device: torch.device
    """The device of the rank's weights."""

    def expected(self) -> Expected:
        """The checkpoint that a complete push consists of. Raises `ManifestMismatch` if it cannot be determined."""

    def loader_hooks(self) -> LoaderHooks | Sealed | str:
        """The engine's loader in parts; or why only `load` can load: `Sealed`, or text where no single model exists."""

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a complete checkpoint through the engine's own path, post-load steps included.

        The tensors are views of the stage, or come one by one as they arrive: read them, keep none longer than the load
        takes. Raises whatever the engine or the iterator raises.
        """

    def digest(self) -> str:
        """BLAKE2b hash, in hex, of the weights that this rank computes with; equal weights have equal digests."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of the weights that a newly started engine would hold otherwise after loading this complete checkpoint.

        The names are those of the engine's own parameters and buffers.
        """
