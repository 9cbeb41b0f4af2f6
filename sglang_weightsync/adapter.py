"""Loads weights into one SGLang scheduler rank."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from sglang_weightsync import compat, compat_groups, compat_loading, compat_lora, compat_standby
from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, LoraHooks
from weightsync.engine.drafts import WithDraft, apart, why_not
from weightsync.engine.expected_checkpoint import expected_of


def adapter_of(scheduler: Any) -> Adapter:
    """The adapter of a scheduler: also of its draft models, if their layers are in the model's own checkpoint."""
    adapter: Adapter = SglangAdapter(scheduler)
    if not compat_loading.draft_has_own_checkpoint():
        for runner in compat_loading.runners(scheduler, "draft"):
            adapter = WithDraft(adapter, DraftAdapter(scheduler, runner), own=False)
    return adapter


class SglangAdapter:
    """See `weightsync.engine.adapter.Adapter`; of the model of ``runner``, by default the served one."""

    def __init__(self, scheduler: Any, runner: Any = None):
        self._scheduler = scheduler
        self._runner: Any = scheduler.tp_worker.model_runner if runner is None else runner
        self.rank = compat_groups.rank_of(scheduler)
        self.device = compat.device_of(scheduler)

    @functools.cached_property
    def _both(self) -> Adapter | str:
        runner = compat_loading.draft_runner(self._scheduler)
        if isinstance(runner, str):
            return runner
        draft = DraftAdapter(self._scheduler, runner)
        return why_not(self._runner.model, runner.model, draft) or WithDraft(self, draft)

    def drafting(self) -> Adapter | str:
        """See `Adapter`."""
        return self._both

    def expected(self) -> Expected:
        """The checkpoint that the engine was started with."""
        return expected_of(*compat.model_source(self._runner))

    def loader_hooks(self) -> LoaderHooks | str:
        """The model's own loader, inside a begin/end session."""
        model: Any = self._runner.model
        around = functools.partial(compat_loading.written_by_others, self._runner)
        movable = compat_standby.movable(self._scheduler)
        standby = functools.partial(compat_standby.hooks, self._scheduler, self._runner)
        return LoaderHooks(model, model.load_weights, around, movable, standby)

    def lora_hooks(self) -> LoraHooks:
        """SGLang's own LoRA, if it was started with that."""
        return compat_lora.SglangLoraHooks(self._scheduler)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through SGLang's begin/end session."""
        compat_loading.load(self._runner.weight_updater, weights)

    def digest(self) -> str:
        """The digest of every parameter and buffer."""
        return compat_loading.digest(self._runner)

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What differs in a scheduler that was started on these weights."""
        return compat_loading.differing(self._runner, weights, self.device)


class DraftAdapter(SglangAdapter):
    """That of a draft model alone."""

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `SglangAdapter.differing`; without what belongs to the model."""
        return apart(compat.model(self._scheduler), self._runner.model, super().differing(weights))
