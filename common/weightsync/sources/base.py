"""What every source of weights offers, and the refusals they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch.nn.parameter import is_lazy

from weightsync.errors import ManifestMismatch, SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.dtensor import check_placements, is_dtensor
from weightsync.tensors.boxes import whole
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import spec_of


class Source(Protocol):
    """Weights of a trainer under their checkpoint names.

    ``specs`` is what will be sent, in sending order; it does not change. `tensors` yields the current values in that
    order, strided tensors without gradient, as views of the trainer's own memory where that is possible: use or copy
    each before the next optimiser step. Dropping a tensor before asking for the next keeps memory bounded.
    It raises `SourceError` where what is read no longer fits ``specs``, or where this process holds a part.

    ``held`` is what this process holds of each, in the same order, and `parts` yields the current values of its boxes.
    """

    specs: tuple[TensorSpec, ...]

    @property
    def device(self) -> torch.device:
        """Where the tensors are, or most of them: where packing them costs least."""

    @property
    def held(self) -> tuple[HeldShards, ...]: ...

    def identity(self) -> object | None:
        """The same object as long as `tensors` would yield the same memory, looked at in the same way; None if that
        takes a look at every tensor."""

    def tensors(self) -> Iterator[torch.Tensor]: ...

    def parts(self) -> Iterator[Sequence[torch.Tensor]]: ...


class Whole:
    """The latter half of a `Source` that holds all of its tensors."""

    specs: tuple[TensorSpec, ...]

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """See `Source`. Nobody promises that other processes hold the same values."""
        return tuple(HeldShards(one, (whole(one),)) for one in self.specs)

    def identity(self) -> None:
        """See `Source.identity`."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        raise NotImplementedError

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        return ([tensor] for tensor in self.tensors())


def describe(name: object, tensor: object) -> TensorSpec:
    """Describe one tensor of a source. Raises `SourceError` by name for whatever cannot cross as plain bytes."""
    if not isinstance(name, str):
        raise SourceError(f"tensor names must be str, not {type(name).__name__} ({name!r})")
    check_plain(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_meta:
        raise SourceError(f"{name}: the tensor is on the meta device and has no data; load or materialise it first")
    return spec(name, tensor)


def check_plain(name: str, tensor: object) -> None:
    """Raise `SourceError` by name unless ``tensor`` is a strided torch.Tensor; meta tensors and DTensors pass."""
    if not isinstance(tensor, torch.Tensor):
        raise SourceError(f"{name}: expected a torch.Tensor, not {_type_name(tensor)}; leave it out or convert it")
    if is_lazy(tensor):
        raise SourceError(f"{name}: a lazy parameter has no shape yet; run one forward pass first")
    if is_dtensor(tensor):
        check_placements(name, tensor)
        check_plain(name, tensor.detach().to_local())
        return
    kind = type(tensor.detach())
    if kind is not torch.Tensor:
        raise SourceError(f"{name}: tensors of type {kind.__name__} cannot be sent; convert it to a plain tensor first")
    if tensor.is_quantized:
        raise SourceError(f"{name}: quantised tensors ({tensor.dtype}) cannot be sent; dequantise it first")
    if tensor.layout is not torch.strided:
        raise SourceError(f"{name}: layout {tensor.layout} cannot be sent; convert it with to_dense() first")


def spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """As `layout.spec_of`, with `SourceError` for a dtype that no checkpoint holds."""
    try:
        return spec_of(name, tensor)
    except ManifestMismatch as error:
        raise SourceError(str(error)) from error


def finish(specs: Iterable[TensorSpec], what: str) -> tuple[TensorSpec, ...]:
    """Freeze the specs of ``what``. Raises `SourceError` where there are none, or two of one name."""
    frozen = tuple(specs)
    if not frozen:
        raise SourceError(f"{what} holds no tensors; there is nothing to send")
    seen: set[str] = set()
    for one in frozen:
        if one.name in seen:
            raise SourceError(f"{what} holds {one.name} twice; every tensor needs a name of its own")
        seen.add(one.name)
    return frozen


def check_same(expected: TensorSpec, found: TensorSpec) -> None:
    """Raise `SourceError` by name where a tensor is not what was announced when the source was opened."""
    if expected != found:
        raise SourceError(
            f"{expected.name}: was announced as {text(expected)} and is now {text(found)}; open the source again"
        )


def text(one: TensorSpec) -> str:
    """A spec as errors show it."""
    return f"{one.name} {one.dtype}{list(one.shape)}"


def _type_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
