"""The adapters that scenarios push, and how reference engines hold them: their answer is the digest of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import requests
import torch
from safetensors.torch import load_file, save_file

from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import AdapterId, LoraSpec
from weightsync.tensors.layout import digest_of
from weightsync.testing_lora import ModelLora

#: The one adapter that scenarios push.
NAME = "policy"
_RANK, _LAYERS = 4, {"query": (64, 64), "up": (160, 64), "down": (64, 160)}


def folder(path: Path, content: int) -> Path:
    """The folder of an adapter of this content, as PEFT would write it."""
    if not path.exists():
        numbers = torch.Generator().manual_seed(content)
        sides = {
            f"base_model.model.{layer}.lora_{side}.weight": torch.randn(shape, generator=numbers)
            for layer, (out, width) in _LAYERS.items()
            for side, shape in (("A", (_RANK, width)), ("B", (out, _RANK)))
        }
        path.mkdir()
        save_file(sides, path / "adapter_model.safetensors")
        said = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 8, "target_modules": list(_LAYERS)}
        (path / "adapter_config.json").write_text(json.dumps(said))
    return path


def digest(path: Path) -> str:
    """The digest of an engine's adapter that was pushed from this folder."""
    return _digest(load_file(path / "adapter_model.safetensors").items())


def _digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    return digest_of(sorted(tensors))


def served(url: str, timeout_s: float) -> str:
    """The digest of the adapter that an engine answers with; empty if it does not answer with one."""
    answer = requests.post(f"{url}/generate", json={"prompt": [], "tokens": 0, "adapter": NAME}, timeout=timeout_s)
    return bytes(answer.json()["tokens"]).hex() if answer.ok else ""


class _Held:
    """The tensors of an adapter; equal to itself alone."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]):
        self.tensors = [(name, tensor.clone()) for name, tensor in tensors]


class TinyLora(ModelLora):
    """Adapters of a model without layers, of which `answer` is the digest of the one that is asked for."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Module())
        self._asked: _Held | None = None

    def check(self, adapter: LoraSpec, manifest: Sequence[TensorSpec]) -> tuple[str, ...]:
        """Any fits."""
        return ()

    def make(self, adapter: LoraSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Copies."""
        return _Held(tensors)

    @contextlib.contextmanager
    def applied(self, number: AdapterId) -> Iterator[None]:
        """Inside the context this adapter is asked for."""
        self._asked = self._served[number]
        yield
        self._asked = None

    def answer(self) -> list[int]:
        """The digest of the adapter that is asked for, byte by byte."""
        assert self._asked is not None
        return list(bytes.fromhex(_digest(self._asked.tensors)))
