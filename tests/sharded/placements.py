"""The boxes that the local parts of DTensors cover, checked in every rank of a process group of four."""

import itertools
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.unit.test_sources import hrm_text, llama, qwen3, qwen3_moe
from weightsync.errors import SourceError
from weightsync.sources import open_source
from weightsync.sources.dtensor import boxes_of, local_of


class Named:
    """A source in the shape of vLLM's ``WeightSource``: describes everything and yields what this rank holds."""

    def __init__(self, state, held):
        self._state, self._held = state, held

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=t.shape) for name, t in self._state.items()]

    def held_names(self):
        return list(self._held)

    def __iter__(self):
        return ((name, self._held.get(name)) for name in self._state)


MESHES = [(4,), (1, 4), (4, 1), (2, 2)]
SHAPES = [(), (1,), (3,), (8,), (4, 4), (7, 5), (2, 3, 9), (0, 3)]


def check_all():
    """Check every placement; returns what this rank holds of each tensor, as ``[name, shape, boxes]``."""
    held = []
    for mesh_shape in MESHES:
        mesh = dist.init_device_mesh("cpu", mesh_shape)
        for shape in SHAPES:
            kinds = [Replicate(), *map(Shard, range(len(shape)))]
            for placements in itertools.product(kinds, repeat=len(mesh_shape)):
                whole = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)
                tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                held.append(check(f"{mesh_shape} {placements} {shape}", tensor, whole))
    return held + fsdp_and_tensor_parallel()


def fsdp_and_tensor_parallel():
    """The same for a model of which both split dimension 0 of the first layer, where FSDP2 shards with a stride."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    held = []
    for size in (8, 6):
        model = nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4))
        wholes = {name: torch.arange(one.numel()).float().view(one.shape) for name, one in model.named_parameters()}
        with torch.no_grad():
            for name, one in model.named_parameters():
                one.copy_(wholes[name])
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
        fully_shard(model, mesh=mesh["dp"])
        held += [check(f"{size} {name} {t.placements}", t, wholes[name]) for name, t in model.state_dict().items()]
    return held


def check_modules():
    """Check that sources of FSDP2-sharded modules hold parts of the checkpoint tensors; returns what they hold."""
    mesh = dist.init_device_mesh("cpu", (4,))
    held = []
    for make in (qwen3, llama, qwen3_moe, tied):
        torch.manual_seed(0)
        model = make()
        source = open_source(model)
        checkpoint = {one.name: t.clone() for one, t in zip(source.specs, source.tensors(), strict=True)}
        for layer in getattr(getattr(model, "model", None), "layers", ()):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        source = open_source(model)
        assert [one.name for one in source.specs] == list(checkpoint), make
        for one, parts in zip(source.held, source.parts(), strict=True):
            for box, part in zip(one.boxes, parts, strict=True):
                place = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
                assert torch.equal(part, checkpoint[one.spec.name][place]), one
            held.append([f"{make.__name__} {one.spec.name}", list(one.spec.shape), one.boxes])
        assert open_source(model, reuse=source) is source
    return held


def check_computed():
    """The error for a sharded module whose checkpoint tensors have to be computed from the parameters."""
    mesh = dist.init_device_mesh("cpu", (4,))
    try:
        return open_source(fully_shard(hrm_text(), mesh=mesh)).specs[0].name
    except SourceError as error:
        return str(error)


def tied():
    """A module with tied weights of three rows, of which the fourth rank holds none."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return module


def check(name, tensor, whole):
    local, boxes = local_of(tensor), boxes_of(name, tensor)
    assert sum(torch.Size(box.shape).numel() for box, _ in boxes) == local.numel(), name
    for one in boxes:
        place = tuple(slice(a, a + n) for a, n in zip(*one.box, strict=True))
        assert torch.equal(one.of(local), whole[place]), (name, one)
    return [name, list(whole.shape), [one.box for one in boxes]]
