"""What a push quantises is in every bit what compressed-tensors makes of the weights, in the version of each engine."""

import json
import os
import subprocess

import pytest

from tools import servers

PATIENCE_S = 300


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
def test_compressed_tensors_makes_the_same_of_the_weights(engine):
    python = servers.ROOT / f".venv-{engine}" / "bin" / "python"
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(servers.ROOT))))
    done = subprocess.run(
        [str(python), "-m", "tests.in_process.compressed"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differing"] == []
    assert found["compared"] > 800
