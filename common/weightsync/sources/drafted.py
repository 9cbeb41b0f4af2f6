"""A model and its draft model as one source: the draft's tensors come last, under names of their own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from weightsync.errors import SourceError
from weightsync.protocol.draft import PREFIX, in_push, of_draft
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import Source
from weightsync.sources.iterator import IteratorSource
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import listed


class DraftedSource:
    """The tensors of ``target``, then those of ``draft``. Raises `SourceError` for an iterator."""

    specs: tuple[TensorSpec, ...]

    def __init__(self, target: Source, draft: Source):
        for source in (target, draft):
            if isinstance(source, IteratorSource):
                raise SourceError("draft: push modules or mappings; an iterator's tensors come without their models")
        if marked := [spec.name for spec in target.specs if of_draft(spec.name)]:
            raise SourceError(f"{listed(marked)}: names that begin with {PREFIX!r} are those of a draft model")
        self.parts_of = target, draft
        self.specs = (*target.specs, *in_push(draft.specs))
        self._identity: tuple[object, object] | None = None

    @property
    def device(self) -> torch.device:
        """See `Source`."""
        return self.parts_of[0].device

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """See `Source`."""
        target, draft = (source.held for source in self.parts_of)
        specs = in_push(shards.spec for shards in draft)
        return (*target, *(shards._replace(spec=spec) for shards, spec in zip(draft, specs, strict=True)))

    def identity(self) -> object | None:
        """See `Source.identity`."""
        target, draft = (source.identity() for source in self.parts_of)
        if target is None or draft is None:
            return None
        known = self._identity
        if known is None or known[0] is not target or known[1] is not draft:
            self._identity = target, draft
        return self._identity

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        return itertools.chain.from_iterable(source.tensors() for source in self.parts_of)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        return itertools.chain.from_iterable(source.parts() for source in self.parts_of)


def parts_of(source: Source) -> tuple[Source, ...]:
    """The sources that a source is made of: itself, or those of a model and its draft."""
    return source.parts_of if isinstance(source, DraftedSource) else (source,)
