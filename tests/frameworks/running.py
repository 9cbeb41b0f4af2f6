"""Programs of other frameworks, run beside vLLM's packages."""

import os
import subprocess

from tools import frameworks, servers, versions

PYTHON = servers.ROOT / ".venv-vllm" / "bin" / "python"
PATIENCE_S = 300


def run(version, *command, processes=1, check=True):
    """Run ``python COMMAND`` with a version of TRL, or as many processes by torchrun; return what ended."""
    vllm = versions.environment("vllm", frameworks.TRL[version]).get("PYTHONPATH", "")
    launcher = [PYTHON]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(frameworks.place(version)), vllm, str(servers.ROOT)))),
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    done = subprocess.run(
        [*launcher, *map(str, command)], capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False
    )
    if check:
        assert done.returncode == 0, done.stderr[-5000:]
    return done
