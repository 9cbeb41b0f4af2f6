"""Which tensors of a push are cast, and to which dtype: the one in which the engines take them at least cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from msgspec import structs

from weightsync.errors import ManifestMismatch
from weightsync.protocol.expected import ExpectedReply
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import CASTABLE, DTYPES, listed

#: dtypes that hold every value of another one.
_WIDER: Final = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}


class Casts(NamedTuple):
    """``manifest`` describes the tensors as they cross; ``sources`` has the trainer's dtype of those that are cast, by
    their number in it."""

    manifest: tuple[TensorSpec, ...]
    sources: Mapping[int, torch.dtype]


def casts(manifest: Sequence[TensorSpec], engines: Mapping[str, ExpectedReply]) -> Casts:
    """The casts of a push of ``manifest``, given what each engine expects, by its URL.

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
        return Casts(tuple(manifest), {})
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
    return Casts(
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
    if spec.dtype == checkpoint and parameter in _WIDER.get(checkpoint, ()):
        return checkpoint
    return parameter
