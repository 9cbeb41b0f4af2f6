"""Loads weights into one SGLang scheduler rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from sglang_weightsync import compat, compat_groups, compat_loading, compat_lora, compat_standby
from weightsync.engine.adapter import Expected, LoaderHooks, LoraHooks
from weightsync.engine.expected_checkpoint import expected_of


class SglangAdapter:
    """See `weightsync.engine.adapter.Adapter`."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self.rank = compat_groups.rank_of(scheduler)
        self.device = compat.device_of(scheduler)

    def expected(self) -> Expected:
        """The checkpoint that the engine was started with."""
        return expected_of(*compat.model_source(self._scheduler))

    def loader_hooks(self) -> LoaderHooks | str:
        """The model's own loader, inside a begin/end session."""
        found = compat_loading.recordable(self._scheduler)
        if isinstance(found, str):
            return found
        model, load = found
        around = functools.partial(compat_loading.written_by_others, self._scheduler)
        return LoaderHooks(model, load, around, compat_standby.movable(self._scheduler))

    def lora_hooks(self) -> LoraHooks:
        """SGLang's own LoRA, if it was started with that."""
        return compat_lora.SglangLoraHooks(self._scheduler)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through SGLang's begin/end session."""
        compat_loading.load(self._scheduler, weights)

    def digest(self) -> str:
        """The digest of every parameter and buffer."""
        return compat_loading.digest(self._scheduler)

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What differs in a scheduler that was started on these weights."""
        return compat_loading.differing(self._scheduler, weights)
