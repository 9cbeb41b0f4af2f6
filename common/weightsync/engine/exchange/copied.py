"""The weights of two models that an engine built alike, where those of the served one must stay where they are."""

from __future__ import annotations

import torch

from weightsync.engine.exchange.pairs import Pairs, Rules, Unlike
from weightsync.engine.exchange.swap import SMALL_BYTES
from weightsync.memory import arenas
from weightsync.tensors import native_copy
from weightsync.tensors.gpu_copy import TensorCopies
from weightsync.tensors.native_copy import Run

_Both = tuple[torch.Tensor, torch.Tensor]


class Copied(Pairs):
    """As `Pairs`, for a model to whose addresses something is bound, such as a CUDA graph: its weights are overwritten.

    Raises `Unlike` also for what cannot be copied. A copy that fails leaves the served model `torn`.
    """

    keeps_before = False

    def __init__(self, live: torch.nn.Module, standby: torch.nn.Module, rules: Rules):
        self._registered = {id(tensor) for tensor in (*live.parameters(), *live.buffers())}
        super().__init__(live, standby, rules)
        solid, rest = self._parts()
        rest += [both for both in solid if both[0].device.type != "cpu"]
        #: Where all lies, because what is copied is known by its address.
        self._at = self._places()
        self._on_host = native_copy.Copies([_run(*both) for both in solid if both[0].device.type == "cpu"])
        self._by_torch = TensorCopies([one for one, _ in rest], [other for _, other in rest])
        self._devices = {one.device for one, _ in rest}

    def _pair(self, place: str, one: torch.Tensor, other: torch.Tensor) -> None:
        super()._pair(place, one, other)
        if one.dtype == torch.int64 and id(one) not in self._registered and one.numel() and _are_addresses(one, other):
            raise Unlike(f"{place} may be a handle, and what it stands for cannot be copied")
        if any(size > 1 and not stride for size, stride in zip(one.shape, one.stride(), strict=True)):
            raise Unlike(f"{place} is expanded, and cannot be written")

    def is_current(self) -> bool:
        """See `Swap.is_current`."""
        return super().is_current() and self._places() == self._at

    def exchange(self) -> None:
        """Copy the weights of the standby to where those of the served model lie. If that fails, those are `torn`."""
        self.torn = True
        self._on_host.make()
        with torch.inference_mode():  # engines load under it, and such tensors can be written under it alone
            self._by_torch.make()
        for device in self._devices:
            arenas.synchronize(device)
        self.torn = False

    def _places(self) -> list[tuple[int, int]]:
        return [(one.data_ptr(), other.data_ptr()) for one, other in self.tensors]

    def _parts(self) -> tuple[list[_Both], list[_Both]]:
        """The pairs that are contiguous, and others; what lies within another is left out. Raises `Unlike`."""
        both = [(one.data, other.data) for one, other in self.tensors]
        solid, rest = list[_Both](), list[_Both]()
        outer = Run(0, 0, 0)

        def place(pair: _Both) -> tuple[int, int, bool]:
            return pair[0].data_ptr(), -_span(pair[0]), not pair[0].is_contiguous()

        for one, other in sorted(both, key=place):
            run = _run(one, other)
            overlaps = run.target < outer.target + outer.nbytes
            within = run.target + run.nbytes <= outer.target + outer.nbytes
            if overlaps and (not within or run.source - outer.source != run.target - outer.target):
                raise Unlike(f"memory of a tensor of shape {tuple(one.shape)} is not shared alike in both")
            if not one.is_contiguous() and not within:
                rest.append((one, other))
            elif not within:
                solid.append((one, other))
                outer = run
        return solid, rest


def _are_addresses(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether these integers, which are no weights, may be addresses: handles on a CPU, or a table for a GPU."""
    return one.nbytes <= SMALL_BYTES if one.device.type == "cpu" else not torch.equal(one, other)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    return (1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize


def _run(one: torch.Tensor, other: torch.Tensor) -> Run:
    return Run(other.data_ptr(), one.data_ptr(), _span(one))
