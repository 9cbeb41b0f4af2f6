"""One SGLang scheduler rank as a sink of weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from sglang_weightsync import compat
from weightsync.expected import expected_of
from weightsync.sink import Expected


class SglangSink:
    """See `weightsync.sink.Sink`."""

    def __init__(self, scheduler: Any):
        self._scheduler = scheduler
        self.rank = compat.rank_of(scheduler)
        self.device = compat.device_of(scheduler)

    def expected(self) -> Expected:
        """The checkpoint that the engine was started with."""
        model, revision, dtype = compat.model_source(self._scheduler)
        return expected_of(model, revision=revision, dtype=dtype)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Through SGLang's begin/end session."""
        compat.load(self._scheduler, weights)

    def digest(self) -> str:
        """Of every parameter and buffer."""
        return compat.digest(self._scheduler)

    def fresh_digest(self, weights: Iterable[tuple[str, torch.Tensor]]) -> str:
        """`digest` of a scheduler freshly started on these weights."""
        return compat.fresh_digest(self._scheduler, weights)
