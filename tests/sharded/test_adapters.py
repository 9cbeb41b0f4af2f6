"""Adapters of which each process of a trainer holds a part."""

import pytest

from tests.lora.adapters import make_adapter, make_adapters
from tools import models
from weightsync import Sender
from weightsync.testing import ReferenceEngine

from .conftest import fine
from .test_several_hosts import on_two_hosts

PROMPT, TOKENS = list(b"Once upon a time"), 6


@pytest.fixture(scope="module")
def base(model_folder):
    return model_folder("llama", 1)


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    return make_adapters(tmp_path_factory.mktemp("adapters"), base, "ab")


@pytest.fixture(scope="module")
def pushed_to(base):
    with ReferenceEngine(base) as one, ReferenceEngine(base) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def said(pushed_to, folders, base):
    """What the engines answer with each adapter, pushed from its folder by one process."""
    found = {}
    with Sender([engine.url for engine in pushed_to]) as sender:
        sender.push(models.load_reference(base))
        for name, folder in folders.items():
            sender.push(folder, lora="policy", version=name)
            found[name] = answers(pushed_to)
    assert found["a"] != found["b"]
    return found


def answers(engines):
    return [engine.generate(PROMPT, TOKENS, "policy") for engine in engines]


def push(trainer, how, folders, name):
    """Push an adapter, and assert that every rank has the result."""
    (one, *others) = trainer.all(f"push_adapter {how} {folders[name]} {name}")
    assert (one["version"], one["lora"]) == (name, "policy")
    assert others == [one] * len(others)


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
@pytest.mark.parametrize("how", ["columns", "layers", "replicas"])
def test_two_ranks_push_an_adapter_between_pushes_of_weights(pair, pushed_to, said, folders, how, transport):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([engine.url for engine in pushed_to], transport=transport))
    for name in "abab":
        push(pair, how, folders, name)
        assert answers(pushed_to) == said[name]
        assert len({one["version"] for one in pair.all("push")}) == 1
        assert answers(pushed_to) == said[name]
    assert pair.all("rollback_adapter") == [{"version": "a"}] * 2
    assert answers(pushed_to) == said["a"]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_ranks_of_two_hosts_push_an_adapter(start, pushed_to, said, folders, transport):
    four = on_two_hosts(start(4))
    assert fine(four.all("shard fsdp"), 4)
    assert fine(four.build([engine.url for engine in pushed_to], transport=transport), 4)
    for name in "abab":
        push(four, "columns", folders, name)
        assert answers(pushed_to) == said[name]
        assert len({one["version"] for one in four.all("push")}) == 1
        assert answers(pushed_to) == said[name]
    assert fine(four.all("close"), 4)
    four.stop()


def test_an_engine_that_was_added_gets_the_adapter(pair, base, pushed_to, said, folders):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([pushed_to[0].url]))
    assert pair.all("push")
    push(pair, "columns", folders, "b")
    with ReferenceEngine(base) as late:
        assert pair.all(f"add {late.url}")
        assert answers([late]) == said["b"][:1]
    assert fine(pair.all("close"))


def test_an_adapter_for_a_layer_that_is_not_there_is_refused(pair, base, pushed_to, said, folders, tmp_path):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([pushed_to[0].url]))
    push(pair, "columns", folders, "a")
    other = make_adapter(tmp_path, base, seed=1, change=moved)
    refused = pair.all(f"push_adapter columns {other} other")
    assert [one["error"] for one in refused] == ["ManifestMismatch"] * 2
    assert "layers.9" in refused[0]["message"]
    assert answers(pushed_to[:1]) == said["a"][:1]
    pair.all("close")


def moved(tensors):
    """The adapter of a model with more layers."""
    return {name.replace("layers.1.", "layers.9."): tensor for name, tensor in tensors.items()}
