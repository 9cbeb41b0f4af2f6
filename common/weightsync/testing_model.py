"""The model of the reference engine, see `weightsync.testing`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, LoraHooks
from weightsync.engine.drafts import WithDraft
from weightsync.engine.expected_checkpoint import expected_of
from weightsync.tensors.layout import differing, digest_of
from weightsync.testing_lora import ModelLora


class Answer(NamedTuple):
    """Tokens, and the log probability of each, by the model and by its draft model, if it has one."""

    tokens: list[int]
    logprobs: list[float]
    drafted: list[float]


class ModelAdapter:
    """Adapter of a transformers model whose checkpoint names are its parameter names (dense models).

    ``draft`` is that of its draft model, if it has one.
    """

    rank = 0
    _draft: ModelAdapter | None = None

    def __init__(self, folder: Path, device: torch.device, draft: ModelAdapter | None = None):
        from transformers import AutoModelForCausalLM

        self._folder, self._draft = folder, draft
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device).eval()
        self.device: torch.device = self.model.device  # with its number, if it is a GPU
        self.lora = ModelLora(self.model)

    def expected(self) -> Expected:
        """What a complete push consists of: the checkpoint in the model's folder."""
        return expected_of(str(self._folder), None, self.model.dtype)

    def drafting(self) -> Adapter | str:
        """Both, if there is a draft model."""
        return "" if self._draft is None else WithDraft(self, self._draft)

    def loader_hooks(self) -> LoaderHooks | str:
        """`load`, with nothing to do before or after it."""
        return LoaderHooks(self.model, self.load, contextlib.nullcontext)

    def lora_hooks(self) -> LoraHooks:
        """Adapters of any linear layers."""
        return self.lora

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor over the model's tensor of the same name."""
        for name, tensor in weights:
            module, _, own = name.rpartition(".")
            found = getattr(self.model.get_submodule(module), own)
            found.copy_(tensor)

    def digest(self) -> str:
        """Digest of the model's state."""
        return digest_of(self.model.state_dict().items())

    def differing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """What differs in a copy of the model's state after loading ``weights``."""
        fresh = copy.deepcopy(self.model.state_dict())
        for name, tensor in weights:
            fresh[name].copy_(tensor)
        return differing(fresh.items(), self.model.state_dict().items())

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], tokens: int) -> Answer:
        """Greedy continuation of ``prompt`` by ``tokens`` tokens."""
        sequence, logprobs, drafted = list(prompt), [], []
        for _ in range(tokens):
            found = self._next(sequence)
            best = int(found.argmax())
            logprobs.append(float(found[best]))
            if self._draft is not None:
                drafted.append(float(self._draft._next(sequence)[best]))
            sequence.append(best)
        return Answer(sequence[len(prompt) :], logprobs, drafted)

    def _next(self, sequence: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.model(torch.tensor([sequence], device=self.device)).logits[0, -1]
        return logits.float().log_softmax(-1)
