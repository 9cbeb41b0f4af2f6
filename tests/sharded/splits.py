"""The ways in which the ranks of a trainer split a model between them."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests import megatron
from tests.sharded import placements
from weightsync import LocalShard


class Reused(Mapping):
    """Makes its values when they are asked for."""

    def __init__(self, shards):
        self._shards = shards
        self._memory = torch.zeros(max(shard.tensor.numel() for shard in shards.values()), dtype=torch.bfloat16)
        self._memory.share_memory_()

    def __getitem__(self, name):
        shard = self._shards[name]
        place = self._memory[: shard.tensor.numel()].view(shard.tensor.shape).copy_(shard.tensor)
        return LocalShard(place, shard.shape, shard.start)

    def __iter__(self):
        return iter(self._shards)

    def __len__(self):
        return len(self._shards)

    def state_dict(self):
        return self._shards


class Splits:
    """Each method takes the whole model, its state and this rank's number, and returns what this rank holds.

    ``size`` is the number of ranks, and ``group`` their process group if it is not the default one.
    """

    size, group = 1, None

    def _fsdp(self, model, *_, mesh=None):
        mesh = dist.init_device_mesh("cpu", (self.size,)) if mesh is None else mesh
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def _masters(self, model, *_):
        """As `_fsdp`, with master weights in float32."""
        return self._fsdp(model.float())

    def _mixed(self, model, *_):
        """As `_fsdp`, with one layer in float32 and one in float64."""
        model.model.layers[0].float()
        model.model.layers[1].double()
        return self._fsdp(model)

    def _shorter(self, model, *_):
        """As `_fsdp`, without the last layer."""
        model.model.layers = model.model.layers[:-1]
        return self._fsdp(model)

    def _hsdp(self, model, *_):
        names = ("replicate", "shard")
        return self._fsdp(model, mesh=dist.init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=names))

    def _unsharded(self, model, *_):
        """An FSDP2 root module that has run a forward pass and stays unsharded."""
        self._fsdp(model)
        with torch.no_grad():
            model(torch.zeros(1, 4, dtype=torch.int64))
        return model

    def _replicas(self, model, *_):
        return model

    def _grouped(self, model, *_):
        """As `_fsdp`, over the ranks of the group."""
        return self._fsdp(model, mesh=DeviceMesh.from_group(self.group, "cpu"))

    def _nothing(self, *_):
        return {}

    def _half(self, model, _, rank):
        """The last rank holds nothing, the others split the model by names."""
        state = model.state_dict()
        mine = {name: t for number, (name, t) in enumerate(state.items()) if number % (self.size - 1) == rank}
        return mine if rank + 1 < self.size else {}

    def _stages(self, _, state, rank):
        """Ranks hold different names, as stages of a pipeline."""
        return {name: tensor for number, (name, tensor) in enumerate(state.items()) if number % self.size == rank}

    def _layers(self, _, state, rank):
        """As `_stages`, of an adapter: ranks hold both matrices of a layer."""
        return {name: state[name] for number, name in enumerate(sorted(state)) if number // 2 % self.size == rank}

    def _swapped(self, _, state, rank):
        """As `_stages`, where all ranks but 0 have changed places."""
        return self._stages(_, state, rank % (self.size - 1) + 1 if rank else 0)

    def _named(self, model, state, rank):
        """The same as a source that lists the names it holds."""
        return placements.Named(state, self._stages(model, state, rank))

    def _columns(self, _, state, __):
        mesh = dist.init_device_mesh("cpu", (self.size,))
        return {name: distribute_tensor(t, mesh, [Shard(t.ndim - 1)], src_data_rank=None) for name, t in state.items()}

    def _mesh(self, _, state, __):
        """FSDP over one dimension, tensor parallelism over the other."""
        mesh = dist.init_device_mesh("cpu", (2, self.size // 2))
        return {
            name: distribute_tensor(t, mesh, [Shard(0), Shard(1) if t.ndim > 1 else Replicate()], src_data_rank=None)
            for name, t in state.items()
        }

    def _parts(self, _, state, rank):
        """Plain tensors with their boxes, split into uneven rows."""
        start = 3 * rank
        end = start + 3 if rank + 1 < self.size else None
        return {
            name: LocalShard(tensor[start:end].clone(), tuple(tensor.shape), (start, *[0] * (tensor.ndim - 1)))
            for name, tensor in state.items()
        }

    def _overlapping(self, _, state, rank):
        """Eight rows each, of which the next rank has four too, and the last rank the rest."""
        start, end = 4 * rank, 4 * rank + 8 if rank + 1 < self.size else None
        return {
            name: LocalShard(tensor[start:end].clone(), tuple(tensor.shape), (start, *[0] * (tensor.ndim - 1)))
            for name, tensor in state.items()
        }

    def _reused(self, _, state, rank):
        """As `_overlapping`, in a mapping that puts each tensor into one and the same shared memory."""
        return Reused(self._overlapping(_, state, rank))

    def _megatron(self, model, state, rank):
        """Megatron's layout: fused, renamed, and split by groups, rows and columns."""
        return megatron.llama(state, model.config, rank, self.size)
