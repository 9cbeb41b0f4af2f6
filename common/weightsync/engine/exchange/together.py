"""What an engine's loader asks of all ranks at once, such as one scale for all parts of a layer that it quantises.

A collective would wait within a slice for ranks whose slice is over, and between slices it would meet those of the
engine's own steps. So each rank writes its part into the store of the process group, and waits, in slices, until it
finds those of the others there. A rank that loads again, or later than the others, finds what they wrote before.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy
import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from weightsync.engine.exchange import slices

#: Seconds between two looks.
_LOOK_S: Final = 0.0005
#: Seconds that a rank waits for another in one piece, which it does in a pause alone: then all of them load.
_PATIENCE_S: Final = 60.0
#: Functions of torch that work on all ranks of a group, or on two.
_COLLECTIVES: Final = frozenset(
    getattr(distributed_c10d, name)
    for name in (
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "gather", "scatter", "send", "recv"),
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "isend", "irecv"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    )
    if hasattr(distributed_c10d, name)
)


class _OtherFailed(RuntimeError):
    """Another rank failed in the same load."""


class Together:
    """Of one rank and its loads. A load has a name that all ranks have for it, and asks the same in the same order."""

    def __init__(self) -> None:
        self._store: Any = None
        self._name, self._asked, self._failed = "", 0, ""
        #: What this rank wrote for the load ``_name``; kept until the next load, by when all have read it.
        self._written: list[str] = []

    @contextlib.contextmanager
    def loads(self, name: str) -> Iterator[None]:
        """The context of a load. In it a collective other than a maximum or a minimum raises `NotImplementedError`."""
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            yield
            return
        if name != self._name:
            for key in self._written:
                self._store.delete_key(key)
            self._name, self._written = name, []
        # A rank whose load failed in slices may load the same in the pause.
        self._asked, self._failed = 0, f"weightsync/{name}/failed-{'in-slices' if slices.within() else 'in-a-pause'}"
        try:
            with _Collectives(self):
                yield
        except _OtherFailed:
            raise
        except Exception as error:
            if self._store is not None:  # else the loader may be one that asks nothing
                with contextlib.suppress(RuntimeError):  # the store is gone
                    self._write(
                        self._failed, f"rank {distributed.get_rank()}: {type(error).__name__}: {error}".encode()
                    )
            raise

    def reduce(
        self, tensor: torch.Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> None:
        """As `torch.distributed.all_reduce`. Raises `_OtherFailed`, and `TimeoutError` if a rank does not come in a
        pause."""
        if async_op or op not in (distributed.ReduceOp.MAX, distributed.ReduceOp.MIN):
            raise _refused(f"all_reduce with {op}")
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        self._asked += 1
        where = f"weightsync/{self._name}/{'-'.join(map(str, ranks))}/{self._asked}"
        parts = self._exchanged(where, tensor, ranks)
        reduced = torch.stack(parts).amax(0) if op == distributed.ReduceOp.MAX else torch.stack(parts).amin(0)
        tensor.copy_(reduced)

    def _exchanged(self, where: str, tensor: torch.Tensor, ranks: list[int]) -> list[torch.Tensor]:
        """The part of every rank, on the host."""
        own = tensor.detach().cpu().contiguous()
        self._write(f"{where}/{distributed.get_rank()}", own.view(torch.uint8).numpy().tobytes())
        keys, end = [f"{where}/{rank}" for rank in ranks], time.monotonic() + _PATIENCE_S
        while not self._store.check(keys):
            slices.stop_if_over()
            if self._store.check([self._failed]):
                raise _OtherFailed(f"another rank failed in this load: {self._store.get(self._failed).decode()}")
            if time.monotonic() > end and not slices.within():
                missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
                raise TimeoutError(f"ranks {missing} did not come to this layer within {_PATIENCE_S:g} s")
            time.sleep(_LOOK_S)
        found = [numpy.frombuffer(self._store.get(key), dtype=numpy.uint8).copy() for key in keys]
        return [torch.from_numpy(one).view(own.dtype).view(own.shape) for one in found]

    def _write(self, key: str, value: bytes) -> None:
        if self._store is None:  # a connection of its own: whoever waits for a store blocks its users
            store: Any = distributed_c10d._get_default_store()
            self._store = store.clone()
        self._store.set(key, value)
        self._written.append(key)


def alone() -> TorchFunctionMode:
    """The context of a loader in which every collective raises `NotImplementedError`."""
    return _Collectives(None)


class _Collectives(TorchFunctionMode):
    def __init__(self, together: Together | None):
        super().__init__()
        self._together = together

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._together is not None and func is distributed_c10d.all_reduce:
            return self._together.reduce(*args, **(kwargs or {}))
        if func in _COLLECTIVES:
            raise _refused(func.__name__)
        return func(*args, **(kwargs or {}))


def _refused(what: str) -> NotImplementedError:
    return NotImplementedError(f"the engine's loader calls {what} of torch.distributed, which needs all ranks at once")
