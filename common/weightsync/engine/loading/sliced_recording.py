"""Records an engine's loader in slices between the steps of the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from weightsync.engine.exchange import slices
from weightsync.engine.exchange.slices import Sliced, Unfinished
from weightsync.engine.loading.fake_tensor import Unrecordable
from weightsync.engine.loading.model_memory import Memory

_R = TypeVar("_R")


class SlicedRecording(Generic[_R]):
    """``make`` records the loader of ``model``, given the model's memory. All methods belong to the engine's loop.

    Between two slices the model has its own tensors: a loader that replaces them cannot be recorded. Others may replace
    them meanwhile, which ends the recording.
    """

    def __init__(self, model: torch.nn.Module, make: Callable[[Memory], _R]):
        self.memory = memory = Memory(model)
        self._replaced = ""

        def work() -> _R:
            made = make(memory)
            if self._replaced:
                raise Unrecordable(f"it replaces {self._replaced} by another tensor")
            return made

        self._work = Sliced(work, around=self._around)

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        unmoved = self.memory.is_unmoved()
        yield
        if unmoved:
            self._replaced = self.memory.put_back() or self._replaced

    @property
    def stood_still(self) -> str:
        """See `Sliced.stood_still`."""
        return self._work.stood_still

    def result(self, rank: int) -> _R:
        """What was made. Raises `Unfinished` until that is so, and what ``make`` raises."""
        try:
            if not self.memory.is_unmoved():
                raise Unrecordable("the model's memory has moved meanwhile")
            if not self._work.advance(slices.SLICE_S):
                raise Unfinished(f"rank {rank} is still recording its loader")
        except Unfinished:
            raise
        except BaseException:
            self.stop()
            raise
        return self._work.result()

    def stop(self) -> None:
        """End it where it is."""
        self._work.cancel()
