"""What an engine's loader does with a checkpoint, noted while it runs on tensors that have no data.

The loader runs as it always does, on stand-ins that know which slice of which checkpoint tensor they are. Views and
casts of them are followed, copies into the model are noted; nothing is written. What is more than that is told of the
parameter it happens to: its name and why.

A parameter that takes more than copies (arithmetic, a look at a value, two writes to one place, two roundings) is left
to the loader, with the tensors that it is loaded from. A loader that uses threads, keeps tensors, exchanges parameters
or raises is left alone altogether.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weightsync.engine.adapter import LoaderHooks
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
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.layout import DTYPES

aten: Final = torch.ops.aten

#: How often a loader is run again without the tensors whose values it asked for.
_ATTEMPTS: Final = 8


class Copy(NamedTuple):
    """``target`` gets a slice of the tensor ``name``, cast to its dtype as `torch.Tensor.copy_` does.

    The slice has the shape of ``target``; it starts ``offset_bytes`` into the tensor's bytes, which are read as
    ``dtype``, and has ``strides`` in elements.
    """

    name: str
    dtype: torch.dtype
    offset_bytes: int
    strides: tuple[int, ...]
    target: torch.Tensor

    def key(self) -> tuple[Any, ...]:
        """Equal for copies of the same to the same place."""
        return (*self[:4], *_place(self.target))


class Constant(NamedTuple):
    """``target`` gets ``value``, expanded to its shape, whatever is pushed."""

    value: torch.Tensor
    target: torch.Tensor

    def key(self) -> tuple[Any, ...]:
        """Equal for the same value at the same place."""
        return (self.value.reshape(1).view(torch.uint8).cpu().numpy().tobytes(), *_place(self.target))


@dataclass
class Recording:
    """What the loader does with one checkpoint."""

    memory: Memory
    copies: list[Copy] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    fallen: dict[Owner, str] = field(default_factory=dict)
    """Parameters whose loading is more than views, casts and copies, and what it is."""
    touched: dict[Owner, set[str]] = field(default_factory=dict)
    """By parameter, the tensors that it is loaded from."""
    unfollowed: dict[str, str] = field(default_factory=dict)
    """Tensors that could not be followed at all, and why."""
    written: dict[Owner, list[torch.Tensor]] = field(default_factory=dict)
    """By parameter, the parts that something is written to."""

    def read(self) -> set[str]:
        """Names of the tensors that something is loaded from."""
        return set(self.unfollowed).union(*self.touched.values())

    def differs(self, again: Recording, names: Collection[str] | None = None) -> str:
        """Name of something that the loader does otherwise, recorded ``again`` with the same memory; else empty.

        ``names`` are the tensors that it was given then, if not all.
        """
        mine = {copy.key(): copy.name for copy in self.copies if names is None or copy.name in names}
        theirs = {copy.key(): copy.name for copy in again.copies}
        for key in mine.keys() ^ theirs.keys():
            return mine.get(key) or theirs[key]
        before, after = ({one.key(): one.target for one in found.constants} for found in (self, again))
        for key in (before.keys() ^ after.keys()) if names is None else ():
            owner = self.memory.owner(before[key] if key in before else after[key])
            return owner.name if owner is not None else ""
        fallen = (owner.name for owner in again.fallen if owner not in self.fallen)
        return next(fallen, "") or next(iter(again.unfollowed.keys() - self.unfollowed.keys()), "")


def record(
    loader_hooks: LoaderHooks, specs: Sequence[TensorSpec], device: torch.device, memory: Memory | None = None
) -> Recording:
    """Run the loader on data-free tensors like ``specs``, said to be on ``device``.

    Changes no weight: what would be written is noted instead, and parameters that are exchanged are put back. Raises
    `Unrecordable`, or whatever the loader raises. ``memory`` is that of the model, if it was found already.
    """
    memory = memory or Memory(loader_hooks.model)
    unfollowed: dict[str, str] = {}
    for _ in range(_ATTEMPTS):
        recorder = _Recorder(Recording(memory, unfollowed=dict(unfollowed)))
        try:
            with torch.inference_mode(False), torch.no_grad(), recorder:
                loader_hooks.load(recorder.feed([spec for spec in specs if spec.name not in unfollowed], device))
        except Exception:
            if not recorder.stopped:
                raise
        finally:
            exchanged = memory.put_back()
        if not recorder.stopped:
            if exchanged or recorder.broken:
                raise Unrecordable(recorder.broken or f"it exchanges {exchanged} for another tensor")
            if kept := recorder.kept():
                raise Unrecordable(f"it keeps {kept} beyond the load")
            return recorder.recording
        unfollowed |= recorder.stopped
        if any(not spec.shape or spec.shape == (1,) for spec in specs if spec.name in recorder.stopped):
            # Where one scalar's value is asked for, so are the others'.
            reason = next(iter(recorder.stopped.values()))
            unfollowed |= {spec.name: reason for spec in specs if spec.shape in ((), (1,))}
    raise Unrecordable(next(iter(unfollowed.values())))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, nobody looks for garbage: a recording makes many objects, all of which stay, and each look reads them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of the loader's thread, in place of the operation."""

    def __init__(self, recording: Recording):
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.thread = recording, threading.get_ident()
        self.broken = ""
        #: Tensors whose values the loader asked for, and how; the load is to be recorded without them.
        self.stopped: dict[str, str] = {}
        self.made: list[tuple[str, weakref.ref[FakeTensor]]] = []
        self._current = ""
        #: Memory that the loader made, by address, kept so that no address comes twice; with it what was written there.
        self._fresh: dict[int, tuple[torch.UntypedStorage, set[str]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler to say that nothing here is to be compiled; nothing is while a model loads.
        return False

    def feed(self, specs: Sequence[TensorSpec], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader gets to read."""
        # One that has no data does for all that are alike: nothing is done to it in place.
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
        """Name of a tensor that the loader holds on to after it has ended; empty if there is none."""
        if any(found() is not None for _, found in self.made):
            gc.collect()  # what only refers to itself is not held
        return next((name for name, found in self.made if found() is not None), "")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in(args, kwargs)
        standins = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if targets := list(_written(func, args, kwargs)):
            return self._write(func, args, kwargs, targets)
        if standins:
            return self._follow(func, args, kwargs, tensors, standins)
        result = func(*args, **kwargs)
        if not is_view(func):
            names = self._behind(tensors)
            for tensor in tensors:
                if (owner := self.recording.memory.owner(tensor)) is not None:
                    self._fall(owner, f"{_called(func)} reads it", ())
            for tensor in tensors_in((result,)):
                storage = tensor.untyped_storage()
                if storage.data_ptr():
                    self._fresh.setdefault(storage.data_ptr(), (storage, set()))[1].update(names)
        return result

    # --- what is read

    def _follow(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        standins: list[FakeTensor],
    ) -> Any:
        first = standins[0]
        alone = len(tensors) == 1 and args and args[0] is first
        if alone and (is_view(func) or func in COPIES or func in RESHAPES):
            if func in COPIES:
                return first.like(func(first.seen, *args[1:], **kwargs), first.slice)
            return first.follow(func, args[1:], kwargs)
        if alone and func is aten._to_copy.default:
            return self._cast(first, kwargs)
        names = frozenset().union(*(one.names for one in standins), self._behind(tensors))
        if any("Tensor" not in str(found.type) for found in func._schema.returns):
            self._stop(names, f"{_called(func)} asks for its values")
        for tensor in tensors:
            if (owner := self.recording.memory.owner(tensor)) is not None:
                self._fall(owner, f"{_called(func)} reads it", names)

        def without_data(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return leaf.seen
            return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        try:
            seen = func(*tree_map(without_data, args), **tree_map(without_data, kwargs))
        except Exception:
            self._stop(names, f"{_called(func)} needs its values")
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
        return FakeTensor(self, source.names, seen, source.slice, (*source.dtypes, dtype), torch.device(device))

    def _stop(self, names: Iterable[str], what: str) -> None:
        self.stopped |= dict.fromkeys(names, what)
        raise Unrecordable(what)

    def _behind(self, tensors: Iterable[torch.Tensor]) -> set[str]:
        """Names of the checkpoint tensors that went into memory of the loader's own."""
        found: set[str] = set()
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor):
                found |= self._fresh.get(tensor.untyped_storage().data_ptr(), (None, set[str]()))[1]
        return found

    # --- what is written

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: list[torch.Tensor]) -> Any:
        sources = [leaf for leaf in tensors_in(args, kwargs) if all(leaf is not target for target in targets)]
        names = self._behind(sources).union(*(one.names for one in sources if isinstance(one, FakeTensor)))
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
            return "standin"
        if (owner := self.recording.memory.owner(target)) is not None:
            return owner if target.data_ptr() + extent_bytes(target) <= owner.end else "foreign"
        if target.numel() == 0 or target.untyped_storage().data_ptr() in self._fresh:
            return "fresh"
        return "foreign"

    def _write_one(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], names: set[str]) -> None:
        place = self._place(target)
        if place == "standin":
            assert isinstance(target, FakeTensor)
            self._stop(target.names, f"{_called(func)} changes it")
        elif place == "fresh":
            if target.numel():
                self._fresh[target.untyped_storage().data_ptr()][1].update(names)
        elif place == "foreign":
            self.broken = f"{_called(func)} writes to memory that is no parameter, or more than one"
        elif target.numel():
            assert isinstance(place, Owner)
            self.recording.written.setdefault(place, []).append(target)
            self._note(func, place, target, args, names)

    def _note(self, func: Any, owner: Owner, target: torch.Tensor, args: tuple[Any, ...], names: set[str]) -> None:
        """``target``, a part of a parameter, is written to."""
        source: Any = args[1] if len(args) > 1 else None
        touched = self.recording.touched.setdefault(owner, set())
        touched |= names
        if func in (aten.copy_.default, aten.fill_.Tensor) and isinstance(source, FakeTensor):
            if source.slice is None:
                self._fall(owner, "what is copied into it is computed", names)
            elif not one_cast((source.slice.dtype, *source.dtypes, target.dtype)):
                self._fall(owner, "what is copied into it is rounded twice", names)
            else:
                part = source.slice.expand(target.shape)
                offset_bytes = int(part.storage_offset()) * part.dtype.itemsize
                (name,) = source.names
                self.recording.copies.append(Copy(name, part.dtype, offset_bytes, part.stride(), target.detach()))
        elif func in (aten.zero_.default, aten.fill_.Scalar):
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
            self._fall(owner, f"{_called(func)} writes to it", names)

    def _fall(self, owner: Owner, why: str, names: Iterable[str]) -> None:
        self.recording.fallen.setdefault(owner, why)
        # What is in the loader's hands at this moment has to do with it, at the least.
        self.recording.touched.setdefault(owner, set()).update(names or filter(None, (self._current,)))


def _place(target: torch.Tensor) -> tuple[Any, ...]:
    return target.data_ptr(), target.shape, target.stride(), target.dtype


_writes: dict[Any, list[tuple[int, str]]] = {}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operation writes to."""
    if func not in _writes:
        _writes[func] = [
            (at, argument.name)
            for at, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for at, name in _writes[func]:
        found = args[at] if at < len(args) else kwargs.get(name)
        yield from tensors_in((found,))


def _called(func: Any) -> str:
    return str(func.overloadpacket.__name__)
