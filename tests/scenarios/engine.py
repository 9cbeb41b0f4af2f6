"""An engine of `Tiny`: the reference engine around a sink that takes no time to make."""

from __future__ import annotations

from pathlib import Path

import starlette.applications  # noqa: F401 - for those who are forked
import torch
import uvicorn  # noqa: F401

from tests.scenarios.weights import Tiny, TinyWeights
from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.protocol.http import TensorSpec
from weightsync.testing import ModelAdapter, serve


class TinySink(ModelAdapter):
    """Starts with content 0. With ``recordable`` false it is like those engines that bring weights in themselves."""

    def __init__(self, recordable: bool):
        self.device, self.model, self._recordable = torch.device("cpu"), Tiny(), recordable
        self.load(TinyWeights._state(0).items())

    def expected(self) -> Expected:
        """All there is."""
        return Expected(
            tuple(
                TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
                for name, one in self.model.state_dict().items()
            )
        )

    def loader_hooks(self) -> LoaderHooks | str:
        """As the base class's, if there is to be a plan."""
        return super().loader_hooks() if self._recordable else "it packs layers"


def run(order: dict, _: list[int]) -> None:
    """Serve."""
    serve(TinySink(order["recordable"]), Path("tiny"), order["port"])
