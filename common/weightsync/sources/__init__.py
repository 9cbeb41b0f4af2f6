"""Sources: one interface to read a trainer's weights, whatever holds them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from weightsync.errors import SourceError, UnsupportedOption
from weightsync.sources.base import Source
from weightsync.sources.checkpoint import CheckpointSource
from weightsync.sources.drafted import DraftedSource
from weightsync.sources.dtensor import LocalShard
from weightsync.sources.fused import Fused, FusedSource, Rule
from weightsync.sources.iterator import IteratorSource
from weightsync.sources.lora import open_lora
from weightsync.sources.mapping import MappingSource, Remembered
from weightsync.sources.module import ModuleSource
from weightsync.sources.weight_source import WeightSourceAdapter, is_weight_source

__all__ = ["Fused", "LocalShard", "Rule", "Source", "Sources", "open_source"]


def open_source(model: object, *, reuse: Source | Remembered | None = None) -> Source:
    """Open ``model`` as a source, without copying its weights.

    ``model`` is a `torch.nn.Module` (one of transformers is sent with the names and layouts that ``save_pretrained``
    would write), a mapping of names to tensors, DTensors or `LocalShard`, a folder of safetensors files, an object in
    the shape of vLLM's ``WeightSource``, an iterator of pairs of a name and a tensor, or `Fused`.

    ``reuse`` only saves time. A source that was opened earlier is returned if it reads this very module, and no name,
    shape, dtype, stride, tie or shard has changed since. What is remembered of a mapping is used if this one matches.

    Raises `SourceError` for any other object, and for a tensor that cannot be sent, naming it.
    """
    if isinstance(model, torch.nn.Module):
        return reuse if isinstance(reuse, ModuleSource) and reuse.reads(model) else ModuleSource(model)
    if isinstance(model, (str, Path)):
        return CheckpointSource(model)
    if isinstance(model, Mapping):
        return MappingSource(model, reuse if isinstance(reuse, Remembered) else None)
    if isinstance(model, Fused):
        return FusedSource(model)
    if is_weight_source(model):
        return WeightSourceAdapter(model)
    if isinstance(model, Iterator):
        return IteratorSource(model)
    raise SourceError(
        f"cannot read weights from {type(model).__module__}.{type(model).__qualname__}; push a torch.nn.Module, a "
        "mapping of names to tensors, a folder of safetensors files, an iterator of pairs of a name and a tensor, or "
        "an object with metadata() and iteration in the shape of vLLM's WeightSource"
    )


class Sources:
    """The sources of one sender; the modules or mappings that were opened last cost less to open again."""

    def __init__(self) -> None:
        #: Of the model, and of its draft.
        self._known: list[Source | Remembered | None] = [None, None]
        self._drafted: DraftedSource | None = None

    def open(self, model: object, lora: str | None, draft: object | None = None) -> Source:
        """As `open_source`, of the model or also of its draft; or as `lora.open_lora` with ``lora``."""
        if lora is not None:
            if draft is not None:
                raise UnsupportedOption("draft: an adapter is pushed alone; push the draft with the weights")
            return open_lora(model, lora)
        target = self._open(0, model)
        if draft is None:
            self._drafted = None
            return target
        both = target, self._open(1, draft)
        if self._drafted is None or any(map(operator.is_not, self._drafted.parts_of, both)):
            self._drafted = DraftedSource(*both)
        return self._drafted

    def _open(self, which: int, model: object) -> Source:
        source = open_source(model, reuse=self._known[which])
        # Other sources might keep a whole gathered model alive until the next push.
        self._known[which] = source if isinstance(source, ModuleSource) else None
        if isinstance(source, MappingSource):
            self._known[which] = source.seen
        return source
