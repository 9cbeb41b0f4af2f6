"""A version of vLLM that has no CPU wheel: the names that the plugin uses, and the class of its weight sources."""

import subprocess

import pytest

from tools import versions

NAMES = """
import importlib, sys
from vllm_weightsync import compat, compat_lora, compat_models, compat_plans, compat_standby, compat_transfer
from weightsync.engine.private_names import missing
workers = (compat.WORKER, compat_models.DEEP, compat_plans.NAMES, compat_standby.NAMES, compat_transfer.NAMES)
tables = (compat.SERVER, compat_lora.NAMES, *workers)
print(compat.VLLM.version(), [gone for names in tables for gone in missing(names)], compat.VLLM.untested())
"""

#: Two trainer ranks open vLLM's own source of a module, sharded and not, and compare what they hold with the whole.
SOURCES = """
import torch, torch.distributed as dist, torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard
from vllm.distributed.weight_transfer import ModuleSource
from weightsync.sources import open_source

def trainer(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    want = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
    for sharded in (False, True):
        if sharded:
            fully_shard(module)
        source = open_source(ModuleSource(module))
        assert [spec.name for spec in source.specs] == list(want)
        pieces = [
            [(spec.name, box, part.clone()) for box, part in zip(held.boxes, parts, strict=True)]
            for spec, held, parts in zip(source.specs, source.held, source.parts(), strict=True)
        ]
        every = [None, None]
        dist.all_gather_object(every, pieces)
        made = {name: torch.full_like(tensor, float("nan")) for name, tensor in want.items()}
        for name, (start, shape), part in (one for ranks in every for those in ranks for one in those):
            whole = made[name]
            for dim, (at, size) in enumerate(zip(start, shape)):
                whole = whole.narrow(dim, at, size)
            whole.copy_(part)
        assert all(torch.equal(made[name], want[name]) for name in want), made
    dist.barrier()
    dist.destroy_process_group()  # a process that exits with its group's threads running aborts now and then
    if not rank:
        print("sources", sum(len(box.shape) < 9 for held in source.held for box in held.boxes))

if __name__ == "__main__":
    import sys
    multiprocessing.spawn(trainer, (sys.argv[1],), 2)
"""

VLLM = versions.VERSIONS["vllm"]


def run(version, *command):
    if not versions.there("vllm", version):
        pytest.skip(f"vllm {version} is not installed: make test-versions")
    python = versions.ROOT / ".venv-vllm" / "bin" / "python"
    # vLLM imports its CUDA kernels where it can, and warns where it cannot.
    env = {"PATH": "/usr/bin:/bin", **versions.environment("vllm", version)}
    done = subprocess.run(
        [python, *command], capture_output=True, text=True, cwd=versions.ROOT.parent, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.versions
@pytest.mark.parametrize("version", [versions.WITHOUT_CPU["vllm"]])
def test_a_version_without_a_cpu_wheel_has_every_name(version):
    assert run(version, "-c", NAMES) == f"{version} [] "


@pytest.mark.versions
@pytest.mark.parametrize("version", [*VLLM, versions.WITHOUT_CPU["vllm"]])
def test_vllms_own_weight_sources_can_be_pushed(version, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SOURCES)
    assert run(version, program, tmp_path / "store").startswith("sources")
