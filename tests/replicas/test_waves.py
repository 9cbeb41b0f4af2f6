"""vLLM's replicas of a mixture of experts neither hang nor make tokens while held, in whatever order they are asked."""

import os
import subprocess

import pytest

from tools import servers

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 11])
def test_pushes_and_users_in_random_orders(seed):
    python = servers.ROOT / ".venv-vllm" / "bin" / "python"
    env = {
        **os.environ,
        **servers.environment_of("vllm", 1),
        "PYTHONPATH": str(servers.ROOT),
        "VLLM_LOGGING_LEVEL": "CRITICAL",
    }
    command = [python, "-m", "tests.replicas.waves", "150", str(seed)]
    done = subprocess.run(
        command, env=env, cwd=servers.ROOT.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.splitlines()[-1] == "rounds 150"
