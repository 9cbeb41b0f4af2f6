"""Works out what a push consists of and how its bytes travel, before any engine is contacted."""

from __future__ import annotations

import secrets
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import NamedTuple, get_args

import torch
from msgspec import structs

from weightsync.deadline import Deadline
from weightsync.errors import SourceError, UnsupportedOption
from weightsync.memory import arenas, shared_parameters
from weightsync.protocol import http
from weightsync.protocol.control import ANY_ORDER_MINOR, SEVERAL_HOSTS_MINOR, SHARED_SHARDS_MINOR
from weightsync.protocol.draft import DRAFT_MINOR
from weightsync.protocol.expected import ExpectedReply
from weightsync.sources import Source
from weightsync.sources.base import finish
from weightsync.sources.drafted import DraftedSource
from weightsync.sources.iterator import Fitting, IteratorSource, Placed
from weightsync.tensors import digest
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversions
from weightsync.tensors.domains import layout_of
from weightsync.tensors.layout import ALIGN_BYTES, Layout, Table, listed
from weightsync.trainer import buckets
from weightsync.trainer.buckets import Choice, Staging, choose, have_spare
from weightsync.trainer.deltas import Delta, Deltas
from weightsync.trainer.engines import Engines
from weightsync.trainer.fit import Fit, fit, fitting
from weightsync.trainer.ranks import Coordinator
from weightsync.trainer.ranks.assembly import CheckReplicas
from weightsync.trainer.ranks.assignment import Plan
from weightsync.trainer.ranks.gathering import Gathering
from weightsync.trainer.ranks.in_place import lasting
from weightsync.trainer.ranks.together import together
from weightsync.trainer.transfer import Transfer
from weightsync.transports import registry


class Options(NamedTuple):
    """The arguments of a `sender.Sender`, which hold for every push; ``keep``: its ``keep_previous`` is True.

    The names by which engines know the pushes begin with ``prefix``.
    """

    timeout_s: float
    transport: str
    pause: http.PauseMode
    staging: Staging
    verify: http.Verify
    keep: bool
    bucket_bytes: int | None
    progress: bool
    address: str
    check_replicas: CheckReplicas
    delta: Delta = "auto"
    prefix: str = ""

    def of_all_ranks(self, urls: Sequence[str]) -> dict[str, str]:
        """What must be the same in every rank of a trainer: of deadlines the earliest counts."""
        own = {name: repr(value) for name, value in self._asdict().items() if name not in ("timeout_s", "progress")}
        return {"weightsync": http.package_version(), **({"engines": ", ".join(urls)} if urls else {}), **own}

    def check(self) -> None:
        """Raise `UnsupportedOption` for values that no engine could make good."""
        for name, value, known in (
            ("transport", self.transport, ("auto", *registry.names())),
            ("pause", self.pause, get_args(http.PauseMode)),
            ("staging", self.staging, get_args(Staging)),
            ("verify", self.verify, get_args(http.Verify)),
            ("check_replicas", self.check_replicas, get_args(CheckReplicas)),
            ("delta", self.delta, get_args(Delta)),
        ):
            if value not in known:
                raise UnsupportedOption(f"{name} {value!r} is unknown; use one of {', '.join(known)}")
        if self.bucket_bytes is not None and self.bucket_bytes < ALIGN_BYTES:
            raise UnsupportedOption(f"bucket_bytes must be at least {ALIGN_BYTES}")
        if self.staging == "none" and (self.keep or self.verify == "deep"):
            raise UnsupportedOption('staging "none" holds no version, which keep_previous and verify "deep" need')
        if not 0 < self.timeout_s <= http.MAX_TIMEOUT_S:
            raise UnsupportedOption(f"timeout_s must be above 0 and at most {http.MAX_TIMEOUT_S:g}")


class PushPlan(NamedTuple):
    """A push of ``source``.

    ``shared`` are its tensors if engines read them in place, else None. ``identity`` is that of `Source.identity`.
    ``conversions`` are those of the trainer's tensors, by the number of the first tensor that crosses. ``ranks``
    coordinates the trainer's ranks if they fill one arena together, else it is None. ``dropped`` are names that an
    iterator may yield, and that are not sent; ``fitting`` says what crosses of each tensor that it yields.
    """

    source: Source
    request: http.UpdateRequest
    layout: Layout
    choice: Choice
    shared: list[torch.Tensor] | None
    identity: object | None
    conversions: Conversions
    ranks: Coordinator | None
    dropped: Set[str] = frozenset()
    fitting: Fitting | None = None


class Planner:
    """Plans the pushes of one sender; what stays the same from push to push is worked out once."""

    def __init__(self, engines: Engines, options: Options, ranks: Coordinator | None):
        self._engines, self._options, self._ranks = engines, options, ranks
        self.deltas = Deltas(engines, options.delta)
        self._layout: Layout | None = None
        self._gathering = Gathering()
        #: Whether several processes fill the arena.
        self._assembled = False
        #: Whether the trainer's ranks have pushed in the background, which copies what they hold.
        self._early = False
        self._chosen: Choice | None = None
        #: The layout of what the last iterator yielded, if that was not everything.
        self._placed = Layout(())
        #: The last fit, and the manifest, patterns and engines' lists that it was worked out from.
        self._last_fit = Fit((), NO_CONVERSIONS)
        self._fit_for: tuple[tuple[http.TensorSpec, ...], tuple[str, ...], tuple[ExpectedReply, ...]] = ((), (), ())
        #: The identity of the last source checked for sharing, the arenas' device then, and its tensors if shareable.
        self._checked: tuple[object | None, torch.device | None, list[torch.Tensor] | None] = (None, None, None)

    @property
    def knows_domains(self) -> bool:
        """Whether every engine can map what each process of a trainer holds."""
        least = http.PROTOCOL[0], SHARED_SHARDS_MINOR
        return all(engine.hello.protocol >= least for engine in self._engines.by_url.values())

    def forget(self) -> None:
        """Give back the memory in which a trainer's ranks put tensors together: one of them may still write there."""
        self._gathering.close()

    def choose_again(self) -> None:
        """Choose buckets and staging anew for the next push: the ranks or the arena have changed."""
        self._chosen = None

    def of(
        self,
        source: Source,
        transfer: Transfer,
        deadline: Deadline,
        allow_missing: Sequence[str] = (),
        again: bool = False,
        early: bool = False,
    ) -> PushPlan:
        """Plan a push of ``source``; asks the engines what they expect, once. ``allow_missing`` as in `fit.fit`.

        ``again``: this call has planned it before, and the trainer's ranks may have gone on since. ``early``: they wait
        for nothing but for their tensors to be read.

        Raises `SourceError`, `ManifestMismatch`, or `UnsupportedOption` if memory does not suffice.
        """
        split = together(self._ranks, source, self._options.check_replicas, deadline, again=again)
        assembled, manifest = split is not None, source.specs if split is None else split.manifest
        if not manifest:
            raise SourceError("the mapping holds no tensors; there is nothing to send")
        if isinstance(source, DraftedSource):
            self.check_protocol(DRAFT_MINOR, "takes no draft model with the model")
        manifest, conversions, kept = self._fit(manifest, allow_missing, deadline)
        quantised = [each.source.name for each in conversions.values() if each.format is not None]
        if assembled and quantised and self._ranks is not None and split is not None:
            source = self._gathering.of(self._ranks, source, split.manifest, quantised, deadline)
            assembled = False
        identity = None if assembled else source.identity()
        shared, table = None, Table()
        if not assembled:
            shared = None if conversions else self._share(source, transfer, identity)
        elif self._ranks is not None and split is not None:
            # A copied push and one that is read in place have other layouts, each with a load plan of its own.
            self._early |= early
            offer = (
                None
                if conversions or self._early
                else self._share_parts(self._ranks, split, source, transfer, deadline)
            )
            shared, table = offer if offer is not None else (None, self._ranks.domains.divided(split))
        layout = self._layout_of(manifest, assembled, table)
        on_gpu = transfer.device.type == "cuda"
        choice = (
            self._choose(transfer, layout) if shared is None else buckets.read_in_place(layout.nbytes, on_gpu=on_gpu)
        )
        self._check_kept(kept)
        if table and shared is None:
            self._check_domains(choice)
        request = self.request(transfer, source, layout, choice, kept)
        ranks = self._ranks if assembled else None
        return PushPlan(source, request, layout, choice, shared, identity, conversions, ranks)

    def of_iterator(
        self, source: IteratorSource, transfer: Transfer, deadline: Deadline, allow_missing: Sequence[str] = ()
    ) -> PushPlan:
        """Plan a push of all that the engines expect. ``allow_missing`` as in `of`.

        The arena holds all of it, so that `placed` can make a push of what has come; or if it may not, the tensors are
        sent as they come. Raises `UnsupportedOption` if an engine has no list, or cannot take them in any order.
        """
        options = self._options
        lists = self._engines.expected(deadline)
        for url, reply in lists.items():
            if not reply.tensors:
                raise UnsupportedOption(
                    f"{url} has no list of the tensors of a complete push, which an iterator needs "
                    f"({reply.why or 'its weightsync is of an earlier release'}); push a module or a mapping"
                )
        first = next(iter(lists.values()))
        specs = tuple(structs.replace(s, dtype=first.served.get(s.name, s.dtype)) for s in first.tensors)
        layout = self._layout_of(self._fit(specs, allow_missing, deadline).manifest, False)
        choice, dropped = self._choose(transfer, layout), frozenset[str]()
        if choice.staging == "none":
            raise UnsupportedOption(
                f"an iterator's tensors are loaded once all have come, and a stage is excluded: {choice.reason}; push "
                "a module or a mapping"
            )
        in_turn = options.keep or options.bucket_bytes is not None or choice.slots * choice.bucket_bytes < layout.nbytes
        if in_turn:
            self._check_in_turn(allow_missing)
            dropped = frozenset.intersection(*(frozenset(reply.optional) for reply in lists.values()))
            layout = self._layout_of(tuple(spec for spec in layout.specs if spec.name not in dropped), False)
            choice = self._choose(transfer, layout)
        request = self.request(transfer, source, layout, choice, ())
        if in_turn:
            request = structs.replace(request, any_order=True, parts=False)
        found = fitting(lists).crossing
        return PushPlan(source, request, layout, choice, None, None, NO_CONVERSIONS, None, dropped, found)

    def arenas(self, transfer: Transfer, deadline: Deadline) -> tuple[int, int]:
        """The size and the number of arenas for a push of what engines expect; 0 bytes if that is unknown."""
        first = next(iter(self._engines.expected(deadline).values()))
        if not first.tensors:
            return 0, 0
        layout = self._layout_of(first.likely(), False)
        choice = self._choose(transfer, layout)
        return buckets.arenas(choice, layout.nbytes, keep=self._options.keep or choice.spare)

    def _check_in_turn(self, allow_missing: Sequence[str]) -> None:
        """Raise `UnsupportedOption` if tensors cannot be sent in the order in which they come."""
        if allow_missing:
            raise UnsupportedOption(
                "which names an iterator lacks is known at its end: allow_missing takes memory for an arena that holds "
                "everything, and excludes keep_previous and bucket_bytes; or push a module or a mapping"
            )
        self.check_protocol(
            ANY_ORDER_MINOR,
            "takes an iterator's tensors only from an arena that holds all of them, without keep_previous and "
            "bucket_bytes",
        )

    def check_protocol(self, minor: int, older: str) -> None:
        """Raise `UnsupportedOption` if an engine speaks an older minor version, which does what ``older`` says."""
        for url, engine in self._engines.by_url.items():
            if engine.hello.protocol < (http.PROTOCOL[0], minor):
                raise UnsupportedOption(
                    f"{url} runs weightsync {engine.hello.package_version}, which {older}; update it"
                )

    def placed(self, plan: PushPlan, found: Placed, deadline: Deadline, allow_missing: Sequence[str]) -> PushPlan:
        """The push of what an iterator has yielded, in the arena of ``plan``. Raises as `of`."""
        kept = self._fit(finish(found.specs, "the iterator"), allow_missing, deadline).kept
        self._check_kept(kept)
        layout = plan.layout
        if found.specs != layout.specs:
            self._placed = layout = self._placed if self._placed.specs == found.specs else Layout(found.specs)
        request = structs.replace(plan.request, manifest=layout.specs, known=layout.name, kept=kept)
        return plan._replace(request=request, layout=layout, conversions=found.conversions)

    def _check_kept(self, kept: tuple[str, ...]) -> None:
        if kept and self._options.verify == "deep":
            raise UnsupportedOption(
                'verify="deep" compares with a fresh engine, which cannot be made without the tensors that '
                f"allow_missing leaves out ({listed(kept)})"
            )

    def _fit(self, manifest: tuple[http.TensorSpec, ...], allow_missing: Sequence[str], deadline: Deadline) -> Fit:
        engines = self._engines.expected(deadline)
        known, patterns, replies = self._fit_for
        same = manifest == known and tuple(allow_missing) == patterns
        if not same or list(map(id, engines.values())) != list(map(id, replies)):
            self._last_fit = fit(manifest, engines, allow_missing)
            self._fit_for = manifest, tuple(allow_missing), tuple(engines.values())
        return self._last_fit

    def _share(self, source: Source, transfer: Transfer, identity: object | None) -> list[torch.Tensor] | None:
        """All tensors, if every rank can read them in place and none needs them after the push; otherwise None."""
        if not self._may_share(source):
            return None
        last, device, shared = self._checked
        if identity is None or identity is not last or transfer.device != device:
            shared = shared_parameters.find(source.tensors(), transfer.device, transfer.shared)
            self._checked = identity, transfer.device, shared
        return shared

    def _share_parts(
        self, ranks: Coordinator, split: Plan, source: Source, transfer: Transfer, deadline: Deadline
    ) -> tuple[list[torch.Tensor], Table] | None:
        """As `_share`, of what all ranks of the trainer hold; with the table of what each does."""
        if not (self.knows_domains and ranks.is_near and self._may_share(source)):
            return None
        return ranks.offers.of(split, source, transfer.device, transfer.shared, deadline)

    def _may_share(self, source: Source) -> bool:
        """Whether the options, the engines and the kind of source allow that parameters are read in place."""
        here, options = arenas.process_space(), self._options
        reachable = self._engines.local and all(rank.process_space == here for rank in self._engines.ranks)
        if not reachable or options.keep or options.staging == "none" or options.bucket_bytes is not None:
            return False
        return lasting(source)

    def _check_domains(self, choice: Choice) -> None:
        """Raise `UnsupportedOption` if an engine cannot take a push from several memory domains."""
        apart = self._ranks is not None and self._ranks.domains.apart
        minor = SHARED_SHARDS_MINOR if apart else SEVERAL_HOSTS_MINOR
        self.check_protocol(minor, f"cannot be pushed to from several {'GPUs' if apart else 'hosts'}")
        if choice.staging == "none":
            raise UnsupportedOption(
                f"the trainer's ranks on several hosts push into a stage, which is excluded: {choice.reason}"
            )

    def _layout_of(self, manifest: tuple[http.TensorSpec, ...], assembled: bool, table: Table = ()) -> Layout:
        known = self._layout
        if known is None or (known.specs, known.table, self._assembled) != (manifest, table, assembled):
            self._layout, self._assembled, self._chosen = layout_of(manifest, table), assembled, None
            return self._layout
        return known

    def expected(self, deadline: Deadline) -> dict[str, ExpectedReply]:
        """What each engine says a complete push is, by URL."""
        return self._engines.expected(deadline)

    def apart(
        self, source: Source, transfer: Transfer, deadline: Deadline
    ) -> tuple[Layout, Choice, Coordinator | None]:
        """Layout and buckets of all of ``source``, an adapter, in an arena beside that of the weights, always with a
        stage; and the trainer's ranks if they fill it together."""
        layout, shared, ranks = Layout(source.specs), None, None
        split = together(self._ranks, source, self._options.check_replicas, deadline)
        if self._ranks is not None and split is not None:
            ranks, layout = self._ranks, layout_of(split.manifest, self._ranks.domains.divided(split))
            shared = layout.domain_bytes(0)
        free, rank_bytes, far = transfer.free_bytes(), buckets.stage_bytes(self._engines.ranks), not self._engines.local
        choice = choose(layout.nbytes, free, rank_bytes, None, "full", False, shared, bool(layout.table), far)
        return layout, choice, ranks

    def _choose(self, transfer: Transfer, layout: Layout) -> Choice:
        """Buckets and staging; kept for as long as the layout is, or until `choose_again`."""
        if self._chosen is None:
            ranks, here, options = self._engines.ranks, transfer.device.type, self._options
            free = min([transfer.free_bytes(), *(rank.free_bytes for rank in ranks if rank.device == here)])
            chosen = choose(
                layout.nbytes,
                free,
                buckets.stage_bytes(ranks),
                options.bucket_bytes,
                options.staging,
                options.keep,
                layout.domain_bytes(0) if self._assembled else None,
                bool(layout.table),
                not self._engines.local,
                here == "cuda" and all(rank.host == arenas.host_id() for rank in ranks),
            )
            spare = here == "cpu" and options.verify != "off" and have_spare(chosen, free)
            spare = spare and self.deltas.are_possible(layout, chosen, keep=options.keep)
            self._chosen = replace(chosen, spare=spare)
        return self._chosen

    def request(
        self, transfer: Transfer, source: Source, layout: Layout, choice: Choice, kept: tuple[str, ...]
    ) -> http.UpdateRequest:
        """The request to every engine; each transport adds its address and secret."""
        devices = [source.device, transfer.device, *(torch.device(rank.device) for rank in self._engines.ranks)]
        options = self._options
        return http.UpdateRequest(
            push=options.prefix + secrets.token_hex(8),
            address="",
            secret="",
            bucket_bytes=choice.bucket_bytes,
            timeout_s=options.timeout_s,
            manifest=layout.specs,
            owner=self._engines.owner,
            holder=self._engines.holder,
            verify=options.verify,
            digest="" if options.verify == "off" else digest.algorithm_for(*devices),
            keep=options.keep,
            stream=choice.staging == "none",
            slots=choice.slots,
            known=layout.name,
            # The engine's own loader, which these use, needs every tensor in full.
            parts=choice.staging != "none" and options.verify != "deep",
            kept=kept,
            domains=layout.table,
        )
