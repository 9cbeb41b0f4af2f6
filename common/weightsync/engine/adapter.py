"""The interface between a rank's `receiver.Receiver` and one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from weightsync.engine.exchange.pairs import Rules
from weightsync.engine.exchange.slices import TORCH, Setting
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import AdapterId, LoraSpec


class Expected(NamedTuple):
    """The complete checkpoint of an engine's model; ``optional`` names may be left out (tied weights).

    ``quantization`` is the ``quantization_config`` of its ``config.json``, if that has one.
    """

    specs: tuple[TensorSpec, ...]
    optional: frozenset[str] = frozenset()
    quantization: dict[str, Any] | None = None


def sleeping_needs_room(asleep: Iterable[str]) -> str:
    """Why there is no room for a standby while the memory with these tags sleeps; empty if none does."""
    tags = ", ".join(sorted(asleep))
    return tags and f"the memory of {tags} sleeps, and needs the room when it wakes"


class Movable(NamedTuple):
    """A model whose weights may lie elsewhere after each push."""

    ranks: int = 1
    """How many ranks of the engine share this memory, each with a second set of its own."""
    rules: Rules = Rules()
    """What of the model holds no weights."""
    lacks: Callable[[], str] = str
    """Why no second set may be made now, however much memory is free; empty if one may."""


class LoaderHooks(NamedTuple):
    """An engine's loader in parts, so that what it writes can be recorded once and replayed without it."""

    model: torch.nn.Module
    """The model whose parameters and buffers the loader writes."""
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], object]
    """The loader without any step around it, for any subset of the checkpoint's tensors."""
    around: Callable[[], AbstractContextManager[None]]
    """Context in which something other than the engine's loader may write the weights."""
    movable: Movable | str = ""
    """Whether the weights may lie elsewhere after a push; or why not, empty where an engine never moves them."""
    standby: Callable[[], StandbyHooks | str] = str
    """See `Sealed.standby`; used if no load plan is possible, or one that cannot fill a standby of movable weights."""


class StandbyHooks(NamedTuple):
    """How an engine makes and loads a second set of its weights, in slices while it serves."""

    model: torch.nn.Module
    """The served model."""
    nbytes: int
    """Bytes that a second set takes."""
    make: Callable[[Iterable[tuple[str, torch.Tensor]]], torch.nn.Module]
    """Makes a second model from a complete checkpoint, as the engine does when it starts."""
    load: Callable[[torch.nn.Module, Iterable[tuple[str, torch.Tensor]]], None]
    """Loads a complete checkpoint into a model that ``make`` has made; after an error it can be loaded again."""
    served: Callable[[], None]
    """Drops what the rank computed with the weights before, after an exchange."""
    discard: Callable[[torch.nn.Module], None]
    """Forgets a model that ``make`` has made."""
    ranks: int = 1
    """How many ranks of the engine share this memory, each with a second set of its own."""
    rules: Rules = Rules()
    """What of the two models is not exchanged."""
    settings: Sequence[Setting] = TORCH
    """What is set for the whole process while a model is made or loaded."""
    stays: bool = False
    """Whether the served weights must stay where they are, so that those of the second model are copied there."""


class Sealed(NamedTuple):
    """A loader whose work cannot be replayed."""

    model: torch.nn.Module
    """The model that it writes."""
    why: str
    """Why only `Adapter.load` can load the weights, for example ``"it packs layers"``."""
    standby: Callable[[], StandbyHooks | str] = str
    """How a second set of the weights is made; or why there is none, empty where an engine never has one."""


class LoraHooks(Protocol):
    """How one rank of an engine takes LoRA adapters, which the engine knows by `AdapterId`."""

    def check(self, adapter: LoraSpec, manifest: Sequence[TensorSpec]) -> tuple[str, ...]:
        """The names of tensors for which this rank has no layer; another rank must have it.

        Raises `ManifestMismatch`, naming what the engine cannot serve.
        """

    def make(self, adapter: LoraSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """An adapter of copies of these tensors, as `serve` takes it. Called while the engine generates, in any
        thread."""

    def served(self, number: AdapterId) -> object | None:
        """The adapter of this number, None if there is none."""

    def serve(self, number: AdapterId, made: object | None) -> None:
        """Replace the adapter of this number by another, or by none. Called in the engine's loop; if it raises, it can
        be called again."""


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

    def drafting(self) -> Adapter | str:
        """This rank with its draft model, for a push of both, see `drafts.WithDraft`; or why that cannot be pushed.

        Empty if there is no draft model with a checkpoint of its own.
        """

    def lora_hooks(self) -> LoraHooks:
        """How LoRA adapters are loaded. Raises `UnsupportedOption` if the engine has none."""

    def digest(self) -> str:
        """BLAKE2b hash, in hex, of the weights that this rank computes with; equal weights have equal digests."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Names of the weights that a newly started engine would hold otherwise after loading this complete checkpoint.

        The names are those of the engine's own parameters and buffers.
        """
