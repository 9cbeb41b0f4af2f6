"""A model and the draft model that proposes tokens for it, as one `Adapter`: both are loaded, or neither.

A push that has both is one checkpoint, one stage, one load plan and one standby. The draft's tensors have names of
their own in it (`protocol.draft`); where its weights are in the model's own checkpoint, both read that.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from weightsync.engine.adapter import Adapter, Expected, LoaderHooks, LoraHooks, Movable, Sealed, StandbyHooks
from weightsync.errors import ManifestMismatch
from weightsync.protocol.draft import PREFIX, in_push, of_draft
from weightsync.tensors.layout import listed

Weights = Iterable[tuple[str, torch.Tensor]]


class Models(torch.nn.Module):
    """A model and its draft as one model."""

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module):
        super().__init__()
        self.target, self.draft = target, draft

    def shared(self) -> list[tuple[str, str]]:
        """The names of the modules that the engine has both use: in the draft, and in the model."""
        places = {id(module): name for name, module in self.target.named_modules()}
        found = self.draft.named_modules(remove_duplicate=False)
        return [(name, places[id(module)]) for name, module in found if id(module) in places]

    def put(self, name: str, module: torch.nn.Module) -> None:
        """Put a module in the place of one of the draft's."""
        parent, _, own = name.rpartition(".")
        self.draft.get_submodule(parent)._modules[own] = module


class _Parts(NamedTuple):
    target: Weights
    draft: Weights


class WithDraft:
    """See `Adapter`: that of a model, and of its draft. ``own``: the draft has a checkpoint of its own."""

    def __init__(self, target: Adapter, draft: Adapter, *, own: bool = True):
        self._target, self._draft, self._own = target, draft, own
        self.rank, self.device = target.rank, target.device
        #: As one model, always the same object for the same models.
        self._models: Models | None = None

    def drafting(self) -> Adapter | str:
        """See `Adapter`."""
        return self if self._own else ""

    def expected(self) -> Expected:
        """The checkpoints of both, or the one that both read."""
        target = self._target.expected()
        if not self._own:
            return target
        draft = self._draft.expected()
        optional = target.optional.union(PREFIX + name for name in draft.optional)
        return Expected((*target.specs, *in_push(draft.specs)), optional, target.quantization)

    def loader_hooks(self) -> LoaderHooks | Sealed | str:
        """Those of both; sealed if one of them is."""
        target, draft = self._target.loader_hooks(), self._draft.loader_hooks()
        if isinstance(target, str) or isinstance(draft, str):
            return target if isinstance(target, str) else f"the draft model: {draft}"
        model = self._both(target.model, draft.model)
        for hooks in (target, draft):
            if isinstance(hooks, Sealed):
                return Sealed(model, hooks.why, lambda: self._standby(model, target, draft))
        assert isinstance(target, LoaderHooks)
        assert isinstance(draft, LoaderHooks)

        def load(weights: Weights) -> None:
            parts = self._parted(weights)
            target.load(parts.target)
            draft.load(parts.draft)

        movable = target.movable if isinstance(draft.movable, Movable) else draft.movable
        return LoaderHooks(
            model, load, lambda: _around(target, draft), movable, lambda: self._standby(model, target, draft)
        )

    def _both(self, target: torch.nn.Module, draft: torch.nn.Module) -> Models:
        if self._models is None or self._models.target is not target or self._models.draft is not draft:
            self._models = Models(target, draft)
        return self._models

    def _standby(self, model: Models, target: LoaderHooks | Sealed, draft: LoaderHooks | Sealed) -> StandbyHooks | str:
        first, second = target.standby(), draft.standby()
        if isinstance(first, str) or isinstance(second, str):
            return first if isinstance(first, str) else second

        def make(weights: Weights) -> torch.nn.Module:
            parts = self._parted(weights)
            made = Models(first.make(parts.target), second.make(parts.draft))
            for name, own in model.shared():
                made.put(name, made.target.get_submodule(own))
            return made

        def load(found: torch.nn.Module, weights: Weights) -> None:
            assert isinstance(found, Models)
            parts = self._parted(weights)
            first.load(found.target, parts.target)
            second.load(found.draft, parts.draft)

        def served() -> None:
            first.served()
            second.served()

        def discard(found: torch.nn.Module) -> None:
            assert isinstance(found, Models)
            for name, _ in found.shared():
                found.put(name, torch.nn.Module())
            second.discard(found.draft)
            first.discard(found.target)

        nbytes = first.nbytes + second.nbytes
        return first._replace(model=model, nbytes=nbytes, make=make, load=load, served=served, discard=discard)

    def load(self, weights: Weights) -> None:
        """The model, then its draft, each through the engine's own path."""
        parts = self._parted(weights)
        self._target.load(parts.target)
        self._draft.load(parts.draft)

    def lora_hooks(self) -> LoraHooks:
        """Those of the model."""
        return self._target.lora_hooks()

    def digest(self) -> str:
        """The digest of both."""
        return digest_of_both(self._target.digest(), self._draft.digest())

    def differing(self, weights: Weights) -> list[str]:
        """What differs in either; the draft's names are marked."""
        parts = self._parted(weights)
        return [
            *self._target.differing(parts.target),
            *(PREFIX + name for name in self._draft.differing(parts.draft)),
        ]

    def _parted(self, weights: Weights) -> _Parts:
        return _parted(weights) if self._own else _Parts(*itertools.tee(weights))


def digest_of_both(target: str, draft: str) -> str:
    """The digest of a model and its draft, from theirs."""
    return hashlib.blake2b(f"{target} {draft}".encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _around(target: LoaderHooks, draft: LoaderHooks) -> Iterator[None]:
    with target.around(), draft.around():
        yield


def _parted(weights: Weights) -> _Parts:
    """The model's tensors, and after them the draft's, by the names of its own checkpoint; each to be read once, in
    this order."""
    left, first = iter(weights), list[tuple[str, torch.Tensor]]()

    def target() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in left:
            if of_draft(name):
                first.append((name, tensor))
                return
            yield name, tensor

    def draft() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in itertools.chain(first, left):
            if of_draft(name):  # the model's loader need not read to its end
                yield name.removeprefix(PREFIX), tensor

    return _Parts(target(), draft())


def apart(target: torch.nn.Module, draft: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Of names of what a draft holds, those that are not of a layer or parameter which it shares with the model."""
    held = {id(each) for each in (*target.modules(), *target.parameters())}
    own = (*draft.named_modules(remove_duplicate=False), *draft.named_parameters(remove_duplicate=False))
    shared = {name for name, each in own if id(each) in held}
    return [name for name in names if shared.isdisjoint(itertools.accumulate(name.split("."), "{}.{}".format))]


def why_not(target: torch.nn.Module, draft: torch.nn.Module, adapter: Adapter) -> str:
    """Why a draft that has a checkpoint of its own cannot be pushed; empty if it can."""
    try:
        specs = adapter.expected().specs
    except ManifestMismatch as error:
        return str(error)
    held = {id(each) for each in target.parameters()}
    shared = [name.removeprefix("model.") for name, each in draft.named_parameters() if id(each) in held]
    if both := [spec.name for spec in specs if any(spec.name.endswith(own) for own in shared)]:
        return (
            f"it would be loaded into layers of the model: the engine has both use the same for {listed(both)}; start "
            "it with a draft whose checkpoint lacks these"
        )
    return ""


def check_order(names: Iterable[str]) -> None:
    """Raise `ManifestMismatch` for a push in which a tensor of the model comes after one of its draft: they are
    loaded one model after the other."""
    last = ""
    for name in names:
        if last and not of_draft(name):
            raise ManifestMismatch(f"{name} comes after {last}; a push has the tensors of a draft model last")
        last = name if of_draft(name) else ""
