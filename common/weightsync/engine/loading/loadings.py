"""The two ways of one rank to load: its model alone, or with a draft model that has a checkpoint of its own.

Each has a load plan and a standby. Those of the way that is not taken are given up with the next push that goes the
other way: two standbys would hold the model's weights three times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import UNSET, structs

from weightsync.engine.adapter import Adapter
from weightsync.engine.drafts import check_order
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.errors import ManifestMismatch
from weightsync.protocol.draft import DraftList, of_draft
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec, UpdateRequest
from weightsync.tensors.layout import Layout, listed
from weightsync.tensors.scattered import Stream

_NONE: Final = (
    "it has none with a checkpoint of its own (--speculative-config in vLLM, --speculative-draft-model-path in SGLang; "
    "layers for multi-token prediction in the model's checkpoint are pushed with the model)"
)


class Loadings:
    """The ways of one rank. ``current`` is the one that the last push went. As `Loading`, but for `keep`, all methods
    belong to the engine's loop."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._alone = self.current = Loading(adapter)
        #: With the draft, or why there is none; made when it is first asked for.
        self._drafting: Loading | str | None = None

    def _with_draft(self) -> Loading | str:
        if self._drafting is None:
            found = self._adapter.drafting()
            self._drafting = found if isinstance(found, str) else Loading(found)
        return self._drafting

    def of(self, specs: Sequence[TensorSpec], *, dirty: bool = False) -> Loading:
        """The way that a push of these tensors goes; of none, the way of the push before.

        Raises `ManifestMismatch` for a draft model if the engine has none, and for a model without one if the engine is
        ``dirty`` after a push of both: it would serve that with a draft that holds parts of two versions.
        """
        names = [spec.name for spec in specs]
        drafts = [name for name in names if of_draft(name)]
        if not names:
            return self.current
        if not drafts:
            if dirty and self.current is not self._alone:
                raise ManifestMismatch("a push with a draft model failed half-way; push both again, with draft=")
            return self._alone
        found = self._with_draft()
        if isinstance(found, str):
            raise ManifestMismatch(f"the engine takes no draft model ({listed(drafts)}): {found or _NONE}")
        check_order(names)
        return found

    def accept(self, request: UpdateRequest, *, dirty: bool) -> Layout:
        """See `Loading.accept`; the push goes its way from now on. Raises as `of`."""
        way = self.of(request.manifest, dirty=dirty)
        layout = way.accept(request.manifest, request.known, request.push, request.kept, request.domains)
        self.go(way)
        return layout

    def go(self, way: Loading) -> Loading:
        """Take this way from now on."""
        if way is not self.current:
            self.current.ahead.stop()
            self.current.standby.release()
            self.current = way
        return way

    def take(self, staged: Staged | None) -> Loading:
        """Take the way of a stage from now on; of none, the way of the push before."""
        specs = () if staged is None else staged.layout.specs
        if not specs:
            return self.current
        # It was accepted, so a draft's tensors are the last ones: this is asked in the pause, where all take too long.
        found = self._drafting if of_draft(specs[-1].name) else self._alone
        assert isinstance(found, Loading), "a push with a draft model was accepted"
        return self.go(found)

    def expected(self) -> ExpectedReply:
        """See `Loading.expected`; with the tensors of a draft model, if the engine takes one."""
        reply, found = self._alone.expected(), self._with_draft()
        if isinstance(found, str):
            return structs.replace(reply, draft=DraftList(why=found)) if found else reply
        both = found.expected()
        tensors = tuple(spec for spec in both.tensors if of_draft(spec.name))
        optional = tuple(name for name in both.optional if of_draft(name))
        served = {**reply.served, **{name: dtype for name, dtype in both.served.items() if of_draft(name)}}
        draft = DraftList(tensors, optional, both.why) if tensors or both.why else UNSET
        return structs.replace(reply, served=served, draft=draft)

    def keep(self, stages: Iterable[Stream]) -> None:
        """See `Loading.keep`, of both ways."""
        stages = list(stages)
        for way in (self._alone, self._drafting):
            if isinstance(way, Loading):
                way.keep(stages)

    def digest(self) -> str:
        """See `Adapter.digest`; with that of a draft model which can be pushed."""
        found = self._adapter.drafting()
        return (self._adapter if isinstance(found, str) else found).digest()
