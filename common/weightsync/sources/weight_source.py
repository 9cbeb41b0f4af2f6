"""An object in the shape of vLLM's ``WeightSource``: ``metadata()`` and iteration over ``(name, tensor)`` pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, TypeGuard, runtime_checkable

import torch

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import check_same, describe, finish, text
from weightsync.sources.dtensor import whole_tensor
from weightsync.tensors.boxes import whole
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import DTYPES

CPU: Final = torch.device("cpu")


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
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def is_weight_source(model: object) -> TypeGuard[WeightSource]:
    """Whether ``model`` has the shape of a `WeightSource`."""
    return isinstance(model, WeightSource) and callable(model.metadata) and not isinstance(model, type)


class WeightSourceAdapter:
    """Reads ``metadata()`` once, and checks in every pass that iteration agrees with it.

    If the object has a method ``held_names()`` and it returns names, this process holds only those tensors: iteration
    may yield None for the others, or leave them out. Several ranks that hold a tensor need not hold the same values:
    the lowest of them sends it.
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, weights: WeightSource):
        self._weights = weights
        self.specs = finish(map(_spec, weights.metadata()), f"{type(weights).__name__}.metadata()")
        self._names = self._held_names()
        # Not taken from a tensor: iteration may be a collective, and starting one here would hang the other ranks.
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU

    def _held_names(self) -> frozenset[str]:
        names = frozenset(spec.name for spec in self.specs)
        method = getattr(self._weights, "held_names", None)
        held = method() if callable(method) else None
        if held is None:
            return names
        if unknown := sorted(set(held) - names):
            raise SourceError(
                f"{type(self._weights).__name__}.held_names() lists {unknown[0]!r}, but metadata() does not; "
                "metadata() must describe the whole model on every rank"
            )
        return frozenset(held)

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """See `Source`."""
        return tuple(HeldShards(spec, (whole(spec),) if spec.name in self._names else ()) for spec in self.specs)

    def identity(self) -> None:
        """See `Source.identity`; None, because tensors may be made on demand."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        for held, parts in zip(self.held, self.parts(), strict=True):
            yield whole_tensor(held, parts)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        # A tensor that this process does not hold may be left out or be None; both are skipped.
        pairs = (pair for pair in self._weights if pair[1] is not None or pair[0] in self._names)
        for expected in self.specs:
            if expected.name not in self._names:
                yield ()
                continue
            pair = next(pairs, None)
            if pair is None:
                raise SourceError(f"{self._iteration()} ended before {expected.name}, which metadata() announces")
            name, tensor = pair
            if name != expected.name:
                raise SourceError(f"{self._iteration()} yielded {name!r} where metadata() announces {text(expected)}")
            check_same(expected, describe(name, tensor))
            yield (tensor.detach(),)
        extra = next(pairs, None)
        if extra is not None:
            raise SourceError(
                f"{self._iteration()} yielded {extra[0]!r} after the last tensor that metadata() announces"
            )

    def _iteration(self) -> str:
        return f"iteration of {type(self._weights).__name__}"


def _spec(meta: Meta) -> TensorSpec:
    dtype = str(meta.dtype).removeprefix("torch.")
    if not isinstance(meta.name, str):
        raise SourceError(f"tensor names must be str, not {type(meta.name).__name__} ({meta.name!r})")
    if dtype not in DTYPES:
        raise SourceError(f"{meta.name}: dtype {meta.dtype} cannot be sent; supported are {', '.join(DTYPES)}")
    return TensorSpec(meta.name, dtype, tuple(meta.shape))
