"""`weightsync doctor` with engines: every cause is provoked and named, and healthy engines raise no alarm."""

import itertools
import os
import re
import signal
import sys
import threading
import time

import pytest
import requests
import torch

from tests.helpers import plan_of
from tests.unit import manual
from tests.unit.examined import engine_of, examined
from tests.unit.test_states import DictAdapter
from tests.unit.two_ranks import WEIGHTS, Engine, until
from weightsync import Sender
from weightsync.cli import main
from weightsync.deadline import Deadline
from weightsync.engine import diagnosis
from weightsync.errors import ApplyFailed, UnsupportedOption
from weightsync.memory import arenas
from weightsync.protocol import auth, http
from weightsync.protocol.diagnosis import DiagnoseRequest
from weightsync.tensors.layout import Layout
from weightsync.testing import ReferenceEngine, free_port
from weightsync.trainer.client import EngineClient

#: Seconds that the command gets where an engine does not answer.
SHORT = ("--timeout", "2")


@pytest.fixture
def pair(made):
    """An engine of two ranks, in this process and behind real routes."""
    return made(Engine())


def launched(code):
    """A launcher of the reference engine that runs ``code`` first."""
    return (sys.executable, "-c", f"from weightsync import testing\n{code}\ntesting.main()")


@pytest.fixture(scope="module")
def far(model_folder):
    """An engine that believes to be on another host, so that a sender reaches it over TCP."""
    code = "from weightsync.memory import arenas; arenas.host_id = lambda: 'elsewhere:1'"
    with ReferenceEngine(model_folder("llama", 0), launcher=launched(code)) as engine:
        yield engine


# --- no false alarm


def test_a_healthy_engine_and_this_host_have_nothing_wrong(engine, capsys):
    here, there = examined(capsys, engine.url)
    assert here.wrong == there.wrong == there.notes == []
    assert {"packages", "key", "shared memory", "ipc_zmq", "nccl", "nixl"} == {f["check"] for f in here.findings}
    assert there.of("transport")[1].startswith("ipc_zmq: the same host")
    assert "rank 0: the trainer is reached at ipc://" in there.of("address")[1]
    assert there.of("state")[1] == "the engine is serving"


def test_every_line_says_where_and_what(engine, capsys):
    assert main(["doctor", engine.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    places = ("this host: ", f"{engine.url}: ")
    assert all(line.startswith(("ok    ", "note  ")) and line[6:].startswith(places) for line in lines)


def test_an_engine_between_pushes_is_fine_and_its_trainer_is_named(engine, trained, capsys):
    with Sender([engine.url]) as sender:
        sender.push(trained, version="seven")
        there = engine_of(capsys, engine.url)
        assert there.wrong == []
        ((check, text, mend),) = there.notes
        assert (check, engine.url in mend) == ("lease", True)
        assert f"process {os.getpid()} " in text
        sender.push(trained)  # it is not disturbed
    assert engine_of(capsys, engine.url).notes == []


def test_equal_findings_of_several_ranks_are_one(pair, capsys):
    there = engine_of(capsys, pair.url)
    assert there.wrong == there.notes == []
    assert there.of("address")[1].startswith("ranks 0, 1: ")


def test_an_engine_on_another_host_is_dialled_both_ways(far, capsys):
    there = engine_of(capsys, far.url)
    assert there.wrong == there.notes == []
    ways = [text for check, text, _ in there.at("ok") if check == "address"]
    assert ways[0].startswith("rank 0: the trainer is reached at tcp://127.0.0.1:")
    assert ways[1] == "rank 0: this host reaches it at 127.0.0.1"


# --- the engine


def test_a_dirty_engine(pair, capsys):
    with Sender([pair.url]) as sender:
        pair.ranks[1]._adapter.fails = True
        with pytest.raises(ApplyFailed):
            sender.push(WEIGHTS[1])
        level, text, mend = engine_of(capsys, pair.url).of("state")
        assert (level, mend) == ("wrong", "sender.push(model), with the whole model")
        assert "the engine is dirty" in text
        assert "out of luck" in text
        pair.ranks[1]._adapter.fails = False
        sender.push(WEIGHTS[1])
    assert engine_of(capsys, pair.url).wrong == []


def test_an_engine_that_waits_for_its_first_push(model_folder, capsys):
    with ReferenceEngine(model_folder("llama", 0), args=["--wait-for-initial-weights"]) as engine:
        there = engine_of(capsys, engine.url)
    assert there.wrong == []
    assert there.of("state")[::2] == ("note", "sender.push(model)")


def test_a_stuck_push_is_told_from_one_that_goes_on(pair, made, capsys, monkeypatch):
    trainer, layout = made(manual.Trainer()), Layout(DictAdapter().expected().specs)
    monkeypatch.setattr(diagnosis, "_SILENT_S", 600.0)
    asked = trainer.ask(plan_of("p", layout, 1024, owner="me", holder="alice on gpu7"), pair.url)
    EngineClient(pair.url, auth.sender_token()).prepare(asked, "ipc_zmq", Deadline(10.0))
    level, text, mend = engine_of(capsys, pair.url).of("lease")
    assert (level, mend) == ("note", f"wait, or weightsync abort {pair.url}")
    assert re.match(r"alice on gpu7 has been pushing for \d+ s", text)
    monkeypatch.setattr(diagnosis, "_SILENT_S", 0.2)
    time.sleep(0.3)
    level, text, mend = engine_of(capsys, pair.url).of("lease")
    assert (level, mend) == ("wrong", f"weightsync abort {pair.url}")
    assert "alice on gpu7" in text
    assert "nothing was heard of it" in text
    assert main(mend.split()[1:]) == 0
    assert engine_of(capsys, pair.url).wrong == []


def test_a_commit_that_does_not_end(pair, capsys, monkeypatch):
    gate = pair.gates["weightsync_commit"] = threading.Event()
    monkeypatch.setattr(diagnosis, "_LOADING_S", 0.2)
    with Sender([pair.url]) as sender:
        pushing = threading.Thread(target=sender.push, args=(WEIGHTS[1],))
        pushing.start()
        until(lambda: pair.front_end._machine.state == "applying", "it does not commit")
        time.sleep(0.3)
        there = engine_of(capsys, pair.url, SHORT)
        gate.set()
        pushing.join()
    level, text, _ = there.of("state")
    assert level == "wrong"
    assert text.startswith("a commit has been under way for ")
    assert "they are in weightsync_commit for" in there.of("ranks")[1]


def test_ranks_that_do_not_answer(pair, capsys):
    gate = pair.gates["weightsync_open"] = threading.Event()
    there = engine_of(capsys, pair.url, SHORT)
    gate.set()
    level, text, mend = there.of("ranks")
    assert level == "wrong"
    assert "weightsync_open" in text
    assert f"weightsync status {pair.url}" in mend
    assert there.of("state")[0] == "ok"


def test_a_frozen_server(engine, capsys):
    engine.process.send_signal(signal.SIGSTOP)
    try:
        (found,) = engine_of(capsys, engine.url, SHORT).wrong
    finally:
        engine.process.send_signal(signal.SIGCONT)
    assert found[0] == "engine"
    assert "it accepts connections, but" in found[1]
    assert "kill -CONT" in found[2]


@pytest.mark.parametrize("method", ["weightsync_open", diagnosis.METHOD])
def test_an_engine_that_refuses_pushes_says_why(pair, capsys, monkeypatch, method):
    """As engines with settings that are refused do, and engines whose weights sleep."""
    call, reason = pair.call, "--enable-eplb: experts change places while the engine serves"

    async def refusing(asked, payload):
        if asked in (method, diagnosis.METHOD):
            raise UnsupportedOption(reason)
        return await call(asked, payload)

    monkeypatch.setattr(pair.front_end._call, "_raw", refusing)
    level, text, _ = engine_of(capsys, pair.url).of("ranks")
    assert (level, text) == ("wrong", f"pushes are refused: {reason}")


def test_what_is_left_out_asleep_or_not_the_default_is_noted(pair, capsys):
    pair.off["draft model"] = "--speculative-config (eagle): a push leaves it as it is"
    pair.pause_refused["retract"] = "the stages of a pipeline cannot be stopped"
    pair.asleep = ("kv_cache",)
    there = engine_of(capsys, pair.url)
    assert there.wrong == []
    assert "the memory of kv_cache sleeps" in there.of("sleep")[1]
    assert there.of("draft model")[1] == pair.off["draft model"]
    assert there.of("pause")[2] == 'Sender(pause="wait")'


# --- versions


def test_another_major_version_of_the_protocol(model_folder, capsys):
    with ReferenceEngine(model_folder("llama", 0), launcher=launched("testing.http.PROTOCOL = (7, 1)")) as newer:
        ((check, text, mend),) = engine_of(capsys, newer.url).wrong
    assert (check, mend) == ("versions", "pip install weightsync of one version in both environments")
    assert "this engine 7.1" in text


def test_an_earlier_release_that_cannot_say_more(model_folder, capsys):
    code = "testing.http.PROTOCOL = (1, 1); testing.http.package_version = lambda: '0.0.9'"
    with ReferenceEngine(model_folder("llama", 0), launcher=launched(code)) as older:
        there = engine_of(capsys, older.url)
    assert there.wrong == []
    assert {check for check, _, _ in there.notes} == {"versions", "engine"}
    assert all(f"pip install weightsync=={http.package_version()}" in mend for _, _, mend in there.notes)


# --- the key


def test_a_wrong_key(engine, capsys, monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "another")
    level, text, mend = engine_of(capsys, engine.url).of("key")
    assert level == "wrong"
    assert "this side's is the one in WEIGHTSYNC_TOKEN" in text
    assert "set WEIGHTSYNC_TOKEN to the same value on both sides" in mend


def test_a_variable_that_hides_the_key_file(own_homes, made, capsys, monkeypatch):
    engine = made(Engine())
    assert engine_of(capsys, engine.url).wrong == []
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "another")
    level, text, mend = engine_of(capsys, engine.url).of("key")
    file = own_homes[0] / "token"
    assert (level, mend) == ("wrong", f'export WEIGHTSYNC_TOKEN="$(cat {file})"')
    assert text == f"the engine requires the key in {file}, but this side's is the one in WEIGHTSYNC_TOKEN"


def test_a_key_file_that_others_can_read(own_homes, made, capsys):
    engine = made(Engine())
    (own_homes[0] / "token").chmod(0o644)
    here, there = examined(capsys, engine.url)
    assert "is not private to this user (mode 0600); remove it" in here.of("key")[1]
    assert there.of("key")[0] == "wrong"


# --- URLs


def test_a_router(made, router, capsys):
    one, two = made(Engine()), made(Engine())
    (found,) = engine_of(capsys, router(itertools.cycle([one.url, two.url]))).wrong
    assert "answers for several engines, as a router does" in found[1]
    assert found[2] == "give each engine once, by its own http://HOST:PORT"


def test_one_engine_under_two_urls(pair, capsys):
    again = pair.url.replace("127.0.0.1", "localhost")
    _, first, second = examined(capsys, pair.url, again)
    assert first.wrong == []
    ((_, text, _),) = second.wrong
    assert f"{pair.url} and {again} are one and the same engine" in text


# --- memory and addresses


@pytest.mark.parametrize(("free", "level"), [(1 << 20, "ok"), (2000, "wrong")])
def test_an_arena_that_does_not_fit(pair, capsys, monkeypatch, free, level):
    monkeypatch.setattr(arenas, "free_shared_bytes", lambda: free)
    monkeypatch.setattr(arenas, "held_bytes", lambda: 0)
    found = engine_of(capsys, pair.url).of("memory")
    assert found[0] == level
    assert ("--shm-size" in found[2]) is (level == "wrong")


def test_a_rank_without_memory_for_a_stage(pair, capsys, monkeypatch):
    for rank in pair.ranks:
        rank._adapter.weights["a"] = torch.zeros(20 << 20)
    monkeypatch.setattr(arenas, "free_shared_bytes", lambda: 40 << 20)
    monkeypatch.setattr(arenas, "held_bytes", lambda: 0)
    monkeypatch.setattr(arenas, "free_bytes", lambda device: 100 << 20)
    level, text, mend = engine_of(capsys, pair.url).of("memory")
    assert (level, mend) == ("note", 'Sender(staging="auto"), or free memory')
    assert f"a rank has {50 << 20} free" in text


def test_an_address_that_is_not_of_this_host(far, capsys):
    there = engine_of(capsys, far.url, ("--address", "203.0.113.7"))
    ((check, text, mend),) = there.wrong
    assert check == "address"
    assert "is not an address of this host" in text
    assert "Sender(..., address=" in mend


def rank_said(asked):
    """What a rank answers, asked as often as a front end would."""
    adapter = DictAdapter()
    adapter.rank = 3
    rank = diagnosis.RankDiagnosis(adapter)
    until(lambda: rank.answer(asked) is not None, "it does not answer")
    return rank.answer(asked)


def test_a_trainer_that_a_rank_cannot_reach():
    port = free_port()
    report = rank_said(DiagnoseRequest(5.0, f"tcp://127.0.0.1:{port}", "k" * 40))
    (found,) = [finding for finding in report.findings if finding.check == "address"]
    assert found.level == "wrong"
    assert f"rank 3 cannot reach the trainer's control socket at 127.0.0.1 port {port}" in found.text
    assert report.listens == ""


@pytest.mark.parametrize("key", ["", "k" * 39])
def test_a_rank_dials_nothing_that_is_not_a_senders(traps, key):
    for address in (text for text in traps.texts if "weightsync-dead/control" not in text):
        report = rank_said(DiagnoseRequest(5.0, address, key))
        (found,) = [finding for finding in report.findings if finding.check == "address"]
        assert found.level == "wrong"
        assert "refused to dial" in found.text


@pytest.mark.parametrize("key", ["", "Bearer wrong"])
def test_nothing_is_dialled_without_the_key(engine, traps, key):
    for address in traps.texts:
        body = {"address": address, "server_key": "k" * 40}
        reply = requests.post(
            f"{engine.url}/weightsync/diagnose", json=body, headers={"Authorization": key}, timeout=10
        )
        assert reply.status_code == 401
