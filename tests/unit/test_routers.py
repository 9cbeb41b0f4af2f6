"""A URL that answers for several engines: a real HTTP proxy in front of two reference engines."""

import itertools

import pytest

from tools import models
from weightsync import Sender
from weightsync.errors import EngineRestarted, UnsupportedOption
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def engines(model_folder):
    folder = model_folder("llama", 0)
    with ReferenceEngine(folder) as one, ReferenceEngine(folder) as two:
        yield one, two


def test_a_router_is_found_out_before_anything_is_sent(engines, router):
    url = router(itertools.cycle([engine.url for engine in engines]))
    with pytest.raises(UnsupportedOption, match="answers for several engines") as raised:
        Sender([url])
    assert raised.value.engines == {url: "unchanged"}


def test_a_router_that_changes_its_mind_later_is_named(engines, router, model_folder):
    one, two = (engine.url for engine in engines)
    chosen = [itertools.repeat(one)]

    def turn():
        return next(chosen[0])

    url = router(iter(turn, ""))
    model = models.load_reference(model_folder("llama", 1))
    with Sender([url]) as sender:
        sender.push(model, version="one")
        chosen[:] = [itertools.cycle([two, one])]
        with pytest.raises(EngineRestarted, match="that of a router in front of several engines") as raised:
            sender.push(model, version="both")
        assert raised.value.weights in ("unchanged", "unknown")
        chosen[:] = [itertools.repeat(one)]
    for engine in engines:
        with Sender([engine.url]) as sender:
            (reply,) = sender.status().values()
            assert reply.version != "both"


def test_an_engine_with_one_url_is_not_taken_for_a_router(engines, router, model_folder):
    url = router(itertools.repeat(engines[0].url))
    with Sender([url]) as sender:
        sender.push(models.load_reference(model_folder("llama", 1)), version="alone")
        assert sender.status()[url].version == "alone"
