"""From the tensors of a module to those of its checkpoint, worked out once without touching any data.

transformers may hold weights otherwise than its checkpoints do: it fuses the experts of a layer, renames, splits and
permutes. ``save_pretrained`` undoes that by running its conversions over the whole state. We run the same conversions
over stand-ins that have shapes and strides but no data, and note for each tensor that comes out where in which
parameter it lies. What is a mere view there costs nothing at a push. What is computed (concatenated, permuted) is
computed again at every push, one group of connected tensors at a time.

Of a sharded parameter a view that is a box of it, in any order of dimensions, is cut out of the local part. Anything
else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources.base import finish, spec

State = dict[str, torch.Tensor]
Convert = Callable[[State], Mapping[str, torch.Tensor]]


class View(NamedTuple):
    """A checkpoint tensor that lies in the tensor ``source``: ``offset`` in elements from where that one starts.

    Of a sharded one it is meant as if the whole lay contiguously in memory.
    """

    source: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, state: State) -> torch.Tensor:
        """The view of the current tensor."""
        source = state[self.source]
        if not self.offset and source.shape == self.shape and source.stride() == self.stride:
            return source
        return source.as_strided(self.shape, self.stride, int(source.storage_offset()) + self.offset)


class Group(NamedTuple):
    """Checkpoint tensors that have to be computed together, from ``inputs``."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Recipe(NamedTuple):
    """How to make the tensors of a checkpoint: ``specs`` are those of ``steps`` in order, one or a group each."""

    specs: tuple[TensorSpec, ...]
    steps: tuple[View | Group, ...]


def plain_recipe(state: State, names: Iterable[str], what: str) -> Recipe:
    """Every named tensor of the state as it is."""
    steps = {name: View(name, 0, tuple(state[name].shape), state[name].stride()) for name in names}
    return Recipe(finish((spec(name, state[name]) for name in steps), what), tuple(steps.values()))


def traced_recipe(state: State, convert: Convert, what: str) -> Recipe:
    """The recipe of ``convert``, a function from the tensors of a module to those of its checkpoint.

    ``convert`` is called with tensors on the meta device. It may move data and compute, but must neither write into
    what it gets nor look at values. Raises `SourceError` where it does.
    """
    # A caller may be in inference mode, whose tensors do not count the writes into them.
    with torch.inference_mode(False), torch.no_grad():
        stand_ins = {name: _stand_in(tensor) for name, tensor in state.items()}
        names = {_storage(tensor): name for name, tensor in stand_ins.items()}
        with _KeepStrides(), _Trace(names) as trace:
            converted = convert(dict(stand_ins))
    if any(tensor._version for tensor in stand_ins.values()):
        raise SourceError(f"{what}: its conversion to checkpoint layout writes into the weights")
    views = {
        name: View(names[_storage(tensor)], int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        for name, tensor in converted.items()
        if _is_view(tensor, names, stand_ins)
    }
    groups = _groups({name: trace.origins_of(tensor) for name, tensor in converted.items() if name not in views})
    steps = _in_order(converted, views, groups)
    ordered = [name for step, outputs in steps for name in outputs]
    specs = finish((spec(name, converted[name]) for name in ordered), what)
    for group in groups:
        _check_group(group, convert, stand_ins, converted, what)
    return Recipe(specs, tuple(step for step, _ in steps))


def compute(group: Group, convert: Convert, state: State) -> list[torch.Tensor]:
    """The outputs of a group from the current tensors."""
    converted = convert({name: state[name] for name in group.inputs})
    return [converted[name] for name in group.outputs]


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage(tensor: torch.Tensor) -> int:
    # Meta tensors have no data pointer; the address of the storage object tells them apart as long as both live.
    return int(tensor.untyped_storage()._cdata)


def _is_view(tensor: torch.Tensor, names: Mapping[int, str], stand_ins: State) -> bool:
    name = names.get(_storage(tensor))
    return name is not None and tensor.dtype == stand_ins[name].dtype


class _KeepStrides(TorchFunctionMode):
    """Makes ``contiguous()`` return what it was called on: the order of elements in memory is the transport's business.

    transformers calls it on every slice that it cuts out of fused weights, which would make copies of them all.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes for every storage that comes into being which of the named tensors it was made from."""

    def __init__(self, names: Mapping[int, str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, frozenset[str]] = {storage: frozenset([name]) for storage, name in names.items()}
        self._alive: list[torch.Tensor] = []  # An address names a storage only while the storage lives.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = frozenset[str]().union(*map(self.origins_of, _tensors((args, kwargs))))
        for tensor in _tensors(result):
            self._origins[_storage(tensor)] = read
            self._alive.append(tensor)
        return result

    def origins_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """Names of the tensors that ``tensor`` was made from."""
        return self._origins.get(_storage(tensor), frozenset())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _groups(origins: Mapping[str, frozenset[str]]) -> list[Group]:
    """The smallest groups of outputs that share no input."""
    groups: list[tuple[set[str], list[str]]] = []
    for output, inputs in origins.items():
        joined, outputs = set(inputs), [output]
        apart = []
        for group in groups:
            if group[0].isdisjoint(inputs):
                apart.append(group)
            else:
                joined |= group[0]
                outputs = group[1] + outputs
        groups = [*apart, (joined, outputs)]
    return [Group(tuple(sorted(inputs)), tuple(outputs)) for inputs, outputs in groups]


def _in_order(
    converted: Iterable[str], views: Mapping[str, View], groups: Iterable[Group]
) -> list[tuple[View | Group, tuple[str, ...]]]:
    """Steps in the order of their first output, each with its outputs."""
    group_of = {name: group for group in groups for name in group.outputs}
    steps: list[tuple[View | Group, tuple[str, ...]]] = []
    for name in converted:
        if name in views:
            steps.append((views[name], (name,)))
        elif group_of[name].outputs[0] == name:
            steps.append((group_of[name], group_of[name].outputs))
    return steps


def _check_group(
    group: Group, convert: Convert, stand_ins: State, converted: Mapping[str, torch.Tensor], what: str
) -> None:
    # A conversion of some tensors could depend on the presence of others; then it cannot be done group by group.
    alone = convert({name: stand_ins[name] for name in group.inputs})
    if any(name not in alone or alone[name].shape != converted[name].shape for name in group.outputs):
        raise SourceError(
            f"{what}: {group.outputs[0]} cannot be computed from {', '.join(group.inputs)} alone; push a mapping of "
            "checkpoint names to tensors instead"
        )
