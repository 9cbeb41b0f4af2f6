"""Fits a push to what the engines expect: which tensors are converted, and which stay as the engines have them.

A tensor is cast to the dtype in which the engines take it at least cost, or quantised as their checkpoint is.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec import UNSET, structs

from weightsync.errors import ManifestMismatch
from weightsync.protocol.draft import of_draft
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.conversion import NO_CONVERSIONS, Conversion, Conversions
from weightsync.tensors.formats import Format, formats_of
from weightsync.tensors.layout import CASTABLE, WIDER, listed

Crossing = tuple[tuple[TensorSpec, ...], Conversion | None]
"""What crosses of one of the trainer's tensors, and how it is made; None: it is copied."""


class Fit(NamedTuple):
    """``manifest`` describes the tensors as they cross; ``kept`` are names that stay as the engines have them."""

    manifest: tuple[TensorSpec, ...]
    conversions: Conversions
    kept: tuple[str, ...] = ()


def fit(manifest: Sequence[TensorSpec], engines: Mapping[str, ExpectedReply], allow_missing: Sequence[str] = ()) -> Fit:
    """Fit a push of ``manifest`` to what each engine expects, by its URL.

    Names that match a pattern of ``allow_missing`` and do not cross stay as the engines have them. Raises
    `ManifestMismatch` for a pattern that matches no name of any engine, for tensors that two engines need in different
    forms, and for those that cannot be quantised as an engine needs them.
    """
    converted = _converted(manifest, engines)
    return converted._replace(kept=_kept({spec.name for spec in converted.manifest}, engines, allow_missing))


def _kept(pushed: Set[str], engines: Mapping[str, ExpectedReply], patterns: Sequence[str]) -> tuple[str, ...]:
    names = {spec.name for reply in engines.values() for spec in reply.tensors}
    kept: set[str] = set()
    for pattern in patterns:
        if not (matching := {name for name in names if fnmatchcase(name, pattern)}):
            raise ManifestMismatch(
                f"allow_missing: {pattern!r} matches no tensor that an engine expects"
                + "".join(f"; {url} has no list: {reply.why}" for url, reply in engines.items() if not reply.tensors)
            )
        kept |= matching - pushed
    return tuple(sorted(kept))


def agree(kept: Mapping[str, Sequence[Mapping[str, str]]]) -> tuple[str, ...]:
    """Compare what engines keep: a digest of each tensor, for each rank, by the engine's URL.

    Returns the names that could not be compared. Raises `ManifestMismatch` for those that differ.
    """
    (first, ranks), *others = sorted(kept.items())
    names = sorted(set().union(*(rank for engine in kept.values() for rank in engine)))
    unverified: list[str] = []
    for name in names if others else ():
        here = [rank.get(name, "") for rank in ranks]
        for url, theirs in others:
            there = [rank.get(name, "") for rank in theirs]
            if len(here) == len(there) and all(here) and all(there):
                if here != there:
                    raise ManifestMismatch(
                        f"{name} is left as the engines have it, and {first} and {url} hold different values"
                    )
            elif name not in unverified:
                unverified.append(name)
    return tuple(unverified)


def fitting(engines: Mapping[str, ExpectedReply]) -> Expecting:
    """What crosses of each tensor that is placed where the engines' lists have it.

    Raises `ManifestMismatch` if two engines quantise differently.
    """
    (first, reply), *others = engines.items()
    for url, other in others:
        if other.quantization != reply.quantization:
            raise ManifestMismatch(f"{first} and {url} serve models that are quantised differently; {_APART}")
    return Expecting(first, reply, as_served=True)


def _converted(manifest: Sequence[TensorSpec], engines: Mapping[str, ExpectedReply]) -> Fit:
    found = {url: [*map(Expecting(url, reply).crossing, manifest)] for url, reply in engines.items() if reply.tensors}
    if not found:
        return Fit(tuple(manifest), NO_CONVERSIONS)
    (first, ours), *others = found.items()
    for url, theirs in others:
        if differing := [at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other]:
            names = listed(f"{manifest[at].name} ({_form(ours[at])} and {_form(theirs[at])})" for at in differing)
            raise ManifestMismatch(f"{first} and {url} need tensors in different forms: {names}; {_APART}")
    crossing: list[TensorSpec] = []
    conversions: dict[int, Conversion] = {}
    for specs, conversion in ours:
        if conversion is not None:
            conversions[len(crossing)] = conversion
        crossing += specs
    if len(crossing) > len(manifest):
        twice = [name for name, count in Counter(spec.name for spec in crossing).items() if count > 1]
        if twice:
            raise ManifestMismatch(f"{listed(twice)}: a push makes these of the weights; leave them out")
    return Fit(tuple(crossing), conversions)


_APART = "push to them with one sender each"
#: dtypes of indices and masks, which a checkpoint that is not quantised may have too.
_NOT_WEIGHTS = frozenset(("bool", "int64"))


def _form(crossing: Crossing) -> str:
    (first, *_), conversion = crossing
    quantised = conversion.format if conversion is not None else None
    return first.dtype if quantised is None else f"{first.dtype}, {quantised.text}"


class Expecting:
    """What the engine at ``url`` expects: in which form it takes the trainer's tensors.

    ``as_served``: a tensor that the engine only copies crosses in the dtype of its parameter, also where the engine
    would widen it itself.
    """

    def __init__(self, url: str, reply: ExpectedReply, as_served: bool = False):
        self._url, self._reply, self._as_served = url, reply, as_served
        drafted = reply.draft.tensors if reply.draft is not UNSET else ()
        self._listed = {spec.name: spec for spec in (*reply.tensors, *drafted)}

    def crossing(self, spec: TensorSpec) -> Crossing:
        """What crosses of a tensor. Raises `ManifestMismatch` if it is not quantised as the engine needs it."""
        there = self._listed.get(spec.name)
        unlike = there.dtype not in CASTABLE if there is not None else self._has_parts_of(spec)
        if unlike and spec.dtype in CASTABLE:
            if of_draft(spec.name):
                self._check_draft(spec)
            elif self._reply.quantization is not UNSET and (made := self._quantised(spec)) is not None:
                return made
        dtype = self._dtype(spec)
        if dtype == spec.dtype:
            return (spec,), None
        return (structs.replace(spec, dtype=dtype),), Conversion(spec)

    def _has_parts_of(self, weight: TensorSpec) -> bool:
        """Whether the engine has tensors beside which a weight of this name would lie, which it has not."""
        return len(weight.shape) > 1 and weight.name.rpartition(".")[0] in self._modules

    @functools.cached_property
    def _modules(self) -> frozenset[str]:
        return frozenset(name.rpartition(".")[0] for name in self._listed)

    def _check_draft(self, weight: TensorSpec) -> None:
        """Raise `ManifestMismatch` for a draft model's weight where the engine has quantised values."""
        if weight.name.rpartition(".")[0] in self._quantised_modules:
            raise ManifestMismatch(
                f"{weight.name}: the draft checkpoint of {self._url} is quantised, and a push quantises no draft; push "
                "what that checkpoint has, or start the engine with a draft checkpoint in bfloat16 (docs/drafts.md)"
            )

    @functools.cached_property
    def _quantised_modules(self) -> frozenset[str]:
        whole = CASTABLE | _NOT_WEIGHTS
        return frozenset(name.rpartition(".")[0] for name, spec in self._listed.items() if spec.dtype not in whole)

    def _dtype(self, spec: TensorSpec) -> str:
        """The dtype of the parameter that a tensor is copied to, or that of the engine's checkpoint.

        A tensor that has the checkpoint's dtype already is left to the loader if that only widens it.
        """
        there = self._listed.get(spec.name)
        if there is None or not CASTABLE.issuperset((spec.dtype, there.dtype)):
            return spec.dtype
        parameter = self._reply.served.get(spec.name, there.dtype)
        if spec.dtype == there.dtype and (there.dtype, parameter) in WIDER and not self._as_served:
            return there.dtype
        return parameter

    @functools.cached_property
    def _formats(self) -> tuple[Format, ...] | str:
        """The formats of the engine's checkpoint; or why a push cannot quantise to them."""
        try:
            return formats_of(self._reply.quantization or {})
        except ManifestMismatch as error:
            return str(error)

    def _quantised(self, spec: TensorSpec) -> Crossing | None:
        """What crosses of a weight that is quantised; None if the engine's checkpoint has none of that name."""
        formats = self._formats
        if isinstance(formats, str):
            raise self._cannot(spec, formats)
        why = ""
        for how in formats if len(spec.shape) > 1 else ():
            if spec.name + how.names[0] not in self._listed:
                continue
            made = self._fits(spec, how)
            if not isinstance(made, str):
                return made
            why = why or made
        if why:
            raise self._cannot(spec, why)
        return None

    def _cannot(self, spec: TensorSpec, why: str) -> ManifestMismatch:
        return ManifestMismatch(
            f"{spec.name} cannot be quantised as {self._url} expects it: {why}; push what its checkpoint has, or start "
            "it from a checkpoint in bfloat16, or in a format to which a push quantises (docs/quantised.md)"
        )

    def _fits(self, weight: TensorSpec, how: Format) -> Crossing | str:
        """What crosses of a weight in this format; or why the engine's checkpoint has it otherwise."""
        try:
            values, *others = how.made_of(weight)
        except ManifestMismatch as error:
            return str(error)
        crossing = [values]
        for made in (values, *others):
            there = self._listed.get(made.name)
            if there is None:
                return f"its checkpoint has no {made.name}, which belongs to {how.text}"
            scalar = math.prod(made.shape) == math.prod(there.shape) == 1
            if there.shape != made.shape and not scalar:
                return f"{made.name} has shape {list(there.shape)}, and {list(made.shape)} in {how.text}"
            if made is others[0] and there.dtype in how.scales:
                work = how.work or there.dtype
                how = how._replace(work=work)
                scales = structs.replace(there, dtype=work)
                crossing.append(structs.replace(there, dtype=self._dtype(scales)) if there.dtype in CASTABLE else there)
            elif there.dtype != made.dtype:
                return f"{made.name} is {there.dtype}, which does not belong to {how.text}"
            elif made is not values:
                crossing.append(there)
        return tuple(crossing), Conversion(weight, how)
