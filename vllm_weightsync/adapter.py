"""Loads weights into one vLLM worker.

The worker's own ``reload_weights`` unpacks, loads and repacks layer by layer. `compat` works around two defects of it
in vLLM 0.32 on a CPU: an output layer that is tied to the embedding keeps a packed copy of the old weight, and experts
are packed only when the engine starts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from vllm_weightsync import compat, compat_draft, compat_lora, compat_models, compat_plans, compat_standby
from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, LoraHooks, Sealed
from weightsync.engine.drafts import WithDraft, apart, why_not
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.errors import UnsupportedOption


def adapter_of(worker: Any) -> Adapter:
    """The adapter of a worker: also of its draft, if the layers of that are in the model's own checkpoint."""
    target = VllmAdapter(worker)
    found = target.draft
    if isinstance(found, str) or compat_draft.has_own_checkpoint(worker.vllm_config):
        return target
    return WithDraft(target, DraftAdapter(target, found), own=False)


class VllmAdapter:
    """See `weightsync.engine.adapter.Adapter`."""

    def __init__(self, worker: Any):
        if reason := compat.VLLM.check(compat.WORKER):
            raise UnsupportedOption(reason)
        self._worker = worker
        self.rank = compat.worker_rank(worker)
        self.device = compat.worker_device(worker)

    @functools.cached_property
    def draft(self) -> compat_draft.DraftWorker | str:
        """The worker's draft model; or why nothing can be pushed into that, empty if it has none."""
        return compat_draft.draft_worker(self._worker)

    @functools.cached_property
    def _both(self) -> Adapter | str:
        if isinstance(self.draft, str):
            return self.draft
        draft = DraftAdapter(self, self.draft)
        return why_not(compat.model(self._worker), compat.model(self.draft), draft) or WithDraft(self, draft)

    def drafting(self) -> Adapter | str:
        """See `Adapter`."""
        return self._both

    def expected(self) -> Expected:
        """The checkpoint that the engine was started with."""
        return expected_of(*compat.model_source(self._worker))

    def loader_hooks(self) -> LoaderHooks | Sealed:
        """The model's own loader, unless layers are changed after loading: only the reload path knows how.

        That also loads a second model.
        """
        worker = self._worker
        model: Any = compat.model(worker)
        standby = functools.partial(compat_standby.hooks, worker)
        if why := compat_plans.why_not(worker):
            return Sealed(model, why, standby)
        around = functools.partial(compat_plans.written_by_others, worker)
        return LoaderHooks(model, model.load_weights, around, compat_standby.movable(worker), standby)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through vLLM's reload path."""
        compat_models.reload(self._worker, weights)

    def lora_hooks(self) -> LoraHooks:
        """vLLM's own LoRA, if it was started with that."""
        return compat_lora.VllmLoraHooks(self._worker)

    def digest(self) -> str:
        """The digest of every weight, packed ones included."""
        return compat_models.digest(self._worker)

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What differs in a worker that was started on these weights."""
        return compat_models.differing(self._worker, weights)


class DraftAdapter(VllmAdapter):
    """That of a draft model alone."""

    def __init__(self, target: VllmAdapter, worker: compat_draft.DraftWorker):
        self._worker = self._draft = worker
        self._target = compat.model(target._worker)
        self.rank, self.device = target.rank, target.device

    def loader_hooks(self) -> LoaderHooks | Sealed:
        """See `VllmAdapter.loader_hooks`."""
        hooks = super().loader_hooks()
        return hooks._replace(standby=lambda: self._draft.sealed) if self._draft.sealed else hooks

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `VllmAdapter.differing`; without what belongs to the model."""
        return apart(self._target, compat.model(self._draft), super().differing(weights))
