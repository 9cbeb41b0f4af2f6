"""What a complete push to an engine is, as one rank sees it: names, shapes and dtypes.

The checkpoint that the engine was started with says so; without one, the recording of the loader has to show that every
parameter is loaded as a whole. A tensor may come in another dtype than the checkpoint's if it is that of its parameter
and the load plan only copies it there: the loader would have done no more than to cast it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from msgspec import UNSET, structs

from weightsync.engine.adapter import Adapter, Expected, LoaderHooks
from weightsync.engine.coverage import packed, passed_over
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.loading.recorded import Recording
from weightsync.engine.loading.recording import record
from weightsync.engine.loading.sliced_recording import SlicedRecording
from weightsync.errors import ManifestMismatch
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.protocol.model_status import ModelStatus
from weightsync.protocol.rank_replies import Accepted
from weightsync.tensors.layout import CASTABLE, check_manifest, digest_of, dtype_name, listed, named, wrong_dtypes

logger = logging.getLogger(__name__)


class Stays(NamedTuple):
    """What a push leaves as the engine has it: a digest of what this rank holds of each tensor, empty where that cannot
    be read; and the parameters that these are loaded into."""

    digests: dict[str, str]
    parameters: frozenset[str] = frozenset()


class Complete:
    """What a complete push to the engine of ``adapter`` is."""

    def __init__(self, adapter: Adapter):
        self._adapter = adapter
        self._expected: Expected | ManifestMismatch | None = None
        #: What `reply` has found last.
        self._listed: ExpectedReply | None = None
        #: The last recording for it, and what that has shown once it has ended.
        self._recording: SlicedRecording[Recording] | None = None
        self._targets: dict[str, set[str]] | None = None

    def known(self) -> Expected | ManifestMismatch:
        """The engine's checkpoint; or why it cannot be determined."""
        if self._expected is None:
            try:
                self._expected = self._adapter.expected()
            except ManifestMismatch as error:
                self._expected = error
        return self._expected

    def reply(self) -> ExpectedReply:
        """This rank's part of the reply to the trainer: rank 0 has the list, every rank the dtypes of its parameters.

        Records the loader if parameters may have other dtypes than the checkpoint; raises `Unfinished` meanwhile.
        """
        found = self.known()
        if isinstance(found, ManifestMismatch):
            return ExpectedReply(why=str(found))
        quantization = UNSET if found.quantization is None else found.quantization
        optional, served = tuple(sorted(found.optional)), self._served(found)
        self._listed = ExpectedReply(found.specs, optional, served, quantization=quantization)
        return ExpectedReply(served=served) if self._adapter.rank else self._listed

    def likely(self) -> tuple[TensorSpec, ...]:
        """See `ExpectedReply.likely`; empty if that is unknown."""
        if self._listed is None:
            self.reply()
        return self._listed.likely() if self._listed is not None else ()

    def _served(self, expected: Expected) -> dict[str, str]:
        hooks = self._adapter.loader_hooks()
        if not isinstance(hooks, LoaderHooks):
            return {}
        here = {dtype_name(each.dtype) for each in (*hooks.model.parameters(), *hooks.model.buffers())} & CASTABLE
        if here == {spec.dtype for spec in expected.specs} & CASTABLE and len(here) == 1:
            return {}
        targets = self._recorded(hooks, expected.specs)
        return {
            spec.name: dtype
            for spec in expected.specs
            if spec.dtype in CASTABLE
            for dtype in targets.get(spec.name, ())
            if targets[spec.name] == {dtype} and dtype in CASTABLE - {spec.dtype}
        }

    def _recorded(self, hooks: LoaderHooks, specs: Sequence[TensorSpec]) -> dict[str, set[str]]:
        """See `_copied_to`: recorded again if the model's memory has moved; empty if it cannot be recorded."""
        found, device = self._recording, self._adapter.device
        if found is None or found.memory.model is not hooks.model or not found.memory.is_unmoved():
            if found is not None:
                found.stop()
            found = SlicedRecording(hooks.model, lambda memory: record(hooks, specs, device, memory))
            self._recording, self._targets = found, None
        if self._targets is None:
            try:
                self._targets = _copied_to(found.result(self._adapter.rank))
            except Unfinished:
                raise
            except Exception as error:
                logger.info("loading the checkpoint cannot be recorded: %s", error)
                self._targets = {}
        return self._targets

    def check(self, manifest: Sequence[TensorSpec], kept: Collection[str] = ()) -> None:
        """Raise `ManifestMismatch`, by name, for what is missing, unknown, misshapen, or of a dtype that cannot fit.

        Tensors in ``kept`` may be missing.
        """
        expected = self.known()
        if not isinstance(expected, Expected):
            if kept:
                raise ManifestMismatch(f"{listed(kept)} cannot be left as the engine has them: {expected}")
            check_manifest(manifest, manifest)
            return
        pushed = {spec.name: spec.dtype for spec in manifest}
        # Whether a castable dtype fits, only the recording shows.
        either = [
            structs.replace(spec, dtype=pushed[spec.name])
            if CASTABLE.issuperset((spec.dtype, pushed.get(spec.name, "")))
            else spec
            for spec in expected.specs
        ]
        check_manifest(manifest, either, expected.optional.union(kept))

    def check_recorded(
        self,
        plan: LoadPlan | None,
        hooks: LoaderHooks | None,
        manifest: Sequence[TensorSpec],
        why: str,
        kept: Collection[str] = (),
    ) -> Stays:
        """The rest of `check`, once the loader has been recorded. ``plan`` is None if it could not be: ``why``.

        Raises `ManifestMismatch` for dtypes that the plan does not copy as they are, for parameters that would not be
        loaded, or only in part, and for a tied tensor that is left out although the other one is not loaded instead.
        """
        expected = self.known()
        if not isinstance(expected, Expected):
            _check_coverage(expected, plan, why)
            return Stays({})
        self._check_dtypes(expected, plan, manifest)
        if plan is None or hooks is None:
            _check_blocks(manifest, kept)
            return Stays(dict.fromkeys(kept, ""))
        if len(manifest) == len(expected.specs):
            return Stays({})
        try:
            whole = record(hooks, expected.specs, self._adapter.device, plan.memory)
        except Exception as error:
            logger.info("loading the whole checkpoint cannot be recorded: %s", error)
            _check_blocks(manifest, kept)
            return Stays(dict.fromkeys(kept, ""))
        _check_parameters(whole, kept)
        stay = frozenset(owner.name for owner, names in whole.touched.items() if names & set(kept))
        if lost := [name for name in plan.lost(whole) if name not in stay]:
            left_out = {spec.name for spec in expected.specs} - {spec.name for spec in manifest} - set(kept)
            raise ManifestMismatch(
                f"the push does not fit the engine's model: without {listed(left_out)} nothing is loaded into "
                f"{listed(lost)}; send them too"
            )
        return Stays(_digests(whole, kept), stay)

    def left_out(self, plan: LoadPlan) -> tuple[Accepted, ModelStatus]:
        """What a plan leaves unread of a push, and unwritten of the model."""
        unread, unwritten = plan.unread(), plan.unwritten()
        parameters = {owner.name for owner in plan.memory.owners if owner.parameter}
        filled = ModelStatus(
            parameters=len(parameters),
            written=len(parameters.difference(unwritten)),
            unwritten=named(unwritten),
            unread_tensors=len(unread),
            unread=named(unread),
        )
        if not isinstance(self.known(), Expected):
            return Accepted(tuple(unread)), filled
        names, specs = set(unread), plan.layout.specs
        skipped = packed(number for number, spec in enumerate(specs) if spec.name in names)
        return Accepted((), skipped, passed_over(specs, names, plan.unfilled()) if unread else {}), filled

    def _check_dtypes(self, expected: Expected, plan: LoadPlan | None, manifest: Sequence[TensorSpec]) -> None:
        listed_as = {spec.name: spec for spec in expected.specs}
        other = [spec for spec in manifest if spec.dtype != listed_as[spec.name].dtype]
        if not other:
            return
        targets = _copied_to(plan.recording) if plan is not None else {}
        elsewhere = set(plan.unread()) if plan is not None else set()  # of another rank
        fits = [spec.name in elsewhere or targets.get(spec.name) == {spec.dtype} for spec in other]
        if wrong := [spec for spec, fit in zip(other, fits, strict=True) if not fit]:
            raise wrong_dtypes([(spec, listed_as[spec.name]) for spec in wrong])


def _check_parameters(whole: Recording, kept: Collection[str]) -> None:
    """Raise `ManifestMismatch` for a parameter that is loaded from tensors that are left out, and from others."""
    for owner, names in whole.touched.items():
        if (left_out := names & set(kept)) and (others := names - set(kept)):
            raise ManifestMismatch(
                f"{listed(left_out)} cannot be left as the engine has them: they are part of {owner.name}, with "
                f"{listed(others)}; leave out all of these, or none"
            )


def _check_blocks(manifest: Sequence[TensorSpec], kept: Collection[str]) -> None:
    """The same where it is unknown which tensors are loaded into one parameter: then only whole blocks may stay.

    A block is a layer, by its number, or what the first two parts of a name have in common.
    """
    pushed = {_block(spec.name): spec.name for spec in manifest}
    if parted := [name for name in kept if _block(name) in pushed]:
        raise ManifestMismatch(
            f"{listed(parted)} cannot be left as the engine has them without the rest of {_block(parted[0])}, such as "
            f"{pushed[_block(parted[0])]}: what the engine loads together is unknown; leave out whole layers"
        )


def _block(name: str) -> str:
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: number + 1])


def _digests(whole: Recording, kept: Collection[str]) -> dict[str, str]:
    """Digests of what the model holds of tensors; empty where the loader does more than to copy one."""
    targets = _copied_to(whole)
    held: dict[str, list[tuple[str, torch.Tensor]]] = {name: [] for name in kept}
    for copy in whole.copies:
        if copy.name in held:
            held[copy.name].append((f"{copy.offset_bytes} {copy.strides}", copy.target))
    return {name: "" if "" in targets.get(name, {""}) else digest_of(parts) for name, parts in held.items()}


def _copied_to(recording: Recording) -> dict[str, set[str]]:
    """The dtypes of the parameters that each tensor is copied to, by its name; "" where it takes more than a copy."""
    found: dict[str, set[str]] = {}
    for copy in recording.copies:
        found.setdefault(copy.name, set()).add(dtype_name(copy.target.dtype))
    for name in itertools.chain(recording.unfollowed, *(recording.touched[owner] for owner in recording.fallen)):
        found.setdefault(name, set()).add("")
    return found


def _check_coverage(unknown: ManifestMismatch, plan: LoadPlan | None, why: str) -> None:
    """Raise `ManifestMismatch` unless the plan loads every parameter; ``why``: why there is no plan."""
    if plan is None:
        raise ManifestMismatch(f"{unknown}; and the engine's loader does not show it either: {why}")
    if unwritten := plan.unwritten():
        raise ManifestMismatch(
            f"the push does not fit the engine's model: no pushed tensor is loaded into {listed(unwritten)}; send "
            "the whole checkpoint, or start the engine from a folder with one, which then says what is complete"
        )
