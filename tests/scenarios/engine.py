"""An engine of `Tiny`: the reference engine around an adapter that is created at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import starlette.applications  # noqa: F401 - for those who are forked
import torch
import uvicorn  # noqa: F401

from tests.scenarios.adapters import TinyLora
from tests.scenarios.weights import Tiny, TinyWeights
from weightsync.engine.adapter import Expected, LoaderHooks, Movable, Sealed, StandbyHooks
from weightsync.protocol.http import TensorSpec
from weightsync.testing import ModelAdapter, serve


class TinyAdapter(ModelAdapter):
    """Starts with content 0, and loads as one of `world.LOADS`."""

    def __init__(self, loads: str):
        self.device, self.model, self._loads = torch.device("cpu"), Tiny(), loads
        self.lora = TinyLora()
        self.load(TinyWeights._state(0).items())

    def expected(self) -> Expected:
        """All tensors of the model."""
        return Expected(
            tuple(
                TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
                for name, one in self.model.state_dict().items()
            )
        )

    def loader_hooks(self) -> LoaderHooks | str:
        """As the engine loads."""
        hooks = super().loader_hooks()
        if self._loads == "in the pause":
            return hooks
        if self._loads == "into a standby" and isinstance(hooks, LoaderHooks):
            return hooks._replace(movable=Movable())
        return Sealed(self.model, "it packs layers", self._standby)

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """The digest of the adapter that is asked for."""
        return self.lora.answer(), []

    def _standby(self) -> StandbyHooks:
        return StandbyHooks(self.model, 1 << 20, _make, _load, lambda: None, lambda model: None)


def _make(weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
    made = Tiny()
    _load(made, weights)
    return made


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        model.get_parameter(name).copy_(tensor)


def run(order: dict, _: list[int]) -> None:
    """Serve a tiny model."""
    serve(TinyAdapter(order["loads"]), Path("tiny"), order["port"])
