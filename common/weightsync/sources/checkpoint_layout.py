"""How the tensors of a checkpoint follow from those of a module, worked out once without touching any data.

transformers may hold weights in another form than its checkpoints: it fuses the experts of a layer, renames, splits and
permutes. ``save_pretrained`` undoes that by running its conversions over the whole state. Here the same conversions run
once over fake tensors, which have shapes and strides but no data, to find out where in which parameter each checkpoint
tensor lies. A tensor that is a view of a parameter costs nothing in a push. One that is computed (concatenated,
permuted) is computed again in every push, one group of connected tensors at a time.

A view of a sharded parameter is cut out of the local part if it is a box of the parameter, with its dimensions in any
order. Everything else that involves sharded parameters is refused by name.
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
    """A checkpoint tensor that is a view of the tensor ``source``, at ``offset`` in elements from its start.

    If ``source`` is sharded, offset and stride are those in the whole tensor, laid out contiguously.
    """

    source: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, state: State) -> torch.Tensor:
        """The view of the current ``source`` in ``state``."""
        source = state[self.source]
        if not self.offset and source.shape == self.shape and source.stride() == self.stride:
            return source
        return source.as_strided(self.shape, self.stride, int(source.storage_offset()) + self.offset)


class Group(NamedTuple):
    """Checkpoint tensors (``outputs``) that have to be computed together from the tensors ``inputs``."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Recipe(NamedTuple):
    """How to make the tensors of a checkpoint. ``specs`` are those of ``steps``, each of which makes one or a group."""

    specs: tuple[TensorSpec, ...]
    steps: tuple[View | Group, ...]


def plain_recipe(state: State, names: Iterable[str], what: str) -> Recipe:
    """The recipe that sends every named tensor of the state as it is. ``what`` names the module in errors."""
    steps = {name: View(name, 0, tuple(state[name].shape), state[name].stride()) for name in names}
    return Recipe(finish((spec(name, state[name]) for name in steps), what), tuple(steps.values()))


def traced_recipe(state: State, convert: Convert, what: str) -> Recipe:
    """The recipe of ``convert``, a function from the tensors of a module to those of its checkpoint.

    ``convert`` is called with tensors on the meta device. It may move data and compute, but must neither write into its
    inputs nor read values. Raises `SourceError` if it writes. ``what`` names the module in errors.
    """
    # The caller may be in inference mode, whose tensors do not count writes.
    with torch.inference_mode(False), torch.no_grad():
        fakes = {name: _fake(tensor) for name, tensor in state.items()}
        names = {_storage(tensor): name for name, tensor in fakes.items()}
        with _KeepStrides(), _Trace(names) as trace:
            converted = convert(dict(fakes))
    if any(tensor._version for tensor in fakes.values()):
        raise SourceError(f"{what}: its conversion to checkpoint layout writes into the weights")
    views = {
        name: View(names[_storage(tensor)], int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        for name, tensor in converted.items()
        if _is_view(tensor, names, fakes)
    }
    groups = _groups({name: trace.origins_of(tensor) for name, tensor in converted.items() if name not in views})
    steps = _in_order(converted, views, groups)
    ordered = [name for step, outputs in steps for name in outputs]
    specs = finish((spec(name, converted[name]) for name in ordered), what)
    for group in groups:
        _check_group(group, convert, fakes, converted, what)
    return Recipe(specs, tuple(step for step, _ in steps))


def compute(group: Group, convert: Convert, state: State) -> list[torch.Tensor]:
    """The outputs of a group, computed from the current tensors."""
    converted = convert({name: state[name] for name in group.inputs})
    return [converted[name] for name in group.outputs]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


def _storage(tensor: torch.Tensor) -> int:
    # Meta tensors have no data pointer; the address of the storage object identifies one as long as it lives.
    return int(tensor.untyped_storage()._cdata)


def _is_view(tensor: torch.Tensor, names: Mapping[int, str], fakes: State) -> bool:
    name = names.get(_storage(tensor))
    return name is not None and tensor.dtype == fakes[name].dtype


class _KeepStrides(TorchFunctionMode):
    """Makes ``contiguous()`` return its argument: packing makes tensors contiguous anyway.

    transformers calls it on every slice of fused weights, so all of them would be copied.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.contiguous and len(args) == 1 and not kwargs:
            return args[0]
        return func(*args, **(kwargs or {}))


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records for every new storage which of the named tensors it was computed from."""

    def __init__(self, names: Mapping[int, str]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, frozenset[str]] = {storage: frozenset([name]) for storage, name in names.items()}
        self._alive: list[torch.Tensor] = []  # an address identifies a storage only while the storage lives

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
        """Names of the tensors that ``tensor`` was computed from."""
        return self._origins.get(_storage(tensor), frozenset())


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _groups(origins: Mapping[str, frozenset[str]]) -> list[Group]:
    """The smallest groups of outputs such that no two groups share an input."""
    groups: list[tuple[set[str], list[str]]] = []
    for output, inputs in origins.items():
        merged, outputs = set(inputs), [output]
        disjoint = []
        for group in groups:
            if group[0].isdisjoint(inputs):
                disjoint.append(group)
            else:
                merged |= group[0]
                outputs = group[1] + outputs
        groups = [*disjoint, (merged, outputs)]
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
    group: Group, convert: Convert, fakes: State, converted: Mapping[str, torch.Tensor], what: str
) -> None:
    # A conversion that depends on the presence of other tensors cannot be done group by group.
    alone = convert({name: fakes[name] for name in group.inputs})
    if any(name not in alone or alone[name].shape != converted[name].shape for name in group.outputs):
        raise SourceError(
            f"{what}: {group.outputs[0]} cannot be computed from {', '.join(group.inputs)} alone; push a mapping of "
            "checkpoint names to tensors instead"
        )
