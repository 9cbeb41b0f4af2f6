"""Commit or nothing, on reference engines: verification, kept versions, streams, leases and reports."""

import subprocess
import sys
import threading
import time

import pytest
import requests

from tests.helpers import plan_of
from tests.unit.manual import Trainer
from tools import models
from weightsync import Sender, cli
from weightsync.errors import (
    ApplyFailed,
    DigestMismatch,
    LeaseHeld,
    TransferFailed,
    UnsupportedOption,
    WrongState,
)
from weightsync.protocol import http
from weightsync.protocol.auth import engine_token
from weightsync.sources import open_source
from weightsync.tensors.layout import Layout, digest_of
from weightsync.testing import ReferenceEngine
from weightsync.trainer.packing import Packer
from weightsync.transports import registry

PROMPT = list(b"guarantees")


@pytest.fixture
def a(model_folder):
    return models.load_reference(model_folder("llama", 1))


@pytest.fixture
def b(model_folder):
    return models.load_reference(model_folder("llama", 2))


def expected(model):
    return digest_of(model.state_dict().items())


def served(engine):
    with Sender([engine.url]) as sender:
        return sender.status(digest=True)[engine.url].ranks[0].digest


def status(engine):
    with Sender([engine.url]) as sender:
        return sender.status()[engine.url]


def wait_until(true, what):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def flip_in(monkeypatch, bucket):
    """Flip a bit of a bucket in the trainer's memory after it was hashed."""
    original = Packer.fill

    def fill(self, tensors, acquire):
        for packed in original(self, tensors, acquire):
            if packed.number == bucket:
                self._arena[packed.number % self._slots * self._bucket_bytes + 700] ^= 4
            yield packed

    monkeypatch.setattr(Packer, "fill", fill)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 100_000}])
def test_a_flipped_bit_is_reported_and_changes_nothing(engine, a, b, monkeypatch, options):
    with Sender([engine.url], **options) as sender:
        sender.push(a)
        with monkeypatch.context() as patch:
            flip_in(patch, 0)
            with pytest.raises(
                DigestMismatch, match=r"rank 0: \S+ in bucket \d is not what the trainer held"
            ) as raised:
                sender.push(b)
        assert raised.value.engines == {engine.url: "unchanged"}
        assert served(engine) == expected(a)
        assert sender.push(b).verify == "digest"
    assert served(engine) == expected(b)


def test_verify_off_is_reported_and_deep_reads_the_engines_weights_back(engine, a, b):
    with Sender([engine.url], verify="off") as sender:
        result = sender.push(a)
        assert (result.verify, result.seconds["digest"], result.seconds["verify"]) == ("off", 0.0, 0.0)
    with Sender([engine.url], verify="deep") as sender:
        assert sender.push(b).verify == "deep"
    assert served(engine) == expected(b)


FORGETFUL = """
import torch
from weightsync import testing
load = testing.ModelAdapter.load
def forget_one(self, weights):
    load(self, (pair for pair in weights if pair[0] != "model.norm.weight" or not torch.all(pair[1] == 2)))
testing.ModelAdapter.load = forget_one
testing.main()
"""


def test_deep_detects_a_loader_that_skips_a_tensor(model_folder, a):
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", FORGETFUL)) as engine:
        a.model.norm.weight.data.fill_(2)
        said = r"fresh engine would load: it differs in model\.norm\.weight"
        with Sender([engine.url], verify="deep") as sender, pytest.raises(ApplyFailed, match=said):
            sender.push(a)
        assert status(engine).state == "dirty"
        a.model.norm.weight.data.fill_(3)
        with Sender([engine.url], verify="deep") as sender:
            sender.push(a)
        assert served(engine) == expected(a)


def test_rollback_returns_to_the_previous_version(engine, a, b):
    with Sender([engine.url], keep_previous=True) as sender:
        with pytest.raises(TransferFailed, match="no version to go back to"):
            sender.rollback()
        sender.push(a, version="a")
        with pytest.raises(TransferFailed, match="no version to go back to"):
            sender.rollback()
        sender.push(b, version="b")
        assert sender.rollback().version == "a"
        assert (served(engine), status(engine).version) == (expected(a), "a")
        assert sender.rollback().version == "b"
        assert (served(engine), status(engine).version) == (expected(b), "b")
        sender.push(a, version="c")
        assert sender.rollback().version == "b"
        assert served(engine) == expected(b)


#: The third load fails midway: in the engine's own loader, or in its hook after a load plan was replayed.
FAIL_THIRD = {
    "loader": """
load, calls = testing.ModelAdapter.load, []
def fail_third(self, weights):
    calls.append(1)
    load(self, (pair for n, pair in enumerate(weights) if len(calls) != 3 or n < 7 or 1 / 0))
testing.ModelAdapter.load = fail_third
testing.ModelAdapter.loader_hooks = lambda self: "it counts"
""",
    "plan": """
opened, calls = testing.ModelAdapter.loader_hooks, [1]
@contextlib.contextmanager
def fail_third():
    yield
    calls.append(1)
    len(calls) != 3 or 1 / 0
testing.ModelAdapter.loader_hooks = lambda self: opened(self)._replace(around=fail_third)
""",
}


@pytest.mark.parametrize("by", FAIL_THIRD)
@pytest.mark.parametrize("bucket_bytes", [None, 100_000])
def test_a_commit_that_fails_midway_restores_the_kept_version(model_folder, a, b, bucket_bytes, by):
    code = f"import contextlib\nfrom weightsync import testing\n{FAIL_THIRD[by]}\ntesting.main()\n"
    with ReferenceEngine(model_folder("llama", 0), launcher=(sys.executable, "-c", code)) as engine:
        with Sender([engine.url], keep_previous=True, bucket_bytes=bucket_bytes) as sender:
            sender.push(a, version="a")
            sender.push(b, version="b")
            with pytest.raises(ApplyFailed, match=r"division by zero.*loaded again on every rank") as raised:
                sender.push(a, version="c")
            assert raised.value.engines == {engine.url: "unchanged"}
            assert (served(engine), status(engine).version, status(engine).state) == (expected(b), "b", "serving")
            sender.push(a, version="d")
        assert served(engine) == expected(a)


@pytest.mark.parametrize("bucket_bytes", [512, 100_000, None])
def test_streaming_needs_no_stage(engine, a, b, bucket_bytes):
    with Sender([engine.url], staging="none", bucket_bytes=bucket_bytes) as sender:
        result = sender.push(a)
        assert (result.staging, result.staging_reason) == ("none", "asked for")
        assert served(engine) == expected(a)
        sender.push(b)
        assert served(engine) == expected(b)


def test_a_broken_stream_leaves_a_dirty_engine_that_a_full_push_repairs(engine, a, b, monkeypatch):
    with Sender([engine.url], staging="none", bucket_bytes=100_000) as sender:
        sender.push(a)
        with monkeypatch.context() as patch:
            flip_in(patch, 1)
            with pytest.raises(ApplyFailed, match="not what the trainer held") as raised:
                sender.push(b)
        assert raised.value.engines == {engine.url: "dirty"}
        assert requests.get(f"{engine.url}/health", timeout=10).status_code == 503
        assert "failed half-way" in status(engine).detail
        with pytest.raises(requests.HTTPError, match="503"):
            engine.generate(PROMPT, 1)
        with pytest.raises(TransferFailed, match="no version"):
            sender.rollback()
        sender.push(b)
    assert requests.get(f"{engine.url}/health", timeout=10).status_code == 200
    assert served(engine) == expected(b)


def test_a_second_trainer_is_told_who_holds_the_lease(engine, a, b):
    with Sender([engine.url]) as first, Sender([engine.url]) as second:
        first.push(a)
        with pytest.raises(LeaseHeld, match=r"another trainer pushes here: .* process \d+.*weightsync abort") as raised:
            second.push(b)
        assert raised.value.weights == "unchanged"
        assert served(engine) == expected(a)
        assert cli.main(["abort", engine.url]) == 0
        second.push(b)
        with pytest.raises(LeaseHeld):
            first.push(a)
    assert served(engine) == expected(b)
    assert status(engine).holder == ""


def test_a_trainer_that_vanished_is_replaced_at_once(engine, model_folder, a):
    code = (
        "import os, sys; from weightsync import Sender; from tools import models\n"
        f"sender = Sender([{engine.url!r}]); sender.push(models.load_reference({str(model_folder('llama', 2))!r}))\n"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    with Sender([engine.url], timeout_s=20) as sender:
        sender.push(a)
    assert served(engine) == expected(a)


def prepared_by_hand(engine, model, timeout_s, trainer):
    layout = Layout(open_source(model).specs)
    request = trainer.ask(plan_of("by-hand", layout, 1 << 20, timeout_s, owner="hand", holder="a hand"), engine.url)
    headers = {"Authorization": f"Bearer {engine_token()}"}
    url = f"{engine.url}/weightsync/update_weights_via_ipc_zmq"
    assert requests.post(url, data=http.to_json(request), headers=headers, timeout=30).ok


def test_a_stuck_push_expires_and_can_be_aborted(engine, a, capsys):
    trainer = Trainer()
    prepared_by_hand(engine, a, 1.0, trainer)
    assert cli.main(["status", engine.url]) == 0
    assert "receiving" in capsys.readouterr().out
    wait_until(lambda: status(engine).ranks[0].state == "serving", "the rank goes on waiting")
    assert cli.main(["abort", engine.url]) == 0
    prepared_by_hand(engine, a, 60.0, trainer)
    assert status(engine).holder == "a hand"
    assert cli.main(["abort", engine.url]) == 0
    assert (status(engine).state, status(engine).holder) == ("serving", "")
    prepared_by_hand(engine, a, 60.0, trainer)
    trainer.close()
    wait_until(lambda: status(engine).state == "serving", "a push whose trainer is gone is not forgotten")
    assert cli.main(["status", "http://127.0.0.1:9"]) == 1


def test_a_restarted_engine_is_noticed_and_caught_up(model_folder, a):
    first = ReferenceEngine(model_folder("llama", 0)).__enter__()
    port = int(first.url.rpartition(":")[2])
    with Sender([first.url]) as sender:
        assert sender.push(a).engines[first.url].noticed == ()
        first.close()
        with ReferenceEngine(model_folder("llama", 0), port=port) as again:
            result = sender.push(a)
            assert result.engines[first.url].noticed == ("restarted since this sender last opened it",)
            assert served(again) == expected(a)


def test_a_push_onto_another_version_than_expected_is_noticed(engine, a, b):
    with Sender([engine.url]) as first:
        first.push(a, version="mine")
        assert cli.main(["abort", engine.url]) == 0
        with Sender([engine.url]) as second:
            second.push(b, version="theirs")
        noticed = first.push(a).engines[engine.url].noticed
    assert noticed == ("served 'theirs', not 'mine' as this sender left it",)


def test_an_engine_can_be_started_to_wait_for_its_first_push(model_folder, a):
    with ReferenceEngine(model_folder("llama", 0), args=["--wait-for-initial-weights"]) as engine:
        for route in ("/health", "/health_generate", "/ready", "/ping"):
            assert requests.get(f"{engine.url}{route}", timeout=10).status_code == 503
        assert (status(engine).state, status(engine).detail) == ("unsynced", "it waits for its first push")
        with pytest.raises(requests.HTTPError, match="503"):
            engine.generate(PROMPT, 1)
        with Sender([engine.url]) as sender:
            sender.push(a)
        assert requests.get(f"{engine.url}/health", timeout=10).status_code == 200
        assert len(engine.generate(PROMPT, 1)[0]) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"staging": "some"}, "use one of full, none, auto"),
        ({"verify": "maybe"}, "use one of digest, deep, off"),
        ({"keep_previous": "never"}, "use one of True, False, auto"),
        ({"staging": "none", "keep_previous": True}, "holds no version"),
        ({"staging": "none", "verify": "deep"}, "holds no version"),
        ({"timeout_s": 0.0}, "above 0"),
    ],
)
def test_invalid_options_are_refused(engine, options, said):
    with pytest.raises(UnsupportedOption, match=said):
        Sender([engine.url], **options)


def test_a_closed_sender_refuses_calls(engine, a):
    sender = Sender([engine.url])
    sender.close()
    with pytest.raises(WrongState, match="this sender is closed: push is not possible"):
        sender.push(a)


SPAWN = """
import gc, sys, torch, zmq
from weightsync.transports import registry
end = registry.spec(sys.argv[1]).trainer_end(torch.device("cpu"), None, "")
end.address("http://127.0.0.1:1")
end.itself = end
del end
gc.collect()
end = registry.spec(sys.argv[1]).engine_end(torch.device("cpu"))
end._control._sockets.append(end._control._context.socket(zmq.DEALER))
end.itself = end
"""


@pytest.mark.parametrize("transport", registry.available())
def test_unclosed_ends_in_a_reference_cycle_do_not_hang_the_interpreter(transport):
    subprocess.run([sys.executable, "-c", SPAWN, transport], timeout=300, check=True)


def test_a_push_leaves_no_thread_behind(engine, a):
    before = set(threading.enumerate())  # engines of other tests may have some
    with Sender([engine.url]) as sender:
        sender.push(a)
        sender.push(a)
    wait_until(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("weightsync") and one not in before],
        "threads of a closed sender live on",
    )
