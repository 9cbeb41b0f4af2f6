"""Trainers of several processes, and reference engines for them."""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import servers
from weightsync import Sender
from weightsync.testing import ReferenceEngine

ROOT = Path(__file__).resolve().parents[2]


class Trainer:
    """``size`` processes with a model from ``folder``, sharded in the way that `tests.sharded.trainer` knows."""

    def __init__(self, folder, urls, *, size=2, how="fsdp", **options):
        port, options = str(servers.free_port()), {"timeout_s": 60.0, **options}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.sharded.trainer", str(rank), str(size), port, str(folder), how,
                 json.dumps(options), *urls],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=ROOT,
            )
            for rank in range(size)
        ]  # fmt: skip

    def tell(self, word, *ranks):
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].stdin.write(f"{word}\n")

    def hear(self, *ranks):
        """What each rank says."""
        return [json.loads(self.processes[rank].stdout.readline()) for rank in ranks or range(len(self.processes))]

    def all(self, word):
        self.tell(word)
        return self.hear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate(timeout=10)


@pytest.fixture(scope="session")
def engines(model_folder):
    """Two, started on model A."""
    with ReferenceEngine(model_folder("llama", 0)) as one, ReferenceEngine(model_folder("llama", 0)) as two:
        yield [one.url, two.url]


def served(urls):
    """What each engine computes with."""
    with Sender(urls) as sender:
        return [reply.ranks[0].digest for reply in sender.status(digest=True).values()]
