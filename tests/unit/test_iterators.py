"""Pushes of an iterator of names and tensors."""

import gc
import random
import threading
import weakref

import pytest
import torch

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine
from weightsync import Sender, errors
from weightsync.engine import front_end
from weightsync.errors import ManifestMismatch, SourceError, UnsupportedOption, WeightSyncError

SOON_S = 20.0


@pytest.fixture
def engine(made):
    return made(Engine())


@pytest.fixture
def sender(made, engine):
    """A sender with an arena for everything."""
    return made(Sender([engine.url]))


#: Options with which tensors are sent as they come.
IN_TURN = [{"bucket_bytes": 512}, {"bucket_bytes": 1 << 20}, {"keep_previous": True}]


@pytest.fixture(params=[{}, *IN_TURN], ids=str)
def any_sender(made, engine, request):
    """A sender with an arena for everything, or one that sends tensors as they come; ``read`` says which."""
    sender = made(Sender([engine.url], **request.param))
    sender.read = "sent" if request.param else "copied"
    return sender


def pairs(value, *, shuffled=None, dtype=None, last=None):
    """Yield the weights, shuffled by a seed; up to number ``last``, then the iterator ends early."""
    items = list(WEIGHTS[value].items())
    if shuffled is not None:
        random.Random(shuffled).shuffle(items)
    for name, tensor in items[:last]:
        yield name, tensor.clone() if dtype is None else tensor.to(dtype)


def test_the_tensors_may_come_in_any_order(engine, any_sender):
    sender = any_sender
    for value, seed in ((1, None), (2, 1), (3, 2), (1, 3)):
        result = sender.push(pairs(value, shuffled=seed))
        assert (result.read, result.cast) == (sender.read, 0)
        assert engine.seen() == SERVING[value]
    sender.push(WEIGHTS[2])
    assert engine.seen() == SERVING[2]


def test_they_are_cast_to_what_the_engine_expects(engine, any_sender):
    sender = any_sender
    assert sender.push(pairs(2, dtype=torch.float64)).cast == len(WEIGHTS[2])
    assert engine.seen() == SERVING[2]
    name = next(iter(WEIGHTS[1]))
    large = torch.full_like(WEIGHTS[1][name], 1e300, dtype=torch.float64)
    with pytest.raises(SourceError, match=f"{name}: .* finite values"):
        sender.push((n, large if n == name else t) for n, t in pairs(1))
    assert engine.seen() == SERVING[2]


def test_push_async_returns_when_it_has_been_read(engine, sender):
    gate = engine.gates["update_weights_via_ipc_zmq"] = threading.Event()
    read_in = []
    future = sender.push_async((read_in.append(threading.current_thread()) or pair) for pair in pairs(1, shuffled=5))
    assert not future.done()
    assert set(read_in) == {threading.current_thread()}
    gate.set()
    assert future.result(SOON_S).read == "copied"
    assert engine.seen() == SERVING[1]


def renamed(value):
    yield from pairs(value)
    yield "more", torch.zeros(1)


def twice(value):
    yield from pairs(value)
    yield from pairs(value)


def failing(value):
    yield from pairs(value, last=1)
    raise OSError("the disk is gone")


def reshaped(value):
    for name, tensor in pairs(value):
        yield name, tensor.view(-1)[:1]


def packed(value):
    for name, tensor in pairs(value):
        yield name, tensor.to(torch.int8)


def unpaired(value):
    yield from WEIGHTS[value]


def unnamed(value):
    for _, tensor in pairs(value):
        yield 7, tensor


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda value: pairs(value, last=1), ManifestMismatch, "missing|ended without"),
        (lambda value: iter(()), WeightSyncError, "no tensors|ended without"),
        (renamed, ManifestMismatch, "more: the iterator yielded it, and the engines expect no such tensor"),
        (twice, SourceError, "yielded .* twice"),
        (failing, SourceError, "the disk is gone"),
        (reshaped, ManifestMismatch, "the iterator yielded .* and the engines expect"),
        (packed, ManifestMismatch, "int8.* and the engines expect"),
        (unpaired, SourceError, "not a pair"),
        (unnamed, SourceError, "names must be str"),
    ],
)
def test_one_that_does_not_fit_leaves_the_engine_unchanged(engine, any_sender, make, error, said):
    sender = any_sender
    sender.push(WEIGHTS[1])
    for push in (sender.push, lambda model: sender.push_async(model).result(SOON_S)):
        with pytest.raises(error, match=said) as raised:
            push(make(2))
        assert raised.value.engines == {engine.url: "unchanged"}
        assert engine.seen() == SERVING[1]
    sender.push(pairs(3))
    assert engine.seen() == SERVING[3]


def test_without_a_stage_it_is_refused_before_it_is_read(made, engine):
    sender = made(Sender([engine.url], staging="none"))
    iterator = pairs(1)
    with pytest.raises(UnsupportedOption, match="a stage is excluded: asked for; push a module or a mapping"):
        sender.push(iterator)
    assert len(list(iterator)) == len(WEIGHTS[1])


@pytest.mark.parametrize("options", IN_TURN, ids=str)
def test_what_may_be_missing_is_known_too_late_where_tensors_are_sent_as_they_come(made, engine, options):
    sender = made(Sender([engine.url], **options))
    iterator = pairs(1)
    with pytest.raises(UnsupportedOption, match="which names an iterator lacks is known at its end"):
        sender.push(iterator, allow_missing=["*"])
    assert len(list(iterator)) == len(WEIGHTS[1])


def test_engines_of_an_earlier_release_take_no_tensors_as_they_come(made, engine, monkeypatch):
    monkeypatch.setattr(front_end.http, "PROTOCOL", (1, 2))
    sender = made(Sender([engine.url], bucket_bytes=512))
    monkeypatch.undo()
    iterator = pairs(1)
    with pytest.raises(UnsupportedOption, match=r"takes an iterator's tensors only from an arena .*; update it"):
        sender.push(iterator)
    assert len(list(iterator)) == len(WEIGHTS[1])


def test_kept_versions_can_be_served_again(made, engine):
    sender = made(Sender([engine.url], keep_previous=True))
    for value in (1, 2):
        sender.push(pairs(value, shuffled=value))
    sender.rollback()
    assert engine.seen() == SERVING[1]


def test_no_arena_holds_what_was_sent_as_it_came(made, engine):
    other = made(Engine())
    sender = made(Sender([engine.url], bucket_bytes=1 << 20))
    sender.push(pairs(1))
    assert sender.add_engine(other.url) is None
    sender.push(pairs(2))
    assert engine.seen() == other.seen() == SERVING[2]


@pytest.mark.parametrize("options", IN_TURN, ids=str)
def test_push_async_waits_for_a_transfer_in_turn(made, engine, options):
    sender, read_in = made(Sender([engine.url], **options)), []
    future = sender.push_async((read_in.append(threading.current_thread()) or pair) for pair in pairs(1, shuffled=5))
    assert set(read_in) == {threading.current_thread()}
    assert len(read_in) == len(WEIGHTS[1])
    assert future.result(SOON_S).read == "sent"
    assert engine.seen() == SERVING[1]


def test_one_tensor_is_held_at_a_time_and_none_afterwards(engine, any_sender):
    sender, alive = any_sender, []

    def counted():
        for name, tensor in WEIGHTS[1].items():
            assert [one for one in alive if one() is not None] == []
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield name, made
            del made

    sender.push(counted())
    gc.collect()
    assert len(alive) == len(WEIGHTS[1])
    assert [one for one in alive if one() is not None] == []


def test_it_is_not_read_again_for_an_engine_that_restarted(engine, any_sender):
    sender = any_sender
    sender.push(pairs(1))
    engine.front_end = front_end.FrontEnd(engine)
    assert sender.push(pairs(2)).version
    assert engine.seen() == SERVING[2]


def test_names_that_may_be_missing_stay_as_they_are(engine, sender):
    sender.push(WEIGHTS[1])
    name = list(WEIGHTS[1])[-1]
    for _ in range(2):
        result = sender.push((pair for pair in pairs(2, shuffled=1) if pair[0] != name), allow_missing=[name])
        assert result.kept == (name,)
    made = [{float(t.view(-1)[0]) for n, t in rank._adapter.weights.items() if n == name} for rank in engine.ranks]
    assert made == [{1.0}] * 2
    with pytest.raises(ManifestMismatch, match="matches no tensor"):
        sender.push(pairs(2), allow_missing=["mtp.*"])


def test_an_engine_without_a_list_is_refused(made, engine):
    for rank in engine.ranks:
        rank._adapter.expected = lambda: (_ for _ in ()).throw(ManifestMismatch("no checkpoint"))
    sender = made(Sender([engine.url]))
    with pytest.raises(errors.UnsupportedOption, match=r"no list of the tensors .*\(no checkpoint"):
        sender.push(pairs(1))
