"""`Sender.push_async`: the trainer waits for its own memory alone."""

import functools
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest
import torch

from tests.unit.two_ranks import SERVING, WEIGHTS, Engine
from weightsync import Sender, errors
from weightsync.engine import front_end

SOON_S = 20.0


@pytest.fixture
def engine(made):
    return made(Engine())


@pytest.fixture
def sender(made, engine):
    return made(Sender([engine.url]))


def held(value):
    """Weights that a trainer may write to."""
    return {name: tensor.clone() for name, tensor in WEIGHTS[value].items()}


def train(weights):
    for tensor in weights.values():
        tensor.fill_(-7)


class Gate:
    """Holds the calls of one method until it is opened; ``reached`` once a call is there."""

    def __init__(self):
        self.reached, self._opened = threading.Event(), threading.Event()
        self.open = self._opened.set

    def wait(self, seconds):
        self.reached.set()
        self._opened.wait(seconds)


def closed(engine, method="update_weights_via_ipc_zmq"):
    engine.gates[method] = gate = Gate()
    return gate


@pytest.mark.parametrize("again", [1, 2, 4])  # the first packing is noted, the second planned, the others planned
def test_it_returns_before_a_slow_engine_was_asked_and_the_tensors_may_change(engine, sender, again):
    weights = held(1)
    for _ in range(again):
        for name, tensor in weights.items():
            tensor.copy_(WEIGHTS[1][name])
        gate = closed(engine)
        future = sender.push_async(weights, version="one")
        assert isinstance(future, Future)
        assert not future.in_place
        assert not future.done()
        train(weights)
        gate.open()
        result = future.result(SOON_S)
        assert (result.version, result.read) == ("one", "copied")
        assert engine.seen() == SERVING[1]


def test_masters_are_cast_while_they_are_copied(engine, sender):
    weights = {name: tensor.double() for name, tensor in WEIGHTS[1].items()}
    gate = closed(engine)
    future = sender.push_async(weights)
    train(weights)
    gate.open()
    result = future.result(SOON_S)
    assert (result.read, result.cast > 0) == ("copied", True)
    assert engine.seen() == SERVING[1]


def test_the_next_call_waits_for_it_and_so_does_close(engine, sender):
    gate = closed(engine)
    first, weights = sender.push_async(held(1)), held(2)
    threading.Timer(0.3, gate.open).start()
    second = sender.push_async(weights)
    assert first.done()
    train(weights)
    gate = closed(engine, "weightsync_commit")
    threading.Timer(0.3, gate.open).start()
    sender.close()
    assert (first.result(0).version, second.result(0).version) == ("1", "2")
    assert engine.seen() == SERVING[2]


@pytest.mark.parametrize(
    "options", [{"bucket_bytes": 512}, {"staging": "none"}, {"keep_previous": True}], ids=["small", "streamed", "kept"]
)
def test_without_an_arena_for_it_alone_it_waits_for_the_transfer(made, engine, options):
    sender = made(Sender([engine.url], **options))
    for value in (1, 2, 3):
        weights = held(value)
        future = sender.push_async(weights)
        train(weights)
        assert future.result(SOON_S).read == "sent"
        assert engine.seen() == SERVING[value]


def test_a_kept_version_is_not_overwritten_by_a_push_that_is_refused(made, engine):
    sender = made(Sender([engine.url], keep_previous=True))
    for value in (1, 2):
        sender.push_async(held(value), version=f"v{value}").result(SOON_S)
    with pytest.raises(errors.ManifestMismatch, match="renamed"):
        sender.push_async({f"renamed {name}": tensor for name, tensor in held(3).items()}).result(SOON_S)
    assert sender.rollback().version == "v1"
    assert engine.seen() == SERVING[1]


def shared(value):
    return {name: tensor.clone().share_memory_() for name, tensor in WEIGHTS[value].items()}


def test_parameters_that_are_read_in_place_may_change_when_the_future_is_done(engine, sender):
    weights = shared(1)
    for _ in range(3):
        gate = closed(engine)
        future = sender.push_async(weights)
        assert (future.in_place, future.done()) == (True, False)
        gate.open()
        assert future.result(SOON_S).read == "in place"
        assert engine.seen() == SERVING[1]


@pytest.mark.parametrize(
    ("method", "served"), [("update_weights_via_ipc_zmq", "unchanged"), ("weightsync_commit", "unknown")]
)
def test_writing_to_parameters_that_are_read_in_place_is_noticed(engine, sender, method, served):
    sender.push(held(1))
    gate = closed(engine, method)
    weights = shared(2)
    future = sender.push_async(weights)
    assert gate.reached.wait(SOON_S)
    train(weights)
    gate.open()
    with pytest.raises(errors.SourceError, match=r"changed while the engines read it in place.*push again") as raised:
        future.result(SOON_S)
    assert raised.value.engines == {engine.url: served}
    assert sender.push_async(held(3)).result(SOON_S).read == "copied"
    assert engine.seen() == SERVING[3]


def test_what_push_raises_is_in_the_future(engine, sender):
    for model, error in (
        ({"a": torch.zeros(1)}, errors.ManifestMismatch),
        (7, errors.SourceError),
        ({**WEIGHTS[1], "more": "no tensor"}, errors.SourceError),
    ):
        with pytest.raises(error) as raised:
            sender.push_async(model).result(SOON_S)
        assert raised.value.engines == {engine.url: "unchanged"}
    with pytest.raises(errors.UnsupportedOption, match="list of patterns"):
        sender.push_async(WEIGHTS[1], allow_missing="mtp")
    sender.push_async(held(1)).result(SOON_S)
    assert engine.seen() == SERVING[1]


def test_an_engine_that_restarted_gets_what_was_copied(engine, sender):
    sender.push(held(1))
    engine.front_end = front_end.FrontEnd(engine)
    weights = held(2)
    gate = closed(engine)
    future = sender.push_async(weights)
    train(weights)
    gate.open()
    assert future.result(SOON_S).version
    assert engine.seen() == SERVING[2]


def test_ctrl_c_while_the_tensors_are_read_ends_the_push(engine, sender):
    class Interrupted(dict):
        asked = 0

        def __getitem__(self, name):
            self.asked += 1
            if self.asked == 1:
                raise KeyboardInterrupt
            return super().__getitem__(name)

    with pytest.raises(KeyboardInterrupt):
        sender.push_async(Interrupted(held(1)))
    sender.push(held(2))
    assert engine.seen() == SERVING[2]


@pytest.mark.parametrize("thread", ["main", "another"])  # the one that the signal wakes
def test_ctrl_c_before_the_tensors_are_read_ends_the_push(made, engine, thread):
    sender = made(Sender([engine.url], bucket_bytes=512))
    sender.push(held(1))
    gate = closed(engine)
    main = threading.main_thread().ident
    interrupt = signal.raise_signal if thread == "another" else functools.partial(signal.pthread_kill, main)
    threading.Thread(target=lambda: gate.reached.wait(SOON_S) and interrupt(signal.SIGINT)).start()
    threading.Timer(1.0, gate.open).start()
    with pytest.raises(KeyboardInterrupt):
        sender.push_async(held(2))
    assert sender.status()
    assert engine.seen() == SERVING[1]
    sender.push(held(3))
    assert engine.seen() == SERVING[3]


TRAINER = """
import sys
from tests.unit.two_ranks import WEIGHTS
from weightsync import Sender
sender = Sender([sys.argv[1]])
sender.push(WEIGHTS[1])
print("pushed", flush=True)
sys.stdin.readline()
future = sender.push_async(WEIGHTS[2])
sys.stdin.readline()
assert not future.done()
"""


def test_a_process_that_ends_takes_its_push_with_it(made, engine):
    command = [sys.executable, "-c", TRAINER, engine.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "pushed\n"
        gate = closed(engine)
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert gate.reached.wait(SOON_S)
        trainer.stdin.close()
        assert trainer.wait(SOON_S) == 0
    gate.open()
    assert engine.seen() == SERVING[1]
    made(Sender([engine.url])).push(WEIGHTS[3])
    assert engine.seen() == SERVING[3]
