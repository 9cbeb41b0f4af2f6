"""What `weightsync.integrations.trl` does without TRL: hand over tensors one at a time, and say what is missing."""

import pytest

from tests.helpers import served_digest
from tools import versions
from weightsync import Sender
from weightsync.errors import ManifestMismatch
from weightsync.integrations import trl
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def tensors(trained):
    return dict(trained.named_parameters())


def test_tensors_are_handed_over_one_at_a_time(engine, tensors):
    with Sender([engine.url]) as sender:
        sender.push(tensors)
        pushed = served_digest(engine)
        sender.push({name: tensor * 0 for name, tensor in tensors.items()})
        with trl._Handover(sender, {"version": "handed over"}) as handover:
            for name, tensor in tensors.items():
                gathered = tensor.detach().clone()
                handover.give(name, gathered)
                gathered.zero_()  # its memory is reused
        assert sender.status()[engine.url].version == "handed over"
    assert served_digest(engine) == pushed


def hand_over(sender, pairs, failure=None):
    with trl._Handover(sender, {}) as handover:
        for name, tensor in pairs:
            handover.give(name, tensor)
        if failure:
            raise failure


def test_a_trainer_that_fails_to_gather_changes_nothing(engine, tensors):
    with Sender([engine.url]) as sender:
        sender.push(tensors, version="before")
        with pytest.raises(ZeroDivisionError):
            hand_over(sender, list(tensors.items())[:3], ZeroDivisionError())
        assert sender.status()[engine.url].version == "before"
        assert sender.push(tensors, version="after").version == "after"


def test_a_push_that_fails_ends_the_handover(engine, tensors):
    with Sender([engine.url]) as sender:
        with pytest.raises(ManifestMismatch, match="not_there"):
            hand_over(sender, [("not_there", next(iter(tensors.values()))), *tensors.items()])
        sender.push(tensors)


def test_the_sender_must_push_to_the_server_that_generates(engine, model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as other, Sender([engine.url]) as sender:
        sender.check_serves(engine.url)
        sender.check_serves(engine.url.replace("127.0.0.1", "localhost"))
        with pytest.raises(
            trl.UnsupportedOption, match=f"generates at {other.url}, but its Sender pushes to {engine.url}"
        ):
            sender.check_serves(other.url)


def test_one_line_says_that_trl_is_missing():
    with pytest.raises(ImportError, match=r"needs TRL 1\.11\.0 to 1\.16\.0: pip install 'trl==1\.16\.0'"):
        trl.patch(None)


def test_the_tested_versions_are_said_alike():
    oldest, newest = versions.TRL
    assert (oldest, newest) == trl.TESTED
    assert f"trl=={newest}" in versions.TRL_REQUIREMENTS.read_text().splitlines()
    tested = (versions.ROOT / "docs" / "frameworks.md").read_text()
    for version, vllm in versions.TRL.items():
        assert f"TRL {version} with vLLM {vllm}" in tested
