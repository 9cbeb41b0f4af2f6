"""The interface of sources, and the checks that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, cast

import torch
from torch.nn.parameter import is_lazy

from weightsync.errors import ManifestMismatch, SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.dtensor import check_placements, is_dtensor
from weightsync.sources.stand_in import StandIn
from weightsync.tensors.boxes import whole
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import spec_of


class Source(Protocol):
    """Weights of a trainer under their checkpoint names.

    ``specs`` describes the tensors to send, in order; it does not change. `tensors` yields their current values in that
    order: strided tensors without gradient, views of the trainer's own memory where possible. Use or copy each before
    the next optimiser step, and drop it before asking for the next, so that memory stays bounded. Raises `SourceError`
    if a tensor no longer fits ``specs``, or if this process does not hold all of it.

    ``held`` has this process's shards of each tensor, in the same order; `parts` yields the current values of their
    boxes.
    """

    specs: tuple[TensorSpec, ...]

    @property
    def device(self) -> torch.device:
        """The device of all or most tensors, where packing costs least."""

    @property
    def held(self) -> tuple[HeldShards, ...]: ...

    def identity(self) -> object | None:
        """The same object as long as `tensors` would yield the same views of the same memory; None if that cannot be
        told without looking at every tensor."""

    def tensors(self) -> Iterator[torch.Tensor]: ...

    def parts(self) -> Iterator[Sequence[torch.Tensor]]: ...


class Whole:
    """Base of sources that hold all of their tensors in full."""

    specs: tuple[TensorSpec, ...]

    @property
    def held(self) -> tuple[HeldShards, ...]:
        """See `Source`. Other processes need not hold the same values."""
        return tuple(HeldShards(spec, (whole(spec),)) for spec in self.specs)

    def identity(self) -> None:
        """See `Source.identity`."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`."""
        raise NotImplementedError

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        return ([tensor] for tensor in self.tensors())


def describe(name: object, tensor: object) -> TensorSpec:
    """Describe one tensor of a source. Raises `SourceError`, naming it, if it cannot be sent as plain bytes."""
    if not isinstance(name, str):
        raise SourceError(f"tensor names must be str, not {type(name).__name__} ({name!r})")
    check_plain(name, tensor)
    assert isinstance(tensor, (torch.Tensor, StandIn))
    if tensor.is_meta:
        raise SourceError(f"{name}: the tensor is on the meta device and has no data; load or materialise it first")
    return spec(name, tensor)


def check_plain(name: str, tensor: object) -> None:
    """Raise `SourceError`, naming it, unless it is a strided torch.Tensor, a meta tensor, a DTensor or a `StandIn`."""
    tensor = tensor.held if isinstance(tensor, StandIn) else tensor
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


def spec(name: str, tensor: torch.Tensor | StandIn) -> TensorSpec:
    """Describe a tensor. Raises `SourceError`, naming it, if its dtype cannot be sent."""
    try:
        return spec_of(name, cast(torch.Tensor, tensor))  # only its shape and dtype are read
    except ManifestMismatch as error:
        raise SourceError(str(error)) from error


def finish(specs: Iterable[TensorSpec], what: str) -> tuple[TensorSpec, ...]:
    """The specs of ``what``, as a tuple. Raises `SourceError` if there are none, or if two have the same name."""
    finished = tuple(specs)
    if not finished:
        raise SourceError(f"{what} holds no tensors; there is nothing to send")
    names: set[str] = set()
    for described in finished:
        if described.name in names:
            raise SourceError(f"{what} holds {described.name} twice; every tensor needs a unique name")
        names.add(described.name)
    return finished


def check_same(expected: TensorSpec, found: TensorSpec) -> None:
    """Raise `SourceError`, naming the tensor, if it changed since the source was opened."""
    if expected != found:
        raise SourceError(
            f"{expected.name}: was announced as {text(expected)} and is now {text(found)}; open the source again"
        )


def text(described: TensorSpec) -> str:
    """A spec as error messages show it."""
    return f"{described.name} {described.dtype}{list(described.shape)}"


def _type_name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
