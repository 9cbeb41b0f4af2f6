"""The memory of a model's parameters and buffers, and whether it has moved."""

from __future__ import annotations

import bisect
import copy
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy
import numpy.typing
import torch

#: The largest number of pieces of one tensor that are handled one by one.
_PIECES: Final = 1 << 22

#: Pairs of addresses: start, and end (exclusive).
Spans = numpy.typing.NDArray[numpy.int64]


@dataclass(frozen=True, eq=False)
class Owner:
    """The memory of one parameter or buffer, or of several that share it; ``name`` is that of the first.

    Owners are compared by identity: each belongs to one `Memory`.
    """

    name: str
    start: int
    end: int
    parameter: bool


class Memory:
    """The memory of every parameter and buffer of a model, by address, at the time of construction."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        #: For everything that a module holds: the dictionary, the key in it, the value.
        self._links: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._names: list[str] = []
        for prefix, module in model.named_modules(remove_duplicate=False):
            for held in (module._modules, module._parameters, module._buffers):
                for key, value in held.items():
                    if value is None:
                        continue
                    self._links.append(held)
                    self._keys.append(key)
                    self._values.append(value)
                    if isinstance(value, torch.Tensor):
                        self._tensors.append(value)
                        self._names.append(f"{prefix}.{key}" if prefix else key)
        self._hold([tensor.detach() for tensor in self._tensors])

    def _hold(self, tensors: list[torch.Tensor]) -> None:
        #: References that keep the memory, so that no address is used again.
        self._held = tensors
        self._addresses = list(map(torch.Tensor.data_ptr, self._held))
        self.owners = list(self._merged())
        self._starts = [owner.start for owner in self.owners]
        self._order = sorted(range(len(self._held)), key=self._addresses.__getitem__)
        self._sorted = [self._addresses[at] for at in self._order]

    def moved(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Memory:
        """As it will be once the data of every tensor lies where ``place`` says; owners keep their names."""
        other = copy.copy(self)
        other._hold(list(map(place, self._held)))
        return other

    def _merged(self) -> Iterator[Owner]:
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor), at)
            for at, tensor in enumerate(self._held)
            if tensor.numel()
        )
        together: list[int] = []
        start = end = 0
        for low, high, at in spans:
            if together and low >= end:
                yield self._owner(start, end, together)
                together = []
            start = low if not together else start
            end = max(end, high) if together else high
            together.append(at)
        if together:
            yield self._owner(start, end, together)

    def _owner(self, start: int, end: int, tensors: list[int]) -> Owner:
        parameter = any(isinstance(self._tensors[at], torch.nn.Parameter) for at in tensors)
        return Owner(self._names[min(tensors)], start, end, parameter)

    def gaps(self, owner: Owner, parts: Iterable[torch.Tensor]) -> bool:
        """Whether ``parts``, views of the memory of ``owner``, leave out some of its tensors' bytes."""
        parts = list(parts)
        if any(part.data_ptr() == owner.start and _dense_bytes(part) == owner.end - owner.start for part in parts):
            return False
        low, high = bisect.bisect_left(self._sorted, owner.start), bisect.bisect_left(self._sorted, owner.end)
        whole = merged(self._held[at] for at in self._order[low:high])
        covered = merged(parts)
        # Every run of the whole must lie within one covered run.
        at = numpy.searchsorted(covered[:, 0], whole[:, 0], side="right") - 1
        return bool(numpy.any(at < 0) or numpy.any(covered[numpy.maximum(at, 0), 1] < whole[:, 1]))

    def owner(self, tensor: torch.Tensor) -> Owner | None:
        """The owner of a tensor's memory; None if the model does not own it, or the tensor has no data."""
        if tensor.is_meta or tensor.numel() == 0:
            return None
        try:
            return self.owner_at(tensor.data_ptr())
        except RuntimeError:
            return None  # a tensor without memory of its own

    def owner_at(self, address: int) -> Owner | None:
        """The owner of the byte at an address; None if the model does not own it."""
        at = bisect.bisect_right(self._starts, address) - 1
        return self.owners[at] if at >= 0 and address < self.owners[at].end else None

    def is_unmoved(self) -> bool:
        """Whether every module still holds the same tensors at the same addresses. Takes no step of Python for each."""
        try:
            held = map(operator.getitem, self._links, self._keys)  # takes half the time of dict.get
            same = all(map(operator.is_, held, self._values))
        except KeyError:
            return False
        return same and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses

    def put_back(self) -> str:
        """Put back the model's own tensors where others replaced them; returns the name of one, or empty."""
        if self.is_unmoved():
            return ""
        found = ""
        for link, key, value in zip(self._links, self._keys, self._values, strict=True):
            if link.get(key) is not value:
                link[key], found = value, found or key
        for tensor, name, address, data in zip(self._tensors, self._names, self._addresses, self._held, strict=True):
            if tensor.data_ptr() != address:
                tensor.data, found = data, found or name
        return found


def inside(model: torch.nn.Module, taken: Sequence[tuple[int, int]]) -> str:
    """Name of a parameter or buffer that begins in one of these address ranges; empty if there is none."""
    starts, ends = zip(*sorted(taken), strict=True) if taken else ((), ())
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta or not tensor.numel():
            continue
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            continue  # it has no memory
        at = bisect.bisect_right(starts, address) - 1
        if at >= 0 and address < ends[at]:
            return name
    return ""


def extent_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor, gaps included."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _dense_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a contiguous tensor; 0 for any other."""
    return tensor.nbytes if tensor.is_contiguous() else 0


def spans(tensor: torch.Tensor) -> Spans:
    """The runs of bytes of a tensor, in no order. Raises `ValueError` for one in too many pieces."""
    run = 1
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride == run and not outer:
            run *= size
        else:
            outer.append((size, stride))
    if math.prod(size for size, _ in outer) > _PIECES:
        raise ValueError(f"it is in more than {_PIECES} pieces")
    starts = numpy.zeros(1 if tensor.numel() else 0, dtype=numpy.int64)
    for size, stride in outer:
        starts = (starts[:, None] + numpy.arange(size, dtype=numpy.int64) * stride).reshape(-1)
    starts = starts * tensor.itemsize + tensor.data_ptr()
    return numpy.stack((starts, starts + run * tensor.itemsize), axis=1)


def ordered(tensors: Iterable[torch.Tensor]) -> Spans:
    """The runs of bytes of several tensors, ordered by address. Raises as `spans`."""
    found = numpy.concatenate([numpy.zeros((0, 2), dtype=numpy.int64), *map(spans, tensors)])
    by_address: Spans = found[numpy.argsort(found[:, 0], kind="stable")]
    return by_address


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether some byte belongs to two of the tensors, or twice to one. Raises as `spans`."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return False
    found = ordered(tensors)
    return bool(numpy.any(found[1:, 0] < numpy.maximum.accumulate(found[:, 1])[:-1]))


def merged(tensors: Iterable[torch.Tensor]) -> Spans:
    """As `ordered`, with runs that touch or overlap joined."""
    found = ordered(tensors)
    if not len(found):
        return found
    ends = numpy.maximum.accumulate(found[:, 1])
    first = numpy.concatenate(([True], found[1:, 0] > ends[:-1]))
    last = numpy.concatenate((first[1:], [True]))
    return numpy.stack((found[first, 0], ends[last]), axis=1)
