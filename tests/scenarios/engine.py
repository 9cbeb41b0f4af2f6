"""An engine of `Tiny`: the reference engine around an adapter that is created at once."""

from __future__ import annotations

from pathlib import Path

import starlette.applications  # noqa: F401 - for those who are forked
import torch
import uvicorn  # noqa: F401

from tests.scenarios.weights import Tiny, TinyWeights
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.protocol.http import TensorSpec
from weightsync.testing import ModelAdapter, serve


class TinyAdapter(ModelAdapter):
    """Starts with content 0. Unless ``recordable``, its loader cannot be planned, as that of vLLM."""

    def __init__(self, recordable: bool):
        self.device, self.model, self._recordable = torch.device("cpu"), Tiny(), recordable
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
        """The hooks of the base class if the loader is recordable."""
        return super().loader_hooks() if self._recordable else "it packs layers"


def run(order: dict, _: list[int]) -> None:
    """Serve a tiny model."""
    serve(TinyAdapter(order["recordable"]), Path("tiny"), order["port"])
