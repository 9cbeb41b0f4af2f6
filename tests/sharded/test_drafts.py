"""A model and its draft model, of which each process of a trainer holds a part."""

import pytest

from tools import models
from weightsync import Sender
from weightsync.testing import ReferenceEngine

from .conftest import fine, served
from .test_several_hosts import on_two_hosts


@pytest.fixture(scope="module")
def drafts(model_folder):
    """Two versions of a draft, of another architecture than the model."""
    return [model_folder("qwen3", seed) for seed in (2, 3)]


@pytest.fixture(scope="module")
def drafted(model_folder, drafts):
    with ReferenceEngine(model_folder("llama", 0), args=["--draft", str(drafts[0])]) as engine:
        yield engine.url


@pytest.fixture
def expected(drafted, drafts, model_folder):
    """The digests of the model that the trainer has with each draft, pushed by one process; then others are served."""
    trained = models.load_reference(model_folder("llama", 1))
    with Sender([drafted]) as sender:
        found = []
        for draft in drafts:
            sender.push(trained, draft=models.load_reference(draft))
            found += served([drafted])
        sender.push(models.load_reference(model_folder("llama", 0)), draft=models.load_reference(drafts[0]))
    assert len({*found, *served([drafted])}) == 3
    return found


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_two_ranks_push_a_model_and_its_draft(pair, drafted, drafts, expected, transport):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([drafted], transport=transport))
    for draft, digest in zip(drafts * 2, expected * 2, strict=True):
        first, second = pair.all(f"push_drafted {draft}")
        assert first == second
        assert served([drafted]) == [digest]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_ranks_of_two_hosts_push_a_model_and_its_draft(start, drafted, drafts, expected, transport):
    four = on_two_hosts(start(4))
    assert fine(four.all("shard fsdp"), 4)
    assert fine(four.build([drafted], transport=transport), 4)
    for draft, digest in zip(drafts, expected, strict=True):
        assert len({one["version"] for one in four.all(f"push_drafted {draft}")}) == 1
        assert served([drafted]) == [digest]
    assert fine(four.all("close"), 4)
    four.stop()
