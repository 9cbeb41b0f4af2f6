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

from vllm_weightsync import compat, compat_lora, compat_models, compat_plans, compat_standby
from weightsync.engine.adapter import Expected, LoaderHooks, LoraHooks, Sealed
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.errors import UnsupportedOption


class VllmAdapter:
    """See `weightsync.engine.adapter.Adapter`."""

    def __init__(self, worker: Any):
        if reason := compat.VLLM.check(compat.WORKER):
            raise UnsupportedOption(reason)
        self._worker = worker
        self.rank = compat.worker_rank(worker)
        self.device = compat.worker_device(worker)

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
