"""A second set of the memory that a model's weights lie in, where only their bytes change from push to push."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Final

import torch

from weightsync.engine.exchange.pairs import PLAIN, Rules, parts, slots
from weightsync.engine.exchange.slices import beside, stop_if_over
from weightsync.engine.exchange.swap import Link, Swap
from weightsync.memory import arenas

#: Bytes that are written to at once; where pages are new that takes some milliseconds.
_TOUCHED_BYTES: Final = 4 << 20


class Storages(Swap):
    """A second set of the storages of ``written``, tensors of ``model``, and every tensor of the model that lies there.

    The content of the second set is not defined. Raises `Unlike` if the model has something that may hold tensors of
    which nothing is known.
    """

    def __init__(self, model: torch.nn.Module, written: Iterable[torch.Tensor], rules: Rules):
        super().__init__()
        #: By the address of a storage: it and its counterpart, in both directions.
        self._counterparts: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for tensor in written:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._counterparts:
                other = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device).untyped_storage()
                self._counterparts[storage.data_ptr()] = storage, other
        for storage, other in list(self._counterparts.values()):
            self._counterparts[other.data_ptr()] = other, storage
        for tensor in self._reached(model, rules):
            if self._has(tensor):
                self.tensors.append((tensor, self.other(tensor)))

    def _has(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
            return False
        try:
            return tensor.untyped_storage().data_ptr() in self._counterparts
        except RuntimeError:
            return False  # a tensor without memory of its own

    def other(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at the same place of the other set; itself if it lies in neither."""
        if not self._has(tensor):
            return tensor
        _, other = self._counterparts[tensor.untyped_storage().data_ptr()]
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return empty.set_(other, tensor.storage_offset(), tensor.shape, tensor.stride())

    def touch(self) -> None:
        """Have the system provide all of the standby's memory, which it would else do when that is first written to."""
        storages = [other.untyped_storage() for _, other in self.tensors]
        for storage in {each.data_ptr(): each for each in storages}.values():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            with beside():
                provided = whole.device.type != "cpu" or arenas.populate(whole, stop_if_over)
            if not provided:
                for part in torch.split(whole, _TOUCHED_BYTES):
                    part.zero_()

    def free(self) -> None:
        """Give back the memory of the standby's tensors, which nobody uses any more."""
        super().free()
        self._counterparts.clear()

    def _reached(self, model: torch.nn.Module, rules: Rules) -> Iterator[torch.Tensor]:
        """Every tensor that can be reached from the model, once."""
        met: dict[int, object] = {}
        todo: list[tuple[str, Any]] = [("", model)]
        while todo:
            stop_if_over()
            place, found = todo.pop()
            kept = isinstance(found, (torch.Tensor, torch.nn.Module))
            if (isinstance(found, PLAIN) and not isinstance(found, frozenset)) or id(found) in met:
                continue
            if rules.apart(found) and not kept:
                continue
            met[id(found)] = found
            if isinstance(found, torch.Tensor):
                yield found
            todo += [(f"{place}.{key}" if place else str(key), item) for key, item in self._inside(place, found, rules)]

    def _inside(self, place: str, found: Any, rules: Rules) -> Iterator[tuple[Any, Any]]:
        """What an object holds, by name."""
        yield from parts(found)
        attributes = getattr(found, "__dict__", None)
        for mapping in (found, attributes):
            if isinstance(mapping, MutableMapping):
                for key, item in mapping.items():
                    if not (isinstance(key, str) and key in rules.ignored):
                        self.links.append(Link(mapping, key, item))
                        yield key, item
        if isinstance(found, (tuple, list, set, frozenset)):
            yield from enumerate(found)
        elif not isinstance(attributes, dict):
            yield from ((name, getattr(found, name, None)) for name in slots(place, found))
