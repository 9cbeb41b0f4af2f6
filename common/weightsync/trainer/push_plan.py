"""Trainer side: what a push consists of and how its bytes are to travel, worked out before any engine hears of it."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import torch

from weightsync.memory import arenas, shared_parameters
from weightsync.protocol import http
from weightsync.sources import Source
from weightsync.sources.mapping import MappingSource
from weightsync.sources.module import ModuleSource
from weightsync.sources.weight_source import WeightSourceAdapter
from weightsync.tensors import digest
from weightsync.tensors.layout import Layout
from weightsync.trainer import buckets
from weightsync.trainer.buckets import Choice, Staging, choose
from weightsync.trainer.engines import Fleet
from weightsync.trainer.ranks.coordinator import Crew
from weightsync.trainer.transfer import Carrier


class Options(NamedTuple):
    """What a `sender.Sender` was told of every push."""

    timeout_s: float
    staging: Staging
    verify: http.Verify
    keep: bool
    bucket_bytes: int | None


class Prepared(NamedTuple):
    """A push. ``lent`` are all tensors where they are read in place, ``mark`` is `Source.mark`; ``shared``: the
    processes of the trainer fill one arena together."""

    request: http.UpdateRequest
    layout: Layout
    choice: Choice
    lent: list[torch.Tensor] | None
    mark: object | None
    shared: bool


class Preparation:
    """Of one sender; what stays the same from push to push is worked out once."""

    def __init__(self, fleet: Fleet, options: Options, crew: Crew | None):
        self._fleet, self._options, self._crew = fleet, options, crew
        self._layout: Layout | None = None
        #: Whether several processes fill the arena.
        self._shared = False
        self._chosen: Choice | None = None
        #: The source that was looked at last, where arenas were then, and its tensors if they can be lent.
        self._looked: tuple[object | None, torch.device | None, list[torch.Tensor] | None] = (None, None, None)

    def choose_again(self) -> None:
        """Other ranks take part, or there is another arena: how the bytes travel may change."""
        self._chosen = None

    def of(self, source: Source, carrier: Carrier) -> Prepared:
        """What a push of ``source`` is. Raises `SourceError`, or `UnsupportedOption` for what nobody has room for."""
        manifest, shared = source.specs, False
        if self._crew is not None:
            split = self._crew.planned(source)
            # What rank 0 holds whole it sends as if it were alone, unless making its tensors takes the others.
            alone = not any(split.pieces[1:]) and split.manifest == source.specs
            shared = not alone or isinstance(source, WeightSourceAdapter)
            manifest = split.manifest
        mark = None if shared else source.mark()
        lent = None if shared else self._lent(source, carrier, mark)
        layout = self._layout_of(manifest, shared)
        choice = self._choose(carrier, layout) if lent is None else buckets.in_place(layout.nbytes)
        return Prepared(self._request(carrier, source, layout, choice), layout, choice, lent, mark, shared)

    def _lent(self, source: Source, carrier: Carrier, mark: object | None) -> list[torch.Tensor] | None:
        """All tensors, if every rank can read them where they are and nobody will want them after the push."""
        here, options = arenas.process_space(), self._options
        alone = self._fleet.peers.keys() == {"ipc_zmq"} and all(r.process_space == here for r in self._fleet.ranks)
        if not alone or options.keep or options.staging == "none" or options.bucket_bytes is not None:
            return None
        if not isinstance(source, (MappingSource, ModuleSource)):
            return None  # it makes its tensors as it is read, and beginning to only look may cost a gather
        seen, device, lent = self._looked
        if mark is None or mark is not seen or carrier.device != device:
            lent = shared_parameters.find(source.tensors(), carrier.device, carrier.lent)
            self._looked = mark, carrier.device, lent
        return lent

    def _layout_of(self, manifest: tuple[http.TensorSpec, ...], shared: bool) -> Layout:
        if self._layout is None or self._layout.specs != manifest or shared != self._shared:
            self._layout, self._shared = Layout(manifest), shared
            self._chosen = None
        return self._layout

    def _choose(self, carrier: Carrier, layout: Layout) -> Choice:
        """How the bytes travel; it stays while the model does."""
        if self._chosen is None:
            ranks, here, options = self._fleet.ranks, carrier.device.type, self._options
            free = min([carrier.free_bytes(), *(rank.free_bytes for rank in ranks if rank.device == here)])
            self._chosen = choose(
                layout.nbytes, free, buckets.stage_bytes(ranks), options.bucket_bytes, options.staging, options.keep,
                self._shared,
            )  # fmt: skip
        return self._chosen

    def _request(self, carrier: Carrier, source: Source, layout: Layout, choice: Choice) -> http.UpdateRequest:
        """What every engine is told of a push; the transport adds where to come for the bytes."""
        devices = [source.device, carrier.device, *(torch.device(rank.device) for rank in self._fleet.ranks)]
        options = self._options
        return http.UpdateRequest(
            push=secrets.token_hex(8), address="", secret="", bucket_bytes=choice.bucket_bytes,
            timeout_s=options.timeout_s, manifest=layout.specs,
            owner=self._fleet.owner, holder=self._fleet.holder, verify=options.verify,
            digest="" if options.verify == "off" else digest.algorithm_for(*devices),
            keep=options.keep, stream=choice.staging == "none", slots=choice.slots,
            known=layout.name,
            # An engine's own loader takes all there is.
            parts=choice.staging != "none" and options.verify != "deep",
        )  # fmt: skip
