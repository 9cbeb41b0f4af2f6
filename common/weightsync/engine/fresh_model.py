"""A second instance of an engine's model, made as at a start, for ``verify="deep"``."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from weightsync.tensors import layout


@contextmanager
def apart_from_live(
    device: torch.device, tables: MutableMapping[Any, Any], offloader: Any, none: Any, offload: Callable[[Any], None]
) -> Iterator[None]:
    """Context in which a model can be built that shares no state with the one being served.

    ``tables`` is where the engine caches rotary tables; ``offload`` sets what offloads weights: ``offloader`` is set
    now, ``none`` does nothing.
    """
    before = dict(tables)
    tables.clear()
    offload(none)
    try:
        # Ranks sample from the same random state, which a constructor that draws numbers must not advance.
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        offload(offloader)
        tables.clear()
        tables.update(before)


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
