"""Engines in lockstep, whose replicas take every step together: a sender needs all of them."""

import pytest

from tests.unit.two_ranks import WEIGHTS, Engine
from weightsync import Sender
from weightsync.errors import UnsupportedOption
from weightsync.protocol.lockstep import Lockstep


@pytest.fixture
def three(made):
    """Engines of two, one and one of the four replicas."""
    found = [made(Engine()) for _ in range(3)]
    for engine, (first, count) in zip(found, [(0, 2), (2, 1), (3, 1)], strict=True):
        engine.lockstep = Lockstep("10.0.0.1:29550", first, count, 4)
    return found


def test_a_sender_of_all_engines_pushes(three):
    with Sender([engine.url for engine in three]) as sender:
        sender.push(WEIGHTS[1], version="all")
        assert {reply.version for reply in sender.status().values()} == {"all"}


@pytest.mark.parametrize(("given", "said"), [((0,), "those of replicas 2, 3:"), ((1, 2), "those of replicas 0, 1:")])
def test_a_sender_of_some_is_refused_by_name(three, made, given, said):
    other = made(Engine())  # in lockstep with nobody
    some = [three[number].url for number in given]
    with pytest.raises(UnsupportedOption, match=said) as raised:
        Sender([other.url, *some])
    assert raised.value.engines == dict.fromkeys([other.url, *some], "unchanged")
    assert all(url in str(raised.value) for url in some)


def test_a_sender_that_has_lost_one_pushes_to_none(three):
    with Sender([engine.url for engine in three]) as sender:
        sender.push(WEIGHTS[1], version="all")
        sender.remove_engine(three[1].url)
        with pytest.raises(UnsupportedOption, match="give the Sender the URLs of all servers at once"):
            sender.push(WEIGHTS[2], version="never")
        assert {reply.version for reply in sender.status().values()} == {"all"}


def test_engines_of_another_name_do_not_count(three):
    three[2].lockstep = Lockstep("10.0.0.2:29550", 3, 1, 4)
    with pytest.raises(UnsupportedOption, match=r"those of replica 3:|those of replicas 0, 1, 2:"):
        Sender([engine.url for engine in three])
