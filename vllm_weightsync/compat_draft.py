"""As `compat`: the draft model of a worker (``--speculative-config``), of which the other modules know nothing.

They take a `DraftWorker` for a worker that serves the draft: it has of a worker what they use.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import torch

from vllm_weightsync import compat, compat_models
from weightsync.errors import UnsupportedOption

#: What vLLM's proposer of a draft model has by which a second one can be built.
_PROPOSER: Final = ("vllm_config", "_create_draft_vllm_config")
#: What the configuration of speculative decoding has.
_SPECULATIVE: Final = ("draft_model_config.model", "uses_draft_model", "method")


class DraftWorker:
    """The draft model of ``worker``, as the modules of this package ask a worker for the model that it serves."""

    def __init__(self, worker: Any):
        self._worker, speculative = worker, worker.vllm_config.speculative_config
        self.model_config: Any = speculative.draft_model_config
        self.weightsync_prefix = "draft_model" if speculative.uses_draft_model() else ""
        self.rank, self.device = worker.rank, worker.device
        #: It holds no adapters, and nothing that was computed with its weights but KV.
        self.model_runner = SimpleNamespace(get_model=worker.model_runner.get_draft_model)

    @property
    def _proposer(self) -> Any:
        return getattr(self._worker.model_runner, "drafter", None)

    @property
    def sealed(self) -> str:
        """Why no second draft can be built; empty if one can."""
        if self._proposer is None:
            return "vLLM's second model runner has no way to build a draft model once more"
        return compat.VLLM.check_object(self._proposer, _PROPOSER)

    @functools.cached_property
    def vllm_config(self) -> Any:
        """The configuration with which vLLM builds the draft, with registries of its own, in which that enters itself.

        Raises `UnsupportedOption` if there is no way to build one.
        """
        if why := self.sealed:
            raise UnsupportedOption(why)
        other = copy.copy(self._proposer)
        other.vllm_config = compat_models.fresh_config(other.vllm_config)
        return other._create_draft_vllm_config()

    def reload_weights(
        self, *, weights_iterator: Iterable[tuple[str, torch.Tensor]], is_checkpoint_format: bool
    ) -> None:
        """As a worker's."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._worker.vllm_config if self.sealed else self.vllm_config):
            compat_models.reload_layers(self.model_runner.get_model(), self.model_config, weights_iterator)


def draft_worker(worker: Any) -> DraftWorker | str:
    """The draft model of a worker; or why nothing can be pushed into that, empty if there is none."""
    if getattr(worker.model_runner, "get_draft_model", lambda: None)() is None:
        return ""
    return compat.VLLM.check_object(worker.vllm_config.speculative_config, _SPECULATIVE) or DraftWorker(worker)


def has_own_checkpoint(config: Any) -> bool:
    """Whether the draft of an engine has a checkpoint of its own; otherwise its layers are in the model's (MTP)."""
    paths = (config.model_config.model, config.speculative_config.draft_model_config.model)
    if config.speculative_config.uses_draft_model():
        return True
    return len({os.path.realpath(path) if os.path.exists(path) else path for path in paths}) > 1
