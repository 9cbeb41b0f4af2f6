"""Containers on one host, by what they share with the trainer."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weightsync import Sender
from weightsync.errors import UnsupportedOption
from weightsync.protocol import directories
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine
from weightsync.transports.nixl import agents

#: A user id that no host assigns.
NOBODY = 1_954_321
OVER_THE_NETWORK = "nixl" if agents.available() else "nccl"


@contextlib.contextmanager
def contained(folder, *into):
    """An engine that is started by the command prefix ``into``."""
    if (tried := subprocess.run([*into, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"needs to make a container, run the tests as root: {tried.stderr.strip()}")
    with ReferenceEngine(folder, launcher=(*into, sys.executable, "-m", "weightsync.testing")) as engine:
        yield engine


@pytest.fixture(scope="module")
def elsewhere(model_folder):
    """A world-readable folder with a model, to be mounted as a container's /tmp."""
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        shutil.copytree(model_folder("llama", 0), f"{folder}/model")
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        yield folder


def serves(sender, engine, weights):
    return sender.status(digest=True)[engine.url].ranks[0].digest == digest_of(weights.items())


@pytest.fixture(scope="module")
def weights(model_folder):
    from safetensors.torch import load_file

    return load_file(model_folder("llama", 1) / "model.safetensors")


def test_an_engine_that_shares_dev_shm_but_not_tmp(elsewhere, weights):
    """The case of ``docker run --ipc=host``, or of a pod's volume at /dev/shm."""
    if Path("/tmp") in Path(sys.executable).parents:
        pytest.skip(f"the engine's /tmp is replaced, and {sys.executable} lies in it; clone to another place")
    into = ("unshare", "--mount", "sh", "-c", f'mount --bind {elsewhere} /tmp && exec "$0" "$@"')
    with contained("/tmp/model", *into) as engine, Sender([engine.url]) as sender:
        for _ in range(2):
            result = sender.push(weights).engines[engine.url]
            assert (result.transport, result.transport_reason.partition(":")[0]) == ("ipc_zmq", "the same host")
        assert serves(sender, engine, weights)


def test_an_engine_with_its_own_dev_shm(model_folder, weights):
    into = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')
    with contained(model_folder("llama", 0), *into) as engine, Sender([engine.url]) as sender:
        result = sender.push(weights).engines[engine.url]
        assert (result.transport, result.transport_reason.partition(",")[0]) == (OVER_THE_NETWORK, "another host")
        assert serves(sender, engine, weights)
        with pytest.raises(UnsupportedOption, match=r"container with its own /dev/shm.*--ipc=host"):
            Sender([engine.url], transport="ipc_zmq")


@pytest.fixture
def stranger():
    """An unassigned user id; its directory is removed after the test."""
    yield NOBODY
    shutil.rmtree(directories.SHM_DIRECTORY / f"weightsync-{NOBODY}", ignore_errors=True)


@pytest.mark.parametrize(
    "into", ["env HOME=/ setpriv --reuid {0} --clear-groups", "env HOME=/ unshare --user --map-user={0}"]
)
def test_an_engine_of_another_user_on_this_host(elsewhere, weights, stranger, into):
    with contained(f"{elsewhere}/model", *into.format(stranger).split()) as engine:
        with Sender([engine.url]) as sender:
            result = sender.push(weights).engines[engine.url]
            assert result.transport == OVER_THE_NETWORK
            assert f"the same host, but user {stranger}'s" in result.transport_reason
            assert serves(sender, engine, weights)
        with pytest.raises(UnsupportedOption, match=f"{engine.url} runs on the same host, but user {stranger}'s"):
            Sender([engine.url], transport="ipc_zmq")
