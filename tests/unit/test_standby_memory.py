"""The memory of a standby: how it is given back, and what happens where there is none, or no standby."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch

from tests.unit.standbys import Packs, push, ready, stage_of, unlike
from weightsync.engine.adapter import Sealed
from weightsync.engine.loading.loader import Loading
from weightsync.memory import arenas
from weightsync.uncollected import uncollected


class Packed:
    """Memory behind a handle, as of oneDNN: its owner frees it. It refers to its layer, which refers to it."""

    def __init__(self, layer, freed):
        self.layer, self.freed, self.handle = layer, freed, torch.tensor(id(self))

    def __del__(self):
        self.freed.append(self.handle.item())


def test_what_lies_behind_a_handle_is_freed_with_the_standby(monkeypatch):
    freed, made = [], []

    def make(self, weights):
        model = plain(self, weights)
        made.append(id(model.__dict__.setdefault("packed", Packed(model, freed))))
        return model

    plain = Packs.make
    monkeypatch.setattr(Packs, "make", make)
    adapter = Packs()
    adapter.discard = lambda model: None
    adapter.model.packed = Packed(adapter.model, freed)
    served = adapter.model.packed.handle.item()
    loading = Loading(adapter)
    push(loading, 1)
    assert adapter.model.packed.handle.item() == made[0]
    loading.standby.release()
    assert (freed, adapter.model.packed.handle.item(), adapter.holds()) == ([served], made[0], 1)


def test_a_model_whose_layers_the_engine_parts_is_freed_without_a_collection(monkeypatch):
    def make(self, weights):
        model = plain(self, weights)
        model.loader = model.load_state_dict  # it refers to the model
        made.append(weakref.ref(model))
        return model

    def collect():
        raise AssertionError("every object of the process is read")

    plain, made = Packs.make, []
    monkeypatch.setattr(Packs, "make", make)
    adapter = Packs()
    adapter.model.loader = adapter.model.load_state_dict
    adapter.discard = lambda model: vars(model).clear()
    loading = Loading(adapter)
    push(loading, 1)
    with uncollected():
        monkeypatch.setattr(gc, "collect", collect)
        loading.standby.release()
        assert made[0]() is None


def test_what_is_given_back_is_made_again_by_the_next_push():
    adapter = Packs()
    loading = Loading(adapter)
    push(loading, 1)
    push(loading, 2)
    held = list(loading.standby._model.parameters())
    loading.standby.release()
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == 0
    assert (adapter.holds(), len(adapter.discarded)) == (2, 1)
    assert not loading.standby.undo("push 2")
    for content in (3, 4):
        push(loading, content)
        assert adapter.holds() == content
    assert (adapter.made, adapter.loads["live"]) == (2, 0)


def test_without_room_the_engine_loads_in_the_pause_until_there_is_room(monkeypatch):
    adapter = Packs()
    loading = Loading(adapter)
    adapter.nbytes = 1000
    monkeypatch.setattr(arenas, "free_bytes", lambda device: 999)
    push(loading, 1)
    assert (adapter.holds(), adapter.made, adapter.loads["live"]) == (1, 0, 1)
    assert loading.path.endswith("it packs layers; no standby: it takes 1000 bytes, and 999 are free")
    monkeypatch.undo()
    push(loading, 2)
    assert (adapter.holds(), adapter.made, adapter.loads["live"]) == (2, 1, 1)


@pytest.mark.parametrize("error", [MemoryError("no memory"), RuntimeError("DefaultCPUAllocator: can't allocate")])
def test_memory_that_runs_out_while_a_standby_is_made_is_tried_for_again(error):
    adapter = Packs()
    loading = Loading(adapter)
    adapter.fails = error
    staged = stage_of(loading, 1, "push 1")
    ready(loading, staged)
    adapter.fails = None
    loading.load(staged, "push 1")
    assert (adapter.holds(), adapter.loads["live"]) == (1, 1)
    assert str(error) in loading.path
    push(loading, 2)
    assert (adapter.holds(), adapter.made, adapter.loads["live"]) == (2, 2, 1)


def test_where_the_two_are_not_alike_the_engine_loads_in_the_pause():
    adapter = Packs()
    loading = Loading(adapter)
    unlike(adapter)
    for content in (1, 2, 3, 4):
        push(loading, content)
        assert adapter.holds() == content
    assert (adapter.made, adapter.loads["live"]) == (2, 4)
    assert loading.path.endswith("it packs layers; no standby: Unlike:  has served in one of them only")


def test_a_model_that_is_alike_again_has_a_standby_again():
    adapter = Packs()
    loading = Loading(adapter)
    for content in (1, 2, 3, 4, 5, 6):
        if content % 2:
            unlike(adapter)
        else:
            del adapter.model.served
        push(loading, content)
        assert adapter.holds() == content
        assert bool(loading.standby.why) == bool(content % 2)


def test_an_engine_that_cannot_make_one_is_not_asked_for_ever():
    adapter = Packs()
    loading = Loading(adapter)
    for content in (1, 2, 3):
        staged = stage_of(loading, content, f"push {content}")
        adapter.fails = RuntimeError("two of them cannot be")
        ready(loading, staged)
        ready(loading, staged)  # another rank was not ready
        adapter.fails = None
        loading.load(staged, staged.push)
        assert adapter.holds() == content
    assert (adapter.made, adapter.loads["live"]) == (2, 3)
    assert loading.path.endswith("no standby: RuntimeError: two of them cannot be")


def a_draft_model(adapter):
    return "there is a draft model"


def one_that_packs(adapter):
    return Sealed(adapter.model, "it packs layers")


@pytest.mark.parametrize("hooks", [a_draft_model, one_that_packs])
def test_an_engine_that_never_has_one_loads_in_the_pause(hooks):
    adapter = Packs()
    adapter.loader_hooks = lambda: hooks(adapter)
    loading = Loading(adapter)
    for content in (1, 2):
        push(loading, content)
        assert adapter.holds() == content
    assert adapter.loads["live"] == 2
    assert "standby" not in loading.path


GIVES_BACK = """
import contextlib

import psutil
import torch

from tests.unit.loaders import AdapterOf, Model, by_name
from tests.unit.standbys import ready
from weightsync.engine.adapter import LoaderHooks, Movable
from weightsync.engine.loading.loader import Loading
from weightsync.engine.stage import Staged
from weightsync.tensors.layout import spec_of
from weightsync.tensors.subset import Subset


def checkpoint(content):
    return {f"layer_{number}": torch.full((512, 512), content) for number in range(40)}


class Moves(AdapterOf):
    def loader_hooks(self):
        return LoaderHooks(self.model, self.load, contextlib.nullcontext, Movable())


torch.empty(30 << 20, dtype=torch.uint8)  # freed: from now on the C library keeps pieces of up to this size
specs = [spec_of(*pair) for pair in checkpoint(0.0).items()]
loading = Loading(Moves(Model(checkpoint(0.0)), by_name, specs))
stage = torch.zeros(40 << 20, dtype=torch.uint8)
for content in (1.0, 2.0, 3.0):
    staged = Staged(f"push {content}", Subset(loading.accept(specs), {}), stage)
    for entry in staged.layout.entries:
        entry.view(stage).fill_(content)
    ready(loading, staged)
    loading.load(staged, staged.push)
last = torch.zeros(1 << 20, dtype=torch.uint8)  # behind what is to be freed
held = psutil.Process().memory_info().rss
loading.keep(())
loading.standby.release()
print((held - psutil.Process().memory_info().rss) >> 20)
"""


def test_the_system_gets_the_memory_back():
    run = subprocess.run([sys.executable, "-c", GIVES_BACK], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 36, "MiB, of 40"
