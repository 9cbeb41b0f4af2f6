"""Train a small model sharded by FSDP2 over several processes, and push it into running engines after every step.

    torchrun --nproc-per-node 2 examples/fsdp2.py MODEL_FOLDER http://127.0.0.1:8000 http://127.0.0.1:30000

The engines must have been started on a model of the same shape as the one in the folder. Every rank builds a `Sender`
and calls `push`; each sends the shards that it holds, and no rank ever has the whole model. The ranks use gloo on CPUs
and NCCL on GPUs. ``--save`` also writes the assembled model, to compare it with what the engines serve.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

from weightsync import Sender


def main() -> None:
    """Train, and push after every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("engines", nargs="+")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Sender(args.engines) as sender:
        for step in range(args.steps):
            loss = train_step(model, optimizer, step)
            result = sender.push(model)
            if dist.get_rank() == 0:
                pause = max(engine.pause_s for engine in result.engines.values())
                print(f"version {result.version}  loss {loss:.2f}  {result.nbytes / 1e6:.2f} MB  pause {pause:.3f} s")
    if args.save:
        save(model, args.save)
    # torch's threads release gathered tensors only some time later: a process that exits before that aborts.
    dist.barrier()
    dist.destroy_process_group()


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Take one step of next-token training on random tokens, which differ by rank; return this rank's loss."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(0, 256, (2, 32), generator=generator).to(model.device)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write the whole model, which this gathers on rank 0."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


if __name__ == "__main__":
    main()
