"""Fits a push to what the engines expect: which tensors are cast, and which stay as the engines have them.

A tensor is cast to the dtype in which the engines take it at least cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from msgspec import structs

from weightsync.errors import ManifestMismatch
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import CASTABLE, DTYPES, WIDER, listed


class Fit(NamedTuple):
    """``manifest`` describes the tensors as they cross; ``sources`` has the trainer's dtype of those that are cast, by
    their number in it. ``kept`` are names that stay as the engines have them."""

    manifest: tuple[TensorSpec, ...]
    sources: Mapping[int, torch.dtype]
    kept: tuple[str, ...] = ()


def fit(manifest: Sequence[TensorSpec], engines: Mapping[str, ExpectedReply], allow_missing: Sequence[str] = ()) -> Fit:
    """Fit a push of ``manifest`` to what each engine expects, by its URL.

    Names that match a pattern of ``allow_missing`` and are not in the manifest stay as the engines have them. Raises
    `ManifestMismatch` for a pattern that matches no name of any engine, and for tensors that two engines need in
    different dtypes.
    """
    cast = _casts(manifest, engines)
    return cast._replace(kept=_kept({spec.name for spec in manifest}, engines, allow_missing))


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


def _casts(manifest: Sequence[TensorSpec], engines: Mapping[str, ExpectedReply]) -> Fit:
    """The casts of a push.

    A tensor is cast to the dtype of the parameter it is copied to, or to that of the engine's checkpoint; one that has
    the checkpoint's dtype already is left to the loader if that only widens it. Raises `ManifestMismatch` for tensors
    that two engines need in different dtypes.
    """
    by_engine = {url: {spec.name: spec.dtype for spec in reply.tensors} for url, reply in engines.items()}
    wanted = {
        url: [_wanted(spec, listed_as, engines[url].served) for spec in manifest]
        for url, listed_as in by_engine.items()
        if listed_as
    }
    if not wanted:
        return Fit(tuple(manifest), {})
    first = next(iter(wanted))
    for url, dtypes in wanted.items():
        if differing := [at for at, dtype in enumerate(dtypes) if dtype != wanted[first][at]]:
            names = listed(f"{manifest[at].name} ({wanted[first][at]} and {dtypes[at]})" for at in differing)
            raise ManifestMismatch(
                f"{first} and {url} need tensors in different dtypes: {names}; push to them with one sender each"
            )
    crossing = tuple(
        spec if spec.dtype == dtype else structs.replace(spec, dtype=dtype)
        for spec, dtype in zip(manifest, wanted[first], strict=True)
    )
    return Fit(
        crossing,
        {
            number: DTYPES[spec.dtype]
            for number, (spec, cast) in enumerate(zip(manifest, crossing, strict=True))
            if spec.dtype != cast.dtype
        },
    )


def _wanted(spec: TensorSpec, listed_as: Mapping[str, str], served: Mapping[str, str]) -> str:
    checkpoint = listed_as.get(spec.name, "")
    if not CASTABLE.issuperset((spec.dtype, checkpoint)):
        return spec.dtype
    parameter = served.get(spec.name, checkpoint)
    if spec.dtype == checkpoint and (checkpoint, parameter) in WIDER:
        return checkpoint
    return parameter
