"""An object in the shape of vLLM's ``WeightSource``: ``metadata()`` and iteration over ``(name, tensor)`` pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeGuard, runtime_checkable

import torch

from weightsync.errors import SourceError
from weightsync.layout import DTYPES
from weightsync.sources.base import check_same, describe, finish, text
from weightsync.wire import TensorSpec

CPU: Final = torch.device("cpu")


class Meta(Protocol):
    """One tensor to come."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> Iterable[int]: ...


@runtime_checkable
class WeightSource(Protocol):
    """Iteration starts a fresh pass each time and yields what ``metadata()`` announces, element for element."""

    def metadata(self) -> Iterable[Meta]: ...
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def is_weight_source(model: object) -> TypeGuard[WeightSource]:
    """Whether ``model`` has the shape of a `WeightSource`."""
    return isinstance(model, WeightSource) and callable(model.metadata) and not isinstance(model, type)


class WeightSourceAdapter:
    """Reads ``metadata()`` once, and checks on every pass that iteration agrees with it.

    Raises `SourceError` for a source of which this process holds only a part (``held_names()`` is not None).
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, weights: WeightSource):
        self._weights = weights
        held_names = getattr(weights, "held_names", None)
        if callable(held_names) and held_names() is not None:
            raise SourceError(
                f"{type(weights).__name__}.held_names() says that this process holds a part of the model; "
                "that cannot be sent yet: yield whole tensors and return None from held_names()"
            )
        self.specs = finish(map(_spec, weights.metadata()), f"{type(weights).__name__}.metadata()")
        # Not asked of a tensor: iteration may be a collective, and starting one to look would hang the others.
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        pairs = iter(self._weights)
        for expected in self.specs:
            pair = next(pairs, None)
            if pair is None:
                raise SourceError(f"{self._who()} ended before {expected.name}, which metadata() announces")
            name, tensor = pair
            if name != expected.name:
                raise SourceError(f"{self._who()} yielded {name!r} where metadata() announces {text(expected)}")
            check_same(expected, describe(name, tensor))
            yield tensor.detach()
        extra = next(pairs, None)
        if extra is not None:
            raise SourceError(f"{self._who()} yielded {extra[0]!r} after the last tensor that metadata() announces")

    def _who(self) -> str:
        return f"iteration of {type(self._weights).__name__}"


def _spec(meta: Meta) -> TensorSpec:
    dtype = str(meta.dtype).removeprefix("torch.")
    if not isinstance(meta.name, str):
        raise SourceError(f"tensor names must be str, not {type(meta.name).__name__} ({meta.name!r})")
    if dtype not in DTYPES:
        raise SourceError(f"{meta.name}: dtype {meta.dtype} cannot be sent; supported are {', '.join(DTYPES)}")
    return TensorSpec(meta.name, dtype, tuple(meta.shape))
