"""An engine keeps serving while its ranks release a cancelled push, and reports how long recording blocked it."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from tests.unit.test_states import DictAdapter
from tests.unit.two_ranks import Engine, Front, Trainer, driven, until
from weightsync import Sender, errors
from weightsync.protocol import http
from weightsync.transports.base import Peer

PEERS = {Peer("http://a", 0), Peer("http://a", 1)}
STATUS = http.to_json(http.StatusRequest())


class HeldStages:
    """The stages of a rank that stays inside `fill` until ``may`` is set, as if it hashed a large tensor."""

    def __init__(self, stages):
        self._stages = stages
        self.inside, self.may = threading.Event(), threading.Event()

    def fill(self, *args):
        if not self.inside.is_set():
            self.inside.set()
            self.may.wait()
        return self._stages.fill(*args)

    def __getattr__(self, name):
        return getattr(self._stages, name)


@pytest.fixture
def front(request):
    front = request.param()
    held = [HeldStages(rank._stages) for rank in front.ranks]
    for rank, stages in zip(front.ranks, held, strict=True):
        rank._stages = stages
    held[0].inside.set()  # the first rank is never held up
    yield front, held[1]
    held[1].may.set()
    front.close()


async def steps(front, count):
    """Run calls that take turns with the ranks' calls in the engine's loop, as an engine's steps do."""
    for _ in range(count):
        await Front.call(front, "weightsync_status", STATUS)


@pytest.mark.parametrize("front", [Front], indirect=True)
@driven
async def test_an_engine_keeps_serving_while_a_rank_releases_a_superseded_push(front):
    front, held = front
    first, second = Trainer(front.front_end, "one"), Trainer(front.front_end, "one")
    try:
        await first.stage("v1")
        await asyncio.to_thread(first.await_all, PEERS, 5)
        await asyncio.to_thread(held.inside.wait, 5)
        superseding = asyncio.ensure_future(second.stage("v2"))
        await steps(front, 20)
        assert not superseding.done()
        held.may.set()
        await superseding
        await second.transfer(2)
        await second.commit("v2")
        assert [seen for _, *seen in front.seen()] == [[2.0], [2.0]]
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("front", [Front], indirect=True)
@driven
async def test_a_rank_that_does_not_stop_in_time_is_named(front):
    front, held = front
    first, second = Trainer(front.front_end, "one"), Trainer(front.front_end, "one")
    try:
        await first.stage("v1")
        await asyncio.to_thread(first.await_all, PEERS, 5)
        await asyncio.to_thread(held.inside.wait, 5)
        with pytest.raises(errors.WeightSyncError, match="rank 1 is still busy with push v1, which was called off"):
            await front.front_end.abort(http.AbortRequest(push="v1"))
    finally:
        first.close()
        second.close()


class Fails:
    """A source that fails to be read once ``happened`` is set."""

    def __init__(self, weights, happened):
        self._weights, self._happened = weights, happened

    def metadata(self):
        return [SimpleNamespace(name=name, dtype=one.dtype, shape=one.shape) for name, one in self._weights.items()]

    def __iter__(self):
        assert self._happened.wait(10)
        raise OSError("the disk is gone")
        yield


class Asked(Engine):
    """Records the methods that its ranks are asked for."""

    def __init__(self):
        self.asked = []
        super().__init__()

    async def call(self, method, payload):
        self.asked.append(method)
        return await super().call(method, payload)


@pytest.mark.parametrize("front", [Asked], indirect=True)
def test_a_sender_can_push_again_after_a_rank_was_slow_to_release_a_push(front):
    front, held = front
    weights = dict(DictAdapter().weights)
    with Sender([front.url]) as sender:
        with pytest.raises(errors.SourceError, match="the disk is gone"):
            sender.push(Fails(weights, held.inside))
        until(lambda: front.asked.count("weightsync_abort") > 2, "between two steps the rank is asked again")
        held.may.set()
        sender.push({name: tensor + 3 for name, tensor in weights.items()})
        assert [seen for _, *seen in front.seen()] == [[3.0], [3.0]]


def test_a_push_reports_how_long_recording_blocked_the_engine(engine, trained):
    with Sender([engine.url]) as sender:
        first, second = sender.push(trained), sender.push(trained)
        turned = sender.push(dict(reversed(trained.state_dict().items())))
    assert 0 < first.seconds["record"] <= first.seconds["prepare"]
    assert 0 < turned.seconds["record"] <= turned.seconds["prepare"]
    assert second.engines[engine.url].seconds["record"] > 0
