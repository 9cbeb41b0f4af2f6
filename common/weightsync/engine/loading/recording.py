"""Records what an engine's loader does with a checkpoint, by running it on tensors without data.

The loader itself runs, on fake tensors that know which slice of which checkpoint tensor they are. Views and casts of
them are followed, and copies into the model are recorded; nothing is written.

A parameter that takes more than copies (arithmetic, reading a value, two writes to one place, two roundings) is left to
the loader, with the tensors that it is loaded from and the reason. A loader that uses threads, keeps tensors, replaces
parameters or raises cannot be recorded at all.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightsync.engine.adapter import LoaderHooks
from weightsync.engine.exchange.together import alone
from weightsync.engine.loading.fake_tensor import (
    COPIES,
    RESHAPES,
    FakeTensor,
    Unrecordable,
    is_view,
    one_cast,
    tensors_in,
)
from weightsync.engine.loading.model_memory import Memory, Owner, extent_bytes
from weightsync.engine.loading.recorded import Constant, Copy, Recording
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import DTYPES

aten: Final = torch.ops.aten

#: How often the loader is run again without the tensors whose values it read.
_ATTEMPTS: Final = 8
#: While work is done in slices, `gc.collect` collects nothing.
_collect: Final = gc.collect


def record(
    loader_hooks: LoaderHooks, specs: Sequence[TensorSpec], device: torch.device, memory: Memory | None = None
) -> Recording:
    """Run the loader on fake tensors like ``specs``, which appear to be on ``device``.

    Changes no weight: writes are recorded instead, and replaced parameters are put back. Raises `Unrecordable`, or
    whatever the loader raises. ``memory`` is that of the model, if the caller has it already.
    """
    memory = memory or Memory(loader_hooks.model)
    unfollowed: dict[str, str] = {}
    for _ in range(_ATTEMPTS):
        recorder, failed = _Recorder(Recording(memory, unfollowed=dict(unfollowed))), None
        try:
            with torch.inference_mode(False), torch.no_grad(), alone(), recorder:
                loader_hooks.load(recorder.feed([spec for spec in specs if spec.name not in unfollowed], device))
        except Exception as error:
            failed = error
        # Not after `slices.Cancelled`: others may have given the model other memory since the last slice.
        replaced = memory.put_back()
        if not recorder.stopped:
            if failed is not None:
                raise failed
            if replaced or recorder.broken:
                raise Unrecordable(recorder.broken or f"it replaces {replaced} by another tensor")
            if kept := recorder.kept():
                raise Unrecordable(f"it keeps {kept} beyond the load")
            return recorder.recording
        unfollowed |= recorder.stopped
        if any(not spec.shape or spec.shape == (1,) for spec in specs if spec.name in recorder.stopped):
            # A loader that reads the value of one scalar reads those of the others too.
            reason = next(iter(recorder.stopped.values()))
            unfollowed |= {spec.name: reason for spec in specs if spec.shape in ((), (1,))}
    raise Unrecordable(next(iter(unfollowed.values())))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every torch operation of the loader's thread."""

    def __init__(self, recording: Recording):
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.thread = recording, threading.get_ident()
        self.broken = ""
        #: Tensors whose values the loader read, and how; the loader is to be recorded again without them.
        self.stopped: dict[str, str] = {}
        self.made: list[tuple[frozenset[str], weakref.ref[FakeTensor]]] = []
        self._current = ""
        #: Memory that the loader allocated, by address, referenced so that no address is used again; and the names
        #: of the tensors that were written there.
        self._fresh: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch would import its compiler, only to find that there is nothing to compile here.
        return False

    def feed(self, specs: Sequence[TensorSpec], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the fake tensors for the loader, by name."""
        # One meta tensor serves all of a shape and dtype: nothing changes it in place.
        alike: dict[tuple[Any, ...], torch.Tensor] = {}
        for spec in specs:
            self._current = spec.name
            meta = alike.get((spec.shape, spec.dtype))
            if meta is None:
                meta = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
                alike[spec.shape, spec.dtype] = meta
            yield spec.name, FakeTensor(self, frozenset((spec.name,)), meta, meta, (), device)
        self._current = ""

    def kept(self) -> str:
        """Name of a tensor that the loader references after it has returned; empty if there is none."""
        if any(found() is not None for _, found in self.made):
            _collect()  # reference cycles do not count
        return next((min(names) for names, found in self.made if found() is not None), "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Short ways for what loaders do most: to copy a checkpoint tensor, or a part of one, into a parameter, and
        # to view a part of either.
        if func is aten.copy_.default and type(args[1]) is FakeTensor:
            place = self._place(args[0])
            if isinstance(place, Owner):
                self._note_copy(place, args[0], args[1])
                return args[0]
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        if is_view(func) and len(tensors) == 1 and args and args[0] is tensors[0]:
            first = tensors[0]
            return first.follow(func, args[1:], kwargs) if isinstance(first, FakeTensor) else func(*args, **kwargs)
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if targets := list(_written(func, args, kwargs)):
            return self._write(func, args, kwargs, targets)
        if fakes:
            return self._follow(func, args, kwargs, tensors, fakes)
        result = func(*args, **kwargs)
        if not is_view(func):
            names = self._written_to(tensors)
            for tensor in tensors:
                if (owner := self.recording.memory.owner(tensor)) is not None:
                    self._fall(owner, f"{_name(func)} reads it", ())
            for tensor in tensors_in((result,)):
                storage = tensor.untyped_storage()
                if storage.data_ptr():
                    self._fresh.setdefault(storage.data_ptr(), (storage, set()))[1].update(names)
        return result

    # --- reads

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        fakes: list[FakeTensor],
    ) -> Any:
        first = fakes[0]
        alone = len(tensors) == 1 and args and args[0] is first
        if alone and func in COPIES:
            return first.like(func(first.seen, *args[1:], **kwargs), first.slice)
        if alone and func in RESHAPES:
            return first.follow(func, args[1:], kwargs)
        if alone and func is aten._to_copy.default:
            return self._cast(first, kwargs)
        names = frozenset().union(*(fake.checkpoint_names for fake in fakes), self._written_to(tensors))
        if any("Tensor" not in str(found.type) for found in func._schema.returns):
            self._stop(names, f"{_name(func)} reads its values")
        for tensor in tensors:
            if (owner := self.recording.memory.owner(tensor)) is not None:
                self._fall(owner, f"{_name(func)} reads it", names)

        def without_data(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return leaf.seen
            return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        try:
            seen = func(*tree_map(without_data, args), **tree_map(without_data, kwargs))
        except Exception:
            self._stop(names, f"{_name(func)} needs its values")
        return tree_map(
            lambda leaf: (
                FakeTensor(self, names, leaf, None, (), first.device) if isinstance(leaf, torch.Tensor) else leaf
            ),
            seen,
        )

    def _cast(self, source: FakeTensor, kwargs: dict[str, Any]) -> FakeTensor:
        device = kwargs.get("device") or source.device
        dtype = kwargs.get("dtype") or source.dtype
        seen = torch.empty_strided(source.seen.shape, source.seen.stride(), dtype=dtype, device="meta")
        if kwargs.get("memory_format") not in (None, torch.preserve_format):
            seen = torch.empty(source.seen.shape, dtype=dtype, device="meta").contiguous(
                memory_format=kwargs["memory_format"]
            )
        return FakeTensor(
            self, source.checkpoint_names, seen, source.slice, (*source.dtypes, dtype), torch.device(device)
        )

    def _stop(self, names: Iterable[str], what: str) -> None:
        self.stopped |= dict.fromkeys(names, what)
        raise Unrecordable(what)

    def _written_to(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Names of the checkpoint tensors that were written to these tensors, in memory of the loader."""
        found: set[str] = set()
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                found |= self._fresh.get(tensor.untyped_storage().data_ptr(), (None, set[str]()))[1]
        return found

    # --- writes

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[torch.Tensor]) -> Any:
        sources = [leaf for leaf in tensors_in(args, kwargs) if all(leaf is not target for target in targets)]
        names = self._written_to(sources).union(
            *(leaf.checkpoint_names for leaf in sources if isinstance(leaf, FakeTensor))
        )
        into = [self._place(target) for target in targets]
        if all(place == "fresh" for place in into) and not names:
            func(*args, **kwargs)
        elif func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._write_one(aten.copy_.default, target, (target, source), names)
        else:
            for target in targets:
                self._write_one(func, target, args, names)
        if not func._schema.returns:
            return None
        return targets[0] if len(func._schema.returns) == 1 else tuple(targets)

    def _place(self, target: torch.Tensor) -> Owner | str:
        if isinstance(target, FakeTensor):
            return "fake"
        if (owner := self.recording.memory.owner(target)) is not None:
            return owner if target.data_ptr() + extent_bytes(target) <= owner.end else "foreign"
        if target.numel() == 0 or target.untyped_storage().data_ptr() in self._fresh:
            return "fresh"
        return "foreign"

    def _write_one(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], names: set[str]) -> None:
        place = self._place(target)
        if place == "fake":
            assert isinstance(target, FakeTensor)
            self._stop(target.checkpoint_names, f"{_name(func)} changes it")
        elif place == "fresh":
            if target.numel():
                self._fresh[target.untyped_storage().data_ptr()][1].update(names)
        elif place == "foreign":
            self.broken = f"{_name(func)} writes to memory that is no parameter, or more than one"
        elif target.numel():
            assert isinstance(place, Owner)
            self._note(func, place, target, args, names)

    def _note(self, func: Any, owner: Owner, target: torch.Tensor, args: tuple[Any, ...], names: set[str]) -> None:
        """Record a write to ``target``, a part of a parameter."""
        source: Any = args[1] if len(args) > 1 else None
        if func in (aten.copy_.default, aten.fill_.Tensor) and isinstance(source, FakeTensor):
            self._note_copy(owner, target, source)
            return
        self._note_target(owner, target, names)
        if func in (aten.zero_.default, aten.fill_.Scalar):
            value = torch.full((), source if source is not None else 0, dtype=target.dtype, device=target.device)
            self.recording.constants.append(Constant(value, target.detach()))
        elif (
            func in (aten.copy_.default, aten.fill_.Tensor)
            and not names
            and source.untyped_storage().data_ptr() in self._fresh
        ):
            value = source.to(device=target.device, dtype=target.dtype, copy=True)
            self.recording.constants.append(Constant(value, target.detach()))
        else:
            self._fall(owner, f"{_name(func)} writes to it", names)

    def _note_copy(self, owner: Owner, target: torch.Tensor, source: FakeTensor) -> None:
        """Record that ``target``, a part of a parameter, gets a checkpoint tensor or a part of one."""
        self._note_target(owner, target, source.checkpoint_names)
        part = source.slice
        if part is None:
            self._fall(owner, "what is copied into it is computed", source.checkpoint_names)
        elif (source.dtypes or part.dtype != target.dtype) and not one_cast((part.dtype, *source.dtypes, target.dtype)):
            self._fall(owner, "what is copied into it is rounded twice", source.checkpoint_names)
        else:
            if part.shape != target.shape:
                part = part.expand(target.shape)
            offset_bytes = int(part.storage_offset()) * part.dtype.itemsize
            (name,) = source.checkpoint_names
            self.recording.copies.append(Copy(name, part.dtype, offset_bytes, part.stride(), target.detach()))

    def _note_target(self, owner: Owner, target: torch.Tensor, names: Collection[str]) -> None:
        self.recording.written.setdefault(owner, []).append(target)
        self.recording.touched.setdefault(owner, set()).update(names)

    def _fall(self, owner: Owner, why: str, names: Iterable[str]) -> None:
        self.recording.fallen.setdefault(owner, why)
        # At least the tensor that the loader is reading at this moment belongs to it.
        self.recording.touched.setdefault(owner, set()).update(names or filter(None, (self._current,)))


_writes: dict[Any, list[tuple[int, str]]] = {}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes to."""
    if func not in _writes:
        _writes[func] = [
            (at, argument.name)
            for at, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for at, name in _writes[func]:
        found = args[at] if at < len(args) else kwargs.get(name)
        yield from tensors_in((found,))


def _name(func: Any) -> str:
    return str(func.overloadpacket.__name__)
