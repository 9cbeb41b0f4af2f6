"""An object in the shape of vLLM's ``WeightSource``: it describes all tensors, and yields ``(name, tensor)`` pairs.

Until vLLM 0.32 ``metadata()`` is a method and the object is iterated. Since 0.33 ``metadata`` is a property that also
says which trainer ranks own a tensor and how they split it, and ``iter_full()`` or ``iter_local()`` yields the pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import torch
import torch.distributed as dist

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import check_same, describe, finish, text
from weightsync.sources.dtensor import local_boxes, whole_tensor
from weightsync.tensors.boxes import Box, LocalBox, whole
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import DTYPES

CPU: Final = torch.device("cpu")
_Local = tuple[tuple[LocalBox, ...], tuple[int, ...]]
_Pairs = Iterator[tuple[str, torch.Tensor]]


class Meta(Protocol):
    """Describes one tensor that iteration will yield."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Iterable[int]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Each iteration is a new pass that yields the tensors of ``metadata()``, in the same order."""

    def metadata(self) -> Iterable[Meta]: ...
    def __iter__(self) -> _Pairs: ...


@runtime_checkable
class OwnedWeightSource(Protocol):
    """Each call of an iterator is a new pass over the tensors that this rank owns, in the order of ``metadata``.

    ``iter_full`` yields whole tensors and ``iter_local`` this rank's parts; one of them may be missing, or raise
    NotImplementedError if ``implements_iter_full()`` or ``implements_iter_local()`` says so.
    """

    @property
    def metadata(self) -> Sequence[Meta]: ...


def is_weight_source(model: object) -> TypeGuard[WeightSource | OwnedWeightSource]:
    """Whether ``model`` has one of the shapes of vLLM's ``WeightSource``."""
    if isinstance(model, type):
        return False
    old = isinstance(model, WeightSource) and callable(getattr(type(model), "metadata", None))
    return old or (hasattr(type(model), "metadata") and bool(_iterators(model)))


def _iterators(model: object) -> dict[str, Callable[[], _Pairs]]:
    """The iterators that an `OwnedWeightSource` implements."""
    found: dict[str, Any] = {name: getattr(model, name, None) for name in ("iter_full", "iter_local")}
    said = {name: getattr(model, f"implements_{name}", lambda: True) for name in found}
    return {name: method for name, method in found.items() if callable(method) and said[name]()}


class WeightSourceAdapter:
    """Reads the metadata once, and checks in every pass that iteration agrees with it.

    If the object has a method ``held_names()`` and it returns names, this process holds only those tensors: iteration
    may yield None for the others, or leave them out. Several ranks that hold a tensor need not hold the same values:
    the lowest of them sends it. The metadata of an `OwnedWeightSource` may name owners instead; if these say how they
    split a tensor, replicas hold the same values.
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, weights: WeightSource | OwnedWeightSource):
        self._type = type(weights).__name__
        self._pass: Callable[[], _Pairs]
        #: For each tensor that this process owns, where its parts lie, and the shape that iteration yields.
        self._boxes: dict[str, _Local] = {}
        #: The tensors whose replicas hold the same values.
        self._replicated: set[str] = set()
        if callable(getattr(type(weights), "metadata", None)):
            self._open(weights)  # type: ignore[arg-type]
        else:
            self._open_owned(weights)  # type: ignore[arg-type]
        # Not taken from a tensor: iteration may be a collective, and starting one here would hang the other ranks.
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU

    def _open(self, weights: WeightSource) -> None:
        self._metadata, self._pass, self._iteration = "metadata()", lambda: iter(weights), f"iteration of {self._type}"
        self.specs = finish(map(_spec, weights.metadata()), f"{self._type}.metadata()")
        names = frozenset(spec.name for spec in self.specs)
        method = getattr(weights, "held_names", None)
        held = method() if callable(method) else None
        if held is not None and (unknown := sorted(set(held) - names)):
            raise SourceError(
                f"{self._type}.held_names() lists {unknown[0]!r}, but metadata() does not; metadata() must describe "
                "the whole model on every rank"
            )
        self._boxes = {spec.name: _all_of(spec) for spec in self.specs if held is None or spec.name in held}

    def _open_owned(self, weights: OwnedWeightSource) -> None:
        iterators = _iterators(weights)
        # The parts, where they are to be had: whole tensors may be gathered on every rank.
        which = "iter_local" if "iter_local" in iterators else "iter_full"
        self._metadata, self._pass, self._iteration = "metadata", iterators[which], f"{self._type}.{which}()"
        metas = list(weights.metadata)
        self.specs = finish(map(_spec, metas), f"{self._type}.metadata")
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        for meta, spec in zip(metas, self.specs, strict=True):
            owners, placements = getattr(meta, "owners", None), getattr(meta, "placements", None)
            if owners is not None and rank not in owners:
                continue
            if which == "iter_full" or owners is None or placements is None:
                self._boxes[spec.name] = _all_of(spec)
                continue
            mesh = getattr(meta, "mesh_shape", None) or (len(owners),)
            self._boxes[spec.name] = _parts_of(spec, owners.index(rank), mesh, placements)
            self._replicated.add(spec.name)

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """See `Source`."""
        return tuple(HeldShards(spec, self._boxes_of(spec.name), spec.name in self._replicated) for spec in self.specs)

    def _boxes_of(self, name: str) -> tuple[Box, ...]:
        return tuple(part.box for part in self._boxes[name][0]) if name in self._boxes else ()

    def identity(self) -> None:
        """See `Source.identity`; None, because tensors may be made on demand."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        for held, parts in zip(self.held, self.parts(), strict=True):
            yield whole_tensor(held, parts)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        # A tensor that this process does not hold may be left out or be None; both are skipped.
        pairs = (pair for pair in self._pass() if pair[1] is not None or pair[0] in self._boxes)
        for expected in self.specs:
            if expected.name not in self._boxes:
                yield ()
                continue
            boxes, shape = self._boxes[expected.name]
            pair = next(pairs, None)
            if pair is None:
                raise SourceError(f"{self._iteration} ended before {expected.name}, which {self._metadata} announces")
            name, tensor = pair
            if name != expected.name:
                raise SourceError(
                    f"{self._iteration} yielded {name!r} where {self._metadata} announces {text(expected)}"
                )
            check_same(TensorSpec(name, expected.dtype, shape), describe(name, tensor))
            yield tuple(part.of(tensor.detach()) for part in boxes)
        extra = next(pairs, None)
        if extra is not None:
            raise SourceError(
                f"{self._iteration} yielded {extra[0]!r} after the last tensor that {self._metadata} announces"
            )


def _all_of(spec: TensorSpec) -> _Local:
    return (LocalBox(whole(spec), (0,) * len(spec.shape)),), spec.shape


def _parts_of(spec: TensorSpec, position: int, mesh: Sequence[int], placements: Sequence[Any]) -> _Local:
    """The parts of the owner at this position of a row-major ``mesh``; placements with ``dim`` split as torch.chunk."""
    coordinate = [position // math.prod(mesh[at + 1 :]) % size for at, size in enumerate(mesh)]
    splits = tuple(
        (int(placement.dim), 1, mesh[at], coordinate[at])
        for at, placement in enumerate(placements)
        if hasattr(placement, "dim")
    )
    return local_boxes(spec.shape, splits)


def _spec(meta: Meta) -> TensorSpec:
    dtype = str(meta.dtype).removeprefix("torch.")
    if not isinstance(meta.name, str):
        raise SourceError(f"tensor names must be str, not {type(meta.name).__name__} ({meta.name!r})")
    if dtype not in DTYPES:
        raise SourceError(f"{meta.name}: dtype {meta.dtype} cannot be sent; supported are {', '.join(DTYPES)}")
    return TensorSpec(meta.name, dtype, tuple(meta.shape))
