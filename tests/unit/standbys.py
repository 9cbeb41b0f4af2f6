"""Engines whose loader packs, and whose weights may move; checkpoints for them, and pushes into a standby."""

import contextlib

import torch

from tests.unit.loaders import AdapterOf, Model, bits, by_name
from weightsync.engine.adapter import LoaderHooks, Movable, Sealed, StandbyHooks
from weightsync.engine.exchange.slices import Unfinished
from weightsync.engine.stage import Staged
from weightsync.tensors.layout import spec_of
from weightsync.tensors.subset import Subset

NAMES = tuple(f"layer_{number}" for number in range(40))


def checkpoint(content):
    numbers = torch.Generator().manual_seed(content)
    return {name: torch.randn(30, 4, generator=numbers) for name in NAMES}


class Packs(AdapterOf):
    """Its loader negates what it loads. ``fails`` makes it raise in the middle, ``act`` is called there."""

    def __init__(self):
        model = Model({name: torch.zeros(30, 4) for name in NAMES})
        super().__init__(model, self.load_into, [spec_of(*pair) for pair in checkpoint(0).items()])
        self.fails, self.act, self.made, self.served = None, lambda model: None, 0, 0
        self.loads = {"live": 0, "standby": 0}
        self.nbytes, self.discarded = 1, []
        self.discard = self.discarded.append

    def loader_hooks(self):
        return Sealed(self.model, "it packs layers", self.hooks)

    def hooks(self):
        return StandbyHooks(self.model, self.nbytes, self.make, self.load_into, self.count, self.discard)

    def count(self):
        self.served += 1

    def make(self, weights):
        self.made += 1
        model = Model({name: torch.zeros(30, 4) for name in NAMES})
        self.load_into(model, weights)
        return model

    @torch.no_grad()
    def load_into(self, model, weights):
        self.loads["live" if model is self.model else "standby"] += 1
        for number, (name, tensor) in enumerate(weights):
            if number == len(NAMES) // 2:
                self.act(model)
                if self.fails is not None:
                    raise self.fails
            model.get_parameter(name).copy_(tensor).neg_()

    def holds(self):
        """The content that the served model has."""
        (found,) = [
            content
            for content in range(10)
            if all(
                bits(-tensor) == bits(self.model.get_parameter(name)) for name, tensor in checkpoint(content).items()
            )
        ]
        return found


class Slotted:
    """Holds a tensor without a dictionary."""

    __slots__ = ("held",)


class Moves(AdapterOf):
    """Everything that refers to the first layer's weight: another name, views, containers, a closure, an object."""

    def __init__(self, load=by_name):
        model = Model({name: torch.zeros(30, 4) for name in NAMES})
        super().__init__(model, load, [spec_of(*pair) for pair in checkpoint(0).items()])
        first = model.layer_0
        model.tied = first
        model.views = [first.data[3:5], {"row": first.data[7]}, (first.data.T,), {first.data[8]}]
        model.computes = lambda: first.data.sum()  # noqa: PLW0108 - a closure
        model.slotted = Slotted()
        model.slotted.held = first.data.view(-1)
        self.movable, self.around, self.loads = Movable(), contextlib.nullcontext, 0

    def loader_hooks(self):
        return LoaderHooks(self.model, super().load, lambda: self.around(), self.movable)  # noqa: PLW0108 - it changes

    def load(self, weights):
        self.loads += 1
        super().load(weights)

    def holds(self):
        """The content that the served model has, wherever one looks."""
        (found,) = [
            content
            for content in range(10)
            if all(bits(tensor) == bits(self.model.get_parameter(name)) for name, tensor in checkpoint(content).items())
        ]
        first, model = checkpoint(found)["layer_0"], self.model
        (row,) = model.views[3]
        for seen, expected in (
            (model.views[0], first[3:5]),
            (model.views[1]["row"], first[7]),
            (model.views[2][0], first.T),
            (row, first[8]),
            (model.slotted.held, first.view(-1)),
            (model.tied, first),
        ):
            assert torch.equal(seen, expected)
        assert model.computes() == first.sum()
        return found


def by_name_but_half_of_one(model, weights):
    for name, tensor in weights:
        if name == "layer_9":
            model.layer_9.data[:3].copy_(tensor[:3])
        else:
            model.get_parameter(name).data.copy_(tensor)


def stage_of(loading, content, push, wrap=lambda layout, stage: stage, kind=Staged):
    layout = loading.accept([spec_of(*pair) for pair in checkpoint(content).items()], push=push)
    stage = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for entry in layout.entries:
        entry.view(stage).copy_(checkpoint(content)[entry.spec.name])
    return kind(push, Subset(layout, {}), wrap(layout, stage))


def ready(loading, staged, between=lambda: None):
    """Prepare to load as an engine that is asked again; returns how often it was."""
    asked = 1
    while True:
        try:
            loading.prepare_load(staged, staged.push)
        except Unfinished:
            asked += 1
            between()
        else:
            return asked


def push(loading, content, name="", **more):
    staged = stage_of(loading, content, name or f"push {content}")
    asked = ready(loading, staged, **more)
    loading.load(staged, staged.push)
    staged.data.fill_(77)  # as the sender overwrites it
    return asked


def unlike(adapter):
    adapter.model.served = torch.zeros(3)
