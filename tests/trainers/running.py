"""Runs programs of this folder in two processes, and checks what they have seen."""

import json
import os
import subprocess
import sys

from tools import servers, versions

PATIENCE_S = 600
LAUNCHER = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
PACKAGES = versions.folder("trainers", versions.TRAINERS)
#: As launchers set it on a machine without a GPU.
ON_CPU = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true"}


def pushes(program, folder, url, kinds, packages=None):
    """What a program saw, by kind."""
    command = [*LAUNCHER, f"tests.trainers.{program}", str(folder), url, *kinds]
    return {kind: seen for line in run(*command, packages=packages) for kind, seen in line.items()}


def run(*command, packages=None, env=ON_CPU):
    """Run ``python -m COMMAND``, which finds ``packages`` first; the lines of JSON that it prints."""
    path = os.pathsep.join(filter(None, (str(servers.ROOT), packages and str(packages))))
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=servers.ROOT,
        env={**os.environ, **env, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def check(found):
    (before, was), (after, now) = found
    assert before == was
    assert after == now
    assert before != after, "the step has changed the model"
