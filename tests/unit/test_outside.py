"""A transport of another package, from the sender to the reference engine, and a broken one."""

from pathlib import Path

import pytest
import requests

from tests.sharded.conftest import Trainer
from tools import models
from weightsync import Sender
from weightsync.errors import UnsupportedOption
from weightsync.protocol import auth
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine

OUTSIDE = Path(__file__).resolve().parents[1] / "outside"


@pytest.fixture
def install(monkeypatch):
    """Make a folder with a package and its entry points importable here and in child processes."""

    def install(folder):
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")

    return install


def test_a_push_travels_through_files(install, model_folder):
    install(OUTSIDE)
    trained = models.load_reference(model_folder("llama", 1))
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        with Sender([engine.url]) as sender:
            assert sender.push(trained).engines[engine.url].transport == "ipc_zmq"  # "auto" does not choose it
        with Sender([engine.url], transport="files") as sender:
            for _ in range(3):
                result = sender.push(trained)
            assert result.engines[engine.url].transport == "files"
            (rank,) = sender.status(digest=True)[engine.url].ranks
            assert rank.digest == digest_of(trained.state_dict().items())


def test_several_processes_of_a_trainer_write_the_files(install, model_folder, tmp_path, monkeypatch):
    install(OUTSIDE)
    monkeypatch.setenv("WEIGHTSYNC_FILES_NOTES", str(tmp_path / "notes"))
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        trainer = Trainer(model_folder("llama", 1), 2)
        try:
            assert trainer.all("shard fsdp") == [None] * 2
            assert trainer.build([engine.url], transport="files", bucket_bytes=65536) == [None] * 2
            for _ in range(2):
                assert all(said["version"] for said in trainer.all("push"))
            with Sender([engine.url]) as sender:
                (rank,) = sender.status(digest=True)[engine.url].ranks
        finally:
            trainer.stop()
    trained = models.load_reference(model_folder("llama", 1)).state_dict()
    assert rank.digest == digest_of(trained.items())
    writers = (tmp_path / "notes").read_text().split()
    assert {writers.count(str(process.pid)) >= 4 for process in trainer.processes} == {True}


BROKEN = {
    "raises": ("broken = gone_module:SPEC", "cannot be imported from gone_module:SPEC: ModuleNotFoundError"),
    "is something else": ("broken = weightsync.transports.ipc_zmq:SPEC", "is not the TransportSpec of broken"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_transport_is_named_and_the_others_work(install, tmp_path, model_folder, kind):
    line, told = BROKEN[kind]
    points = tmp_path / "site" / "broken-1.0.dist-info"
    points.mkdir(parents=True)
    (points / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (points / "entry_points.txt").write_text(f"[weightsync.transports]\n{line}\n")
    install(tmp_path / "site")
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        with pytest.raises(UnsupportedOption, match=told):
            Sender([engine.url], transport="broken")
        headers = {"Authorization": f"Bearer {auth.sender_token()}"}
        body = {"push": "p", "address": "ipc:///a", "secret": "s", "bucket_bytes": 512, "timeout_s": 1, "manifest": []}
        reply = requests.post(f"{engine.url}/weightsync/update_weights_via_broken", json=body, headers=headers)
        assert reply.status_code == 422
        assert told in reply.json()["message"]
        with Sender([engine.url]) as sender:
            sender.push(models.load_reference(model_folder("llama", 1)))
