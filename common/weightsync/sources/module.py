"""A `torch.nn.Module` as a source: its state, with the names and layouts of its checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from weightsync.errors import SourceError
from weightsync.protocol.http import TensorSpec
from weightsync.sources import fingerprint
from weightsync.sources.adapters import MergedState, has_adapters, merged_state
from weightsync.sources.base import check_plain, check_same, describe, spec
from weightsync.sources.checkpoint_layout import Group, Recipe, State, View, compute, plain_recipe, traced_recipe
from weightsync.sources.dtensor import boxes_of, is_dtensor, is_sharded, local_of, whole_tensor
from weightsync.sources.flat import flat_state, is_deepspeed, is_fsdp, plain_name
from weightsync.sources.stand_in import StandIn
from weightsync.tensors.boxes import Box, Cut, FlatBox, LocalBox, cut_of, whole
from weightsync.tensors.held import HeldShards

_COMPILED: Final = "_orig_mod"

#: Packages whose modules do not hold the weights of a checkpoint, and what errors say about them.
_REFUSED_PACKAGES: Final = {
    "peft": "is part of a PEFT adapter; merge adapters first: push model.merge_and_unload()",
    "bitsandbytes": "holds quantised weights; push the full-precision model",
}


class ModuleSource:
    """The current state of a module, in the layout of its checkpoint.

    For a transformers module that is what ``save_pretrained`` would write; for any other its ``state_dict``, with only
    the first of several names of the same memory. Wrappers (DistributedDataParallel, torch.compile) are removed from
    the names. Parameters are looked up in every pass, so a replaced ``.data`` is noticed; a pass raises `SourceError`
    if names, shapes, strides, ties or shards have changed.

    Of DTensors, as FSDP2 makes them, this process sends its own part; nothing is gathered.
    """

    specs: tuple[TensorSpec, ...]

    def __init__(self, module: nn.Module):
        self._given, self._holder = module, unwrap(module)
        #: What the names of parameters refer to.
        self._module = _inside(self._holder)
        merged = has_adapters(self._holder)
        _check_modules(self._module, merged=merged)
        state = read_state(self._holder)
        self._traits = _traits_of(state)
        self._recipe = recipe_of(self._module, _logical(state))
        self.specs = self._recipe.specs
        #: For each checkpoint tensor that is a view of a sharded one: the view, and its local boxes.
        self._cuts = _cuts_of(self._recipe, state)
        self.held = tuple(_held(one, self._cuts.get(one.name)) for one in self.specs)
        self.device = next(iter(state.values())).device
        #: Whether the state is read otherwise than as the module's own.
        self._stands_in = merged or any(isinstance(tensor, StandIn) for tensor in state.values())
        #: The module's fingerprint when it was last found to have these traits.
        self._fingerprint = None if self._stands_in else fingerprint.fingerprint_of(self._module)
        #: Whether `reads` has just found the fingerprint to hold, so that `identity` need not check it again.
        self._just_checked = False
        plain = all(isinstance(step, View) for step in self._recipe.steps)
        #: Whether all tensors are views of memory that this process holds in full.
        self._in_place = plain and not self._cuts

    def reads(self, module: nn.Module) -> bool:
        """Whether this source was opened on this very module, and the module's layout has not changed since."""
        if module is not self._given:
            return False
        self._just_checked = self._is_unmoved()
        return self._just_checked or self._look()[1] == self._traits

    def identity(self) -> object | None:
        """See `Source.identity`."""
        just_checked, self._just_checked = self._just_checked, False
        return self._fingerprint if self._in_place and (just_checked or self._is_unmoved()) else None

    def _is_unmoved(self) -> bool:
        return self._fingerprint is not None and self._fingerprint.holds()

    def _look(self) -> tuple[State, dict[str, _Traits]]:
        """The state and its traits; fast if the fingerprint holds."""
        if self._is_unmoved() and (found := fingerprint.state_of(self._module)) is not None:
            return {plain_name(name): tensor.detach() for name, tensor in found.items()}, self._traits
        state = read_state(self._holder)
        traits = _traits_of(state)
        known = traits == self._traits and not self._stands_in
        self._fingerprint = fingerprint.fingerprint_of(self._module) if known else None
        return state, traits

    def tensors(self) -> Iterator[torch.Tensor]:
        """See `Source.tensors`. Yields views of the parameters, except for tensors that the conversion computes."""
        for held, parts in zip(self.held, self.parts(), strict=True):
            yield whole_tensor(held, parts)

    def parts(self) -> Iterator[Sequence[torch.Tensor]]:
        """See `Source`."""
        state, traits = self._look()
        if traits is not self._traits:
            _check_traits(self._traits, traits)
        specs = iter(self.specs)
        for step in self._recipe.steps:
            if not isinstance(step, Group):
                found = self._cuts.get(next(specs).name)
                yield (step.of(state),) if found is None else found.of(state[step.source])
                continue
            computed = compute(step, lambda tensors: save_layout(self._module, tensors), state)
            while computed:
                tensor, expected = computed.pop(0), next(specs)
                check_same(expected, spec(expected.name, tensor))
                yield (tensor,)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any nesting of DistributedDataParallel, DataParallel, DeepSpeed's engine and torch.compile."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)) or is_deepspeed(module):
            module = module.module  # type: ignore[assignment]
        elif isinstance(inner := module._modules.get(_COMPILED), nn.Module):
            module = inner
        else:
            return module


def _inside(module: Any) -> nn.Module:
    if has_adapters(module):
        module = module.get_base_model()
    return unwrap(module._fsdp_wrapped_module) if is_fsdp(module) else module


def read_state(module: nn.Module) -> State:
    """The tensors of ``module.state_dict()``, detached, with the prefixes of wrappers removed from their names.

    Of a module that FSDP1 or ZeRO-3 has sharded, they are `FlatPart`; adapters are `Merged`. Raises `SourceError`,
    naming the tensor, if two have the same name or one cannot be sent.
    """
    state: State = MergedState()
    found = merged_state(module) if has_adapters(module) else flat_state(module)
    for raw, tensor in (module.state_dict() if found is None else found).items():
        name = plain_name(raw)
        check_plain(name, tensor)
        if name in state:
            raise SourceError(f"{name}: {type(module).__name__} holds it twice, once inside torch.compile")
        state[name] = tensor.detach()
    return state


def recipe_of(module: nn.Module, state: State) -> Recipe:
    """How to make the checkpoint of ``module`` from ``state``, whose tensors may be on the meta device.

    Raises `SourceError` if transformers cannot convert the module.
    """
    what = type(module).__name__
    if not _is_transformers(module):
        return plain_recipe(state, (names[0] for names in _by_memory(state)), what)
    ignored = set(getattr(module, "_keys_to_ignore_on_save", None) or ())
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    tied = _tied_patterns(module)
    kept = {_kept_name(names, tied) for names in _by_memory(state)}
    state = {name: tensor for name, tensor in state.items() if name in kept}
    return traced_recipe(state, lambda tensors: save_layout(module, tensors), what)


def save_layout(module: nn.Module, tensors: State) -> Mapping[str, torch.Tensor]:
    """What ``save_pretrained`` would write for these tensors of a transformers module.

    Raises `SourceError` if transformers is too old, or cannot convert them.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4
        return _renamed(module, tensors)
    try:
        converted: Mapping[str, torch.Tensor] = revert_weight_conversion(module, tensors)
    except Exception as error:
        raise SourceError(
            f"transformers cannot convert the weights of {type(module).__name__} to checkpoint layout ({error}); push "
            "a mapping of checkpoint names to tensors instead"
        ) from error
    return converted


def _renamed(module: Any, tensors: State) -> Mapping[str, torch.Tensor]:
    """The tensors under the names that transformers 4 would save: it only renames, and only vision-language models."""
    try:
        from transformers.modeling_utils import VLMS
    except ImportError as error:
        raise SourceError(
            "reading a transformers module needs transformers 4.57; upgrade it, or push a mapping of checkpoint names"
        ) from error
    if not any(known in kind.__name__.lower() for kind in type(module).__mro__ for known in VLMS):
        return tensors
    found = {}
    for own, tensor in tensors.items():
        name = own
        for saved, loaded in module._checkpoint_conversion_mapping.items():
            # Keys are patterns of names in checkpoints, of which the groups only look ahead.
            name, count = re.subn(loaded, re.sub(r"\(.*\)", "", saved.lstrip("^")), own)
            if count:
                break
        found[name] = tensor
    return found


def _check_modules(module: nn.Module, *, merged: bool) -> None:
    for name, part in module.named_modules():
        kind, package = type(part), type(part).__module__.partition(".")[0]
        if (reason := _REFUSED_PACKAGES.get(package)) and not (merged and package == "peft"):
            raise SourceError(f"{name or 'the module'} ({kind.__name__}) {reason}")
        if getattr(part, "hf_quantizer", None) is not None:
            raise SourceError(f"{name or 'the module'} ({kind.__name__}) is quantised; push the full-precision model")


def _is_transformers(module: nn.Module) -> bool:
    # Such a module can exist only if transformers is imported already; importing it here would cost all others time.
    base: Any = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return base is not None and isinstance(module, base)


def _by_memory(state: State) -> list[list[str]]:
    """Names of the same memory grouped together, in the order of the state."""
    groups: dict[Any, list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault(_memory(name, tensor), []).append(name)
    return list(groups.values())


def _logical(state: State) -> State:
    """The state with each sharded tensor replaced by a meta tensor of its full shape."""
    if not any(map(is_sharded, state.values())):
        return state
    whole_of = {
        name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
        for names in _by_memory(state)
        for name, tensor in [(names[0], state[names[0]])]
        if is_sharded(tensor)
    }
    first = {name: names[0] for names in _by_memory(state) for name in names}
    return {name: whole_of.get(first[name], tensor) for name, tensor in state.items()}


class _Parts(NamedTuple):
    """A checkpoint tensor that is the view ``cut`` of a sharded one; ``boxes`` are this process's parts of the view."""

    cut: Cut
    boxes: tuple[LocalBox | FlatBox, ...]

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The current values of the boxes, given the sharded tensor."""
        local = local_of(tensor)
        return [self.cut.turned(box.of(local)) for box in self.boxes]

    def seen(self) -> tuple[Box, ...]:
        """The boxes, as boxes of the checkpoint tensor."""
        return tuple(self.cut.seen(one.box) for one in self.boxes)


def _cuts_of(recipe: Recipe, state: State) -> dict[str, _Parts]:
    """The views of sharded tensors, by checkpoint name.

    Raises `SourceError`, naming it, for a tensor that would have to be computed from sharded tensors.
    """
    found: dict[str, _Parts] = {}
    specs = iter(recipe.specs)
    for step in recipe.steps:
        inputs = (step.source,) if isinstance(step, View) else step.inputs
        outputs = [next(specs) for _ in range(1 if isinstance(step, View) else len(step.outputs))]
        sharded = [name for name in inputs if is_sharded(state.get(name))]  # computes nothing
        if not sharded:
            continue
        name, tensor = sharded[0], state[sharded[0]]
        cut = cut_of(tensor.shape, step.shape, step.stride, step.offset) if isinstance(step, View) else None
        if cut is None:
            raise SourceError(
                f"{outputs[0].name} is computed from {name}, of which every rank holds a part, and is not a plain "
                "slice of it; keep that module from being sharded, or push a mapping of checkpoint names to tensors"
            )
        found[outputs[0].name] = _Parts(cut, cut.local(boxes_of(name, tensor)))
    return found


def _held(one: TensorSpec, parts: _Parts | None) -> HeldShards:
    return HeldShards(one, (whole(one),)) if parts is None else HeldShards(one, parts.seen(), replicated=True)


def _memory(name: str, tensor: torch.Tensor) -> object:
    if isinstance(tensor, StandIn):
        return tensor.key
    if is_dtensor(tensor):
        # Tied names share one local storage, even if this rank's part is empty.
        return local_of(tensor).untyped_storage()._cdata, tuple(tensor.shape), tensor.dtype, str(tensor.placements)
    if not tensor.numel():
        return name  # an empty tensor shares no memory
    # The address of the storage object, because meta tensors have no data pointer.
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _tied_patterns(module: nn.Module) -> list[str]:
    return [
        f"{plain_name(f'{name}.')}{pattern}" if name else pattern
        for name, part in module.named_modules()
        for pattern in getattr(part, "_tied_weights_keys", None) or ()
    ]


def _kept_name(names: list[str], tied: list[str]) -> str:
    """Which of several names of one tensor ``save_pretrained`` keeps: the first not declared as tied, if any."""
    undeclared = [name for name in names if not any(re.search(pattern, name) for pattern in tied)]
    return undeclared[0] if undeclared else max(names)


class _Traits(NamedTuple):
    """What a recipe assumes about a tensor; ``alias`` is the first name of the same memory."""

    spec: TensorSpec
    stride: tuple[int, ...]
    alias: str
    boxes: tuple[LocalBox | FlatBox, ...]


def _traits_of(state: State) -> dict[str, _Traits]:
    alias = {name: names[0] for names in _by_memory(state) for name in names}
    return {
        name: _Traits(
            describe(name, tensor), tensor.stride(), alias[name], boxes_of(name, tensor) if is_sharded(tensor) else ()
        )
        for name, tensor in state.items()
    }


def _check_traits(opened: Mapping[str, _Traits], now: Mapping[str, _Traits]) -> None:
    if opened == now:
        return
    changed = min(name for name in opened.keys() | now.keys() if opened.get(name) != now.get(name))
    raise SourceError(
        f"{changed}: its shape, dtype, stride, tie or shards have changed since the source was opened; open the source "
        "again"
    )
