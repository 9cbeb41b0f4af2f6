"""A vLLM plugin with what vLLM lacks on a CPU, so that replicas of a mixture of experts serve there.

vLLM's experts gather the tokens of all replicas and scatter the results, of which each replica may have another number.
On a CPU both calls raise NotImplementedError. With ``--enable-expert-parallel`` each rank has some of the experts, and
vLLM's kernel for CPUs crashes, because it takes the numbers of all experts for those of its own. Everything else is
vLLM's own.
"""

import functools

import torch
from torch import distributed


def all_gatherv(self, input_, dim=0, sizes=None):
    """Concatenate the tensors of all ranks, of which each has ``sizes[rank]`` rows; of a list, each for itself."""
    assert dim == 0
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    # gloo gathers tensors of one shape.
    own = input_.new_zeros((max(sizes), *input_.shape[1:]))
    own[: input_.shape[0]] = input_
    every = [torch.empty_like(own) for _ in sizes]
    distributed.all_gather(every, own, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(every, sizes, strict=True)])


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """Add up the tensors of all ranks, and return this rank's rows."""
    assert dim == 0
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    distributed.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def with_some_experts(apply):
    """``apply`` of vLLM's experts, for a rank that has only those that ``expert_map`` does not map to -1."""

    @functools.wraps(apply)
    def applied(self, *args, topk_weights, topk_ids, expert_map, **kwargs):
        if expert_map is not None:
            own = expert_map[topk_ids.long()].to(topk_ids.dtype)
            topk_weights, topk_ids = topk_weights.masked_fill(own < 0, 0.0), own.clamp(min=0)
        apply(self, *args, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **kwargs)

    return applied


def install():
    """The entry point; called in every process of vLLM, maybe more than once."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    if not hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        CPUUnquantizedExperts.apply = with_some_experts(CPUUnquantizedExperts.apply)
