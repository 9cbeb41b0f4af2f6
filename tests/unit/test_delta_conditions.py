"""Deltas where memory is short, and where loaders are found to skip what they are given."""

import pytest

from tests.helpers import keen
from tests.unit.test_delta_pushes import Adapter, Trained
from tests.unit.two_ranks import Engine
from weightsync import Sender, errors
from weightsync.memory import arenas


@pytest.fixture(autouse=True)
def always():
    with keen():
        yield


@pytest.mark.parametrize("short", [0, 1])
def test_a_second_arena_is_made_where_both_take_at_most_half_of_the_memory(made, monkeypatch, short):
    engine, trained = made(Engine(Adapter)), Trained()
    with Sender([engine.url], transport="nixl") as sender:
        sender.push(trained.step())
        nbytes = sender._driver._transfer._arenas[0].bytes.numel()
    monkeypatch.setattr(arenas, "free_shared_bytes", lambda: 4 * nbytes - short)
    with Sender([engine.url], transport="nixl") as sender:
        sender.push(trained.step())
        result = sender.push(trained.step())
        assert trained.is_served(engine)
        assert [arena.bytes.numel() for arena in sender._driver._transfer._arenas] == [nbytes] * (1 if short else 2)
        assert (result.delta is None, bool(result.delta_reason)) == (bool(short), bool(short))


class Forgetful(Adapter):
    """Its loader skips one tensor."""

    forgets = ""

    def load(self, weights):
        super().load((name, tensor) for name, tensor in weights if name != self.forgets)


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
def test_deep_reads_the_weights_back_after_a_delta(made, transport):
    engine, trained = made(Engine(Forgetful)), Trained()
    with Sender([engine.url], transport=transport, verify="deep") as sender:
        sender.push(trained.step())
        result = sender.push(trained.step())
        assert (result.delta is None, result.verify) == (False, "deep")
        assert trained.is_served(engine)
        engine.ranks[1]._adapter.forgets = "d"
        with pytest.raises(errors.ApplyFailed, match="fresh engine would load: it differs in d") as raised:
            sender.push(trained.step())
        assert raised.value.weights == "dirty"
        engine.ranks[1]._adapter.forgets = ""
        assert sender.push(trained.step()).delta is None
        assert trained.is_served(engine)
