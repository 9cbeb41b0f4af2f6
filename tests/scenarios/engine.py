"""An engine of `Tiny`: the reference engine around an adapter that is created at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import starlette.applications  # noqa: F401 - for those who are forked
import torch
import uvicorn  # noqa: F401

from tests.scenarios.adapters import TinyLora
from tests.scenarios.weights import DRAFT_SHAPES, SHAPES, Tiny, state_of
from weightsync.engine.adapter import Expected, LoaderHooks, Movable, Sealed, StandbyHooks
from weightsync.protocol.draft import PREFIX, of_draft
from weightsync.protocol.http import TensorSpec
from weightsync.testing import Answer, ModelAdapter, serve


class TinyAdapter(ModelAdapter):
    """Starts with the tensors of ``state``, some of which may be a draft's, and loads as one of `world.LOADS`."""

    def __init__(self, loads: str, state: Mapping[str, torch.Tensor]):
        draft = {name.removeprefix(PREFIX): one for name, one in state.items() if of_draft(name)}
        own = {name: one for name, one in state.items() if not of_draft(name)}
        self._shapes = {name: tuple(one.shape) for name, one in own.items()}
        self.device, self.model, self._loads = torch.device("cpu"), Tiny(self._shapes), loads
        self._draft = TinyAdapter(loads, draft) if draft else None
        self.lora = TinyLora()
        self.load(own.items())

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

    def generate(self, prompt: Sequence[int], tokens: int) -> Answer:
        """The digest of the adapter that is asked for."""
        return Answer(self.lora.answer(), [], [])

    def _standby(self) -> StandbyHooks:
        return StandbyHooks(self.model, 1 << 20, self._make, _load, lambda: None, lambda model: None)

    def _make(self, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.nn.Module:
        made = Tiny(self._shapes)
        _load(made, weights)
        return made


def _load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in weights:
        model.get_parameter(name).copy_(tensor)


def run(order: dict, _: list[int]) -> None:
    """Serve a tiny model."""
    shapes = {**SHAPES, **DRAFT_SHAPES} if order["drafts"] else SHAPES
    serve(TinyAdapter(order["loads"], state_of(0, shapes)), Path("tiny"), order["port"])
