"""LoRA adapters of the reference engine, see `testing`: of any linear layer of the model, one number for each name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from weightsync.errors import ManifestMismatch, UnsupportedOption
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.lora import AdapterId, LoraSpec

_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")


class _Layer(NamedTuple):
    """What an adapter adds to a layer's output."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def __call__(self, _: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output + (inputs[0] @ self.a.T @ self.b.T) * self.scale


class _Adapter:
    """What an adapter adds, by layer; equal to itself alone."""

    def __init__(self, layers: dict[torch.nn.Module | None, _Layer]):
        self.layers = layers


class ModelLora:
    """See `weightsync.engine.adapter.LoraHooks`: the adapters of ``model``, by number."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._served: dict[AdapterId, object] = {}

    def check(self, adapter: LoraSpec, manifest: Sequence[TensorSpec]) -> tuple[str, ...]:
        """See `LoraHooks`."""
        unknown = [spec.name for spec in manifest if not isinstance(self._layer(spec.name), torch.nn.Linear)]
        if unknown:
            raise ManifestMismatch(f"the adapter {adapter.name!r} has tensors for layers that are not there: {unknown}")
        return ()

    def _layer(self, name: str) -> torch.nn.Module | None:
        layer = name.removeprefix(_PREFIX)
        for side in _SIDES:
            layer = layer.removesuffix(side)
        try:
            return self._model.get_submodule(layer)
        except AttributeError:
            return None

    def make(self, adapter: LoraSpec, tensors: Iterable[tuple[str, torch.Tensor]]) -> object:
        """See `LoraHooks`."""
        sides = dict[torch.nn.Module | None, list[torch.Tensor]]()
        dtype = next(self._model.parameters()).dtype
        for name, tensor in sorted(tensors, key=lambda pair: pair[0]):  # A before B
            sides.setdefault(self._layer(name), []).append(tensor.to(dtype, copy=True))
        return _Adapter({layer: _Layer(a, b, adapter.scaling) for layer, (a, b) in sides.items()})

    def served(self, number: AdapterId) -> object | None:
        """See `LoraHooks`."""
        return self._served.get(number)

    def serve(self, number: AdapterId, made: object | None) -> None:
        """See `LoraHooks`."""
        if made is None:
            self._served.pop(number, None)
        else:
            self._served[number] = made

    @contextlib.contextmanager
    def applied(self, number: AdapterId) -> Iterator[None]:
        """Inside the context the model answers with an adapter."""
        made: Any = self._served[number]
        with contextlib.ExitStack() as stack:
            for layer, added in made.layers.items():
                stack.callback(layer.register_forward_hook(added).remove)
            yield


class ReferenceLora:
    """See `weightsync.engine.engine_front_end.ServedLora`."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> AdapterId:
        """See `ServedLora`."""
        if not name:
            raise UnsupportedOption("lora='': this is the name of the model itself")
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def serve(self, name: str, version: str, push: str) -> None:
        """See `ServedLora`."""
        self.versions[name] = version

    def withdraw(self, name: str) -> None:
        """Serve this adapter no more."""
        self.versions.pop(name, None)
