"""Trainers to which something happens in the middle of a push; as a program: one that dies there, ``URL FOLDER``."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

from safetensors.torch import load_file

from tools import servers
from weightsync import Sender


class Interrupted:
    """A source of ``weights`` that calls ``then`` before it yields the second half of them."""

    def __init__(self, weights, then):
        self._weights, self._then = list(weights.items()), then

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=t.dtype, shape=tuple(t.shape)) for name, t in self._weights]

    def __iter__(self):
        for number, item in enumerate(self._weights):
            if number == len(self._weights) // 2:
                self._then()
            yield item


def push_and_die(url, folder):
    """Have another process push the checkpoint in ``folder``, which is killed in the middle."""
    done = subprocess.run([sys.executable, "-m", "tests.interrupted", url, folder], cwd=servers.ROOT, check=False)
    assert done.returncode == -signal.SIGKILL


def main(url, folder):
    weights = load_file(f"{folder}/model.safetensors")
    Sender([url]).push(Interrupted(weights, lambda: os.kill(os.getpid(), signal.SIGKILL)))


if __name__ == "__main__":
    main(*sys.argv[1:])
