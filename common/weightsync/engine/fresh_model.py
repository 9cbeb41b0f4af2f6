"""A second instance of an engine's model, made as at a start: for ``verify="deep"``, and as a standby."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from weightsync.engine.exchange.slices import Setting
from weightsync.tensors import layout


class Shared(NamedTuple):
    """What all models of a process share in an engine."""

    tables: MutableMapping[Any, Any]
    """Where rotary tables are cached."""
    offloader: Callable[[], Any]
    offload: Callable[[Any], None]
    """Sets what offloads weights, which ``offloader`` returns."""
    none: Callable[[], Any]
    """Makes one that does nothing."""

    def settings(self) -> tuple[Setting, Setting]:
        """The tables, and what offloads."""

        def set_tables(found: dict[Any, Any]) -> None:
            self.tables.clear()
            self.tables.update(found)

        return Setting(lambda: dict(self.tables), set_tables), Setting(self.offloader, self.offload)

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Context in which a model can be built that shares none of it with the one being served."""
        settings = tables, offloads = self.settings()
        before = [setting.get() for setting in settings]
        tables.set({})
        offloads.set(self.none())
        try:
            # Ranks sample from the same random state, which a constructor that draws numbers must not advance.
            with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
                yield
        finally:
            for setting, value in zip(settings, before, strict=True):
                setting.set(value)


def take_apart(model: torch.nn.Module, live: torch.nn.Module) -> None:
    """Free what only ``model`` holds: its layers, and its parameters by what loads them, refer to each other."""
    for module in set(model.modules()).difference(live.modules()):
        vars(module).clear()


def differing(
    live: torch.nn.Module,
    make: Callable[[], torch.nn.Module],
    weights: Callable[[torch.nn.Module], Iterable[tuple[str, torch.Tensor]]],
    device: torch.device,
    discard: Callable[[torch.nn.Module], None] = lambda model: None,
) -> list[str]:
    """Names of the ``weights`` in which ``live`` differs from a model that is made only for this. Needs its memory.

    ``discard`` is called with that model in the end.
    """
    model = None
    try:
        model = make()
        return layout.differing(weights(model), weights(live))
    finally:
        if model is not None:
            discard(model)
        # Layers and their weight loaders refer to each other, so only the garbage collector frees them.
        del model
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
