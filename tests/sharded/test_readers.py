"""A trainer of several processes does not write to memory that an engine may still load from."""

import pytest

from tests.faulty import assert_no_mixture, digest, faulty
from tools import models

from .conftest import assert_pushed, fine


@pytest.fixture(scope="module")
def engines_that_fail(model_folder, tmp_path_factory):
    folder = model_folder("llama", 0)
    with faulty(folder, tmp_path_factory.mktemp("a")) as one, faulty(folder, tmp_path_factory.mktemp("b")) as two:
        yield one, two


def test_an_engine_that_still_loads_when_another_fails_keeps_its_memory(engines_that_fail, pair, model_folder):
    fails, frozen = engines_that_fail
    pushed = models.load_reference(model_folder("llama", 1))
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([fails.url, frozen.url], timeout_s=10.0))
    for _ in range(2):
        assert_pushed(pair)
    fails.order("raise", 3)
    frozen.order("stop")
    for said in pair.all("push"):
        assert said["error"] == "ApplyFailed", said
        assert said["engines"] == {fails.url: "dirty", frozen.url: "unknown"}
    assert fine(pair.all(f"remove {frozen.url}"))
    pair.all("change")
    assert_pushed(pair)  # of the same tensors, negated
    frozen.thaw()
    reply = frozen.settled()
    assert_no_mixture(reply, reply.version, pushed)
    assert fails.settled().ranks[0].digest != digest(pushed)
    assert fine(pair.all("close"))
    frozen.heal(pushed)
