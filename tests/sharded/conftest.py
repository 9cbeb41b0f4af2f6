"""Trainers of several processes, and reference engines for them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tools import models, servers
from weightsync import Sender
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

ROOT = Path(__file__).resolve().parents[2]


class Trainer:
    """A trainer of ``size`` `tests.sharded.trainer` processes. ``popen``, if given, starts that of each rank; rank 0
    listens at ``address``."""

    def __init__(self, folder, size=2, address="127.0.0.1", popen=None):
        port = str(servers.free_port())
        self.processes = []
        for rank in range(size):
            program = ["-m", "tests.sharded.trainer", str(rank), str(size), address, port, str(folder)]
            if popen is None:
                self.processes.append(forked.Forked(program, dict(os.environ), piped=True))
            else:
                how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1, "cwd": ROOT}
                self.processes.append(popen(rank, sys.executable, *program, **how))

    def tell(self, word, *ranks):
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].stdin.write(f"{word}\n")

    def hear(self, *ranks):
        """The answer of each rank."""
        return [json.loads(self._line(rank)) for rank in ranks or range(len(self.processes))]

    def _line(self, rank):
        line = self.processes[rank].stdout.readline()
        assert line, f"rank {rank} has ended with {self.processes[rank].wait(10)}"
        return line

    def all(self, word):
        self.tell(word)
        return self.hear()

    def build(self, urls, **options):
        """A sender in every rank."""
        return self.all("build " + json.dumps({"urls": urls, "timeout_s": 120.0, **options}))

    def stop(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate(timeout=10)


@pytest.fixture(scope="session")
def engines(model_folder):
    """The URLs of two reference engines that were started on model A."""
    with ReferenceEngine(model_folder("llama", 0)) as one, ReferenceEngine(model_folder("llama", 0)) as two:
        yield [one.url, two.url]


@pytest.fixture(scope="session")
def start(model_folder):
    """Return ``start(size)``, which starts a trainer of model B."""
    with contextlib.ExitStack() as stack:

        def start(size=2):
            trainer = Trainer(model_folder("llama", 1), size)
            stack.callback(trainer.stop)
            return trainer

        yield start


@pytest.fixture(scope="session")
def pair(start):
    return start(2)


@pytest.fixture(scope="session")
def four(start):
    return start(4)


@pytest.fixture(scope="session")
def expected(model_folder):
    """The digest of model B."""
    return digest_of(models.load_reference(model_folder("llama", 1)).state_dict().items())


@pytest.fixture(scope="session")
def changed(model_folder):
    """The digest of model B after one change."""
    state = models.load_reference(model_folder("llama", 1)).state_dict()
    return digest_of((name, tensor.neg()) for name, tensor in state.items())


@pytest.fixture
def untrained(engines, model_folder):
    """Make the engines serve model A; returns its digest."""
    with Sender(engines) as sender:
        sender.push(models.load_reference(model_folder("llama", 0)), version="untrained")
    return served(engines)[0]


def served(urls):
    """The digest of each engine's weights."""
    with Sender(urls) as sender:
        return [reply.ranks[0].digest for reply in sender.status(digest=True).values()]


def fine(said, size=2):
    """Whether each rank has said that it is done."""
    return said == [None] * size


def assert_pushed(trainer):
    """Push, and assert that every byte is written once, by one rank; returns the bytes that each rank wrote."""
    said = trainer.all("push")
    assert len({one["version"] for one in said}) == 1
    assert sum(one["written"] for one in said) == said[0]["nbytes"] == said[-1]["nbytes"]
    return [one["written"] for one in said]
