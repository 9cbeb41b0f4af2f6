"""The weights that scenarios push: a few contents of one small model, and the digest of each."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from tests.lora.adapters import make_adapter
from tests.scenarios import adapters
from tools import models
from weightsync.engine.drafts import digest_of_both
from weightsync.protocol.draft import PREFIX, of_draft
from weightsync.tensors.layout import digest_of

#: Several tensors, so that a load can be held midway; small, so that thousands of pushes take minutes.
SHAPES = {
    "embed": (256, 64),
    "query": (64, 64),
    "key": (32, 64),
    "up": (160, 64),
    "down": (64, 160),
    "scale": (64,),
    "norm": (64,),
    "head": (200, 64),
}
#: The same of a draft model, as a push names them.
DRAFT_SHAPES = {PREFIX + name: SHAPES[name] for name in ("embed", "up", "norm")}
#: A real engine loads each of them once, to learn the digests.
CONTENTS = 4


class Tiny(torch.nn.Module):
    """A model without a forward pass; its parameters are its checkpoint."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        for name, shape in shapes.items():
            dtype = torch.float32 if name == "scale" else torch.bfloat16
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


def state_of(content: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The tensors of a content. Of two, the second is what a few steps of an optimiser make of the first."""
    numbers = torch.Generator().manual_seed(content // 2)
    empty = Tiny(shapes).state_dict()
    state = {name: torch.randn(one.shape, generator=numbers).to(one.dtype) for name, one in empty.items()}
    for one in state.values() if content % 2 else ():
        some = torch.randperm(one.numel(), generator=numbers)[: max(1, one.numel() // 50)]
        one.view(-1)[some] += 1
    return state


def digest_in(state: Mapping[str, torch.Tensor]) -> str:
    """What an engine says that holds these tensors."""
    draft = {name.removeprefix(PREFIX): one for name, one in state.items() if of_draft(name)}
    target = digest_of((name, one) for name, one in state.items() if not of_draft(name))
    return digest_of_both(target, digest_of(draft.items())) if draft else target


class TinyWeights:
    """The `CONTENTS` contents of `Tiny`, with ``drafts`` also of its draft; an engine starts with content 0."""

    def __init__(self, scratch: Path, *, drafts: bool = False):
        self._scratch = scratch
        self._shapes = {**SHAPES, **DRAFT_SHAPES} if drafts else SHAPES
        self._states = [state_of(content, self._shapes) for content in range(CONTENTS)]
        #: The digest of an engine that serves each content.
        self.digests = [digest_in(state) for state in self._states]

    def module(self) -> torch.nn.Module:
        """A module as a trainer has it."""
        return Tiny(self._shapes)

    def mapping(self, content: int) -> dict[str, torch.Tensor]:
        """The tensors of a content by name; not to be modified."""
        return self._states[content]

    def copy(self, content: int) -> dict[str, torch.Tensor]:
        """A copy of the tensors of a content."""
        return {name: one.clone() for name, one in self.mapping(content).items()}

    def write(self, model: torch.nn.Module | Mapping[str, torch.Tensor], content: int) -> None:
        """Write a content into ``model`` in place, like a step of an optimiser."""
        state = model.state_dict() if isinstance(model, torch.nn.Module) else model
        with torch.no_grad():
            for name, one in self.mapping(content).items():
                state[name].copy_(one)

    def folder(self, content: int) -> Path:
        """A checkpoint folder."""
        path = self._scratch / f"content-{content}"
        if not path.exists():
            path.mkdir()
            save_file(self._states[content], path / "model.safetensors")
        return path

    def adapter(self, content: int) -> Path:
        """The folder of an adapter."""
        return adapters.folder(self._scratch / f"adapter-{content}", content)

    @functools.cached_property
    def adapter_digests(self) -> list[str]:
        """The digest of each adapter in an engine."""
        return [adapters.digest(self.adapter(content)) for content in range(CONTENTS)]

    def iterable(self, content: int) -> Described:
        """An object in the shape of vLLM's ``WeightSource``."""
        return Described(self.mapping(content))


class RealWeights(TinyWeights):
    """Contents of a small transformers model, for vLLM and SGLang; ``digests`` and ``answers`` come from the engine."""

    def __init__(self, scratch: Path):
        self._scratch = scratch
        for content in range(CONTENTS):
            models.make_model(self.folder(content), "qwen3", seed=content)
        self._states = [load_file(self.folder(content) / "model.safetensors") for content in range(CONTENTS)]
        self.digests = []
        #: What the engine answers, by the contents of its weights and its adapter: the logprobs of a few tokens.
        self.answers: dict[tuple[int, int], list[float]] = {}

    def adapter(self, content: int) -> Path:
        """The folder of an adapter."""
        path = self._scratch / f"adapter-{content}"
        return path if path.exists() else make_adapter(path, self.folder(0), seed=content)

    def folder(self, content: int) -> Path:
        """A checkpoint folder, created at the start."""
        return self._scratch / f"content-{content}"

    def module(self) -> torch.nn.Module:
        """The module that transformers loads."""
        return models.load_reference(self.folder(0))


class Described:
    """A source in the shape of vLLM's ``WeightSource``."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        self._state = state

    def metadata(self) -> list[SimpleNamespace]:
        """Name, dtype and shape of every tensor."""
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in self._state.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._state.items())
