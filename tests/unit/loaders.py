"""Models, checkpoints and loaders for the tests of load plans."""

import contextlib
import copy
import itertools

import torch

from weightsync.engine.adapter import Expected, LoaderHooks
from weightsync.engine.loading.load_plan import LoadPlan
from weightsync.engine.stage import Staged
from weightsync.tensors.boxes import Box, narrowed
from weightsync.tensors.divided import Divided
from weightsync.tensors.domains import DividedLayout
from weightsync.tensors.layout import Layout, spec_of
from weightsync.tensors.scattered import Parts
from weightsync.tensors.subset import Subset

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def random_bits(shape, dtype, generator):
    """Random finite values of a dtype."""
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 4
    return values.to(dtype)


class Model(torch.nn.Module):
    """A module with the given parameters and buffers."""

    def __init__(self, parameters, buffers=None):
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        for name, tensor in (buffers or {}).items():
            self.register_buffer(name, tensor)


def staged(checkpoint):
    """The layout of a checkpoint, and a stage that holds it."""
    layout = Layout([spec_of(name, tensor) for name, tensor in checkpoint.items()])
    stage = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8)
    for entry in layout.entries:
        entry.view(stage).copy_(checkpoint[entry.spec.name])
    return layout, stage


def scattered(layout, stage):
    """The same bytes, with every tensor in separate memory."""
    entries = [entry for entry in layout.entries if entry.nbytes]
    parts = [entry.raw(stage).clone() for entry in entries]
    return Parts([entry.offset for entry in entries], parts, layout.nbytes, torch.zeros(1))


def divided(layout, stage, choose):
    """The same bytes, with every tensor cut in several dimensions, and the parts in the memory of two domains.

    One is an arena; in the other every part has memory of its own. ``choose(count)`` returns one of so many numbers.
    """
    held = [[], []]
    for entry in layout.entries:
        cuts = [sorted({0, choose(size + 1), size}) for size in entry.spec.shape]
        for cell in itertools.product(*map(itertools.pairwise, cuts)):
            box = Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
            held[choose(2)] += [(entry.number, box)] if entry.nbytes else []
    table = tuple(tuple((number, tuple(box)) for number, box in own) for own in held)
    made = DividedLayout(layout.specs, table)
    memories = [torch.zeros(made.domain_bytes(domain), dtype=torch.uint8) for domain in (0, 1)]
    for entry in made.entries:
        for cell in made.cells(entry.number):
            part = narrowed(entry.view(stage), *cell.box).contiguous().view(-1).view(torch.uint8)
            memories[cell.domain][cell.at : cell.at + part.numel()] = part
    starts = sorted(cell.at for entry in made.entries for cell in made.cells(entry.number) if cell.domain == 1)
    parts = [memories[1][at:end].clone() for at, end in itertools.pairwise([*starts, made.domain_bytes(1)])]
    apart = Parts(starts, parts, made.domain_bytes(1), torch.zeros(1)) if parts else None
    return Divided(made, [memories[0] if memories[0].numel() else None, apart])


def plan_for(model, load, checkpoint):
    """A plan and its stage; asserts that recording changed nothing."""
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    held = dict(model.state_dict(keep_vars=True))
    layout, stage = staged(checkpoint)
    try:
        plan = LoadPlan(LoaderHooks(model, lambda weights: load(model, weights), contextlib.nullcontext), layout, CPU)
    finally:
        after = model.state_dict(keep_vars=True)
        assert all(after[name] is tensor for name, tensor in held.items())
        assert {name: bits(tensor) for name, tensor in after.items()} == before
    return plan, stage


def bits(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def really_loaded(model, load, checkpoint):
    loaded = copy.deepcopy(model)
    load(loaded, ((name, tensor.clone()) for name, tensor in checkpoint.items()))
    return {name: bits(tensor) for name, tensor in loaded.state_dict().items()}


def by_name(model, weights):
    """A loader that copies each tensor into the parameter of its name."""
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)


def two(**more):
    """A model with two parameters, and those in ``more``, and a checkpoint for it."""
    names = {"plain": (4, 6), "odd": (4, 6), **more}
    model = Model({name: torch.randn(shape) for name, shape in names.items()})
    return model, {name: torch.randn(shape) for name, shape in names.items()}


def odd_loader(act):
    """A loader that calls ``act`` for the tensor ``odd`` and copies the others."""

    def load(model, weights):
        for name, tensor in weights:
            if name == "odd":
                act(model.odd, tensor)
            else:
                model.get_parameter(name).data.copy_(tensor)

    return load


class AdapterOf:
    """An adapter of a model and its loader; ``specs`` describe the checkpoint that the engine was started with."""

    rank, device = 0, CPU

    def __init__(self, model, load, specs):
        self.model, self._load, self._specs = model, load, tuple(specs)

    def drafting(self):
        return ""

    def expected(self):
        return Expected(self._specs)

    def loader_hooks(self):
        return LoaderHooks(self.model, self.load, contextlib.nullcontext)

    @torch.no_grad()
    def load(self, weights):
        self._load(self.model, weights)


def push_into(loading, checkpoint, push="push", *, stage=None):
    """Load a push as a receiver does; returns the stage."""
    layout = loading.accept([spec_of(name, tensor) for name, tensor in checkpoint.items()], push=push)
    stage = torch.zeros(max(layout.nbytes, 1), dtype=torch.uint8) if stage is None else stage
    for entry in layout.entries:
        entry.view(stage).copy_(checkpoint[entry.spec.name])
    staged = Staged(push, Subset(layout, {}), stage)
    loading.prepare_load(staged, push)
    loading.load(staged)
    return staged
