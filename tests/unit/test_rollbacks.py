"""Rollbacks, and pushes that expect a version."""

import functools

import pytest
import torch

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine, driven, one_engine
from weightsync import Sender, errors
from weightsync.deadline import Deadline
from weightsync.protocol import http
from weightsync.trainer import http_client


@pytest.fixture
def harness(made):
    return one_engine(made)


@pytest.mark.parametrize("failing", [0, 1])
@driven
async def test_a_rollback_that_fails_on_one_rank_restores_the_same_version_on_both(harness, failing):
    front, one, _ = harness
    for version, value in (("v1", 1), ("v2", 2)):
        await one.stage(version, value)
        await one.commit(version)
    before = await front.front_end.status(http.StatusRequest(digest=True))
    front.ranks[failing]._adapter.during = lambda: 1 / 0  # once, between two tensors
    with pytest.raises(errors.ApplyFailed, match=r"division by zero.*loaded again on every rank") as raised:
        await one.commit("v1", push="back", rollback=True)
    assert (raised.value.weights, front.seen()) == ("unchanged", SERVING[2])
    assert await front.front_end.status(http.StatusRequest(digest=True)) == before  # version, state, digests, kept ones
    await one.commit("v1", push="back", rollback=True)
    assert front.seen() == SERVING[1]


@driven
async def test_a_rollback_after_its_abort_is_refused(harness):
    front, one, _ = harness
    for version, value in (("v1", 1), ("v2", 2)):
        await one.stage(version, value)
        await one.commit(version)
    assert (await front.front_end.abort(http.AbortRequest(push="back", owner="one"))).refused
    with pytest.raises(errors.TransferFailed, match="its sender aborted rollback back before it arrived") as raised:
        await one.commit("v1", push="back", rollback=True)
    assert (raised.value.weights, front.seen()) == ("unchanged", SERVING[2])
    await one.commit("v1", push="again", rollback=True)
    assert front.seen() == SERVING[1]


@pytest.mark.parametrize("lost", ["request", "reply", "the engine"])
def test_a_rollback_is_reported_by_its_outcome_or_unknown_until_it_can_no_longer_arrive(made, monkeypatch, lost):
    engine = made(Engine())
    sender = made(Sender([engine.url], keep_previous=True))
    sender.push(WEIGHTS[1], version="v1")
    sender.push(WEIGHTS[2], version="v2")
    server, late = sender._driver.engines._clients[0]._server, []
    ask = server.ask

    def breaking(method, path, *more, **options):
        if path.endswith("/commit") and not late:
            late.append(functools.partial(ask, method, path, *more[:1], Deadline(30.0), **options))
            assert lost != "reply" or late[0]().status == 200
            raise http_client.NoAnswer("the connection broke")
        if late and lost == "the engine":
            raise http_client.NoAnswer("the engine is not to be reached")
        return ask(method, path, *more, **options)

    monkeypatch.setattr(server, "ask", breaking)
    if lost == "reply":
        assert sender.rollback().version == "v1"
        assert engine.seen() == SERVING[1]
        return
    with pytest.raises(errors.WeightSyncError) as raised:
        sender.rollback()
    assert raised.value.engines == {engine.url: "unchanged" if lost == "request" else "unknown"}
    if lost == "the engine":
        for change in (sender.rollback, lambda: sender.push(WEIGHTS[3]), lambda: sender.push({"a": "no tensor"})):
            with pytest.raises(errors.WeightSyncError) as raised:
                change()
            assert raised.value.engines == {engine.url: "unknown"}, "it may still arrive"
        lost = "nothing any more"
        with pytest.raises(errors.ManifestMismatch) as raised:
            sender.push({"one": torch.zeros(3)})
        assert raised.value.engines == {engine.url: "unchanged"}
    assert late[0]().status == 409
    assert engine.seen() == SERVING[2]
    assert sender.rollback().version == "v1"


@pytest.mark.parametrize("by", ["another sender", "nobody"])
def test_a_push_that_expects_another_version_changes_nothing(made, by):
    engines = [made(Engine()), made(Engine())]
    sender = made(Sender([engine.url for engine in engines]))
    sender.push(WEIGHTS[1], version="v1")
    if by == "another sender":
        sender.close()
        with Sender([engines[1].url]) as another:
            another.push(WEIGHTS[2], version="v2")
        sender = made(Sender([engine.url for engine in engines]))
    expected = "v1" if by == "another sender" else "v0"
    with pytest.raises(
        errors.WrongState, match=rf"{engines[1].url} serves version 'v.', and this push expects"
    ) as raised:
        sender.push(WEIGHTS[3], version="v3", expected=expected)
    assert raised.value.engines == {engine.url: "unchanged" for engine in engines}
    assert [engine.seen() for engine in engines] == [SERVING[1], SERVING[2 if by == "another sender" else 1]]
    with pytest.raises(errors.UnsupportedOption, match="is not a valid label"):
        sender.push(WEIGHTS[3], expected=5)
    sender.push(WEIGHTS[3], version="v3")
    sender.push(WEIGHTS[1], version="v4", expected="v3")
    assert [engine.seen() for engine in engines] == [SERVING[1]] * 2
