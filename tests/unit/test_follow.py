"""``weightsync follow``: engines serve the newest good version of a folder, whatever else is in it."""

import json
import shutil
import signal
import subprocess
import sys
import threading

import pytest
import torch

from tests.helpers import served_digest
from weightsync import Sender
from weightsync.cli import main
from weightsync.files import Folder
from weightsync.files.follow import Follower
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine, ReferenceInProcess, free_port


@pytest.fixture
def versions(trained):
    """A function that returns the weights of a version: each differs from the one before in some elements."""

    def make(number):
        state = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
        for tensor in state.values():
            tensor.view(-1)[number :: 50 + number] *= 1.5
        return state

    return make


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run", full_every=4)


@pytest.fixture
def where(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def events():
    """What a follower says, as fields."""
    return []


@pytest.fixture
def follower(made, where, engine, events):
    return made(Follower(str(where), [engine.url], lambda text, fields: events.append(fields), timeout_s=60.0))


def serves(engine, state, version):
    with Sender([engine.url]) as sender:
        (rank,) = sender.status(digest=True)[engine.url].ranks
        return (rank.digest, sender.status()[engine.url].version) == (digest_of(state.items()), version)


def digest_in(engine):
    """The digest of what an engine of this process serves."""
    with Sender([engine]) as sender:
        (status,) = sender.status(digest=True).values()
    return status.ranks[0].digest


def data_of(where, number):
    return next(where.glob(f"{number:012d}-*.data"))


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


# ---- what is pushed --------------------------------------------------------------------------------------------------


def test_versions_are_pushed_as_they_appear(folder, follower, engine, versions, events):
    assert not follower.step()
    assert "holds no version" in events.pop()["message"]
    for number in range(1, 7):
        folder.write(versions(number), version=f"v{number}")
        assert follower.step()
        assert (events[-1]["event"], events[-1]["version"]) == ("pushed", f"v{number}")
        assert serves(engine, versions(number), f"v{number}")
        assert follower.step()
    assert len(events) == 6


def test_one_that_starts_late_or_was_away_gets_the_newest(folder, follower, engine, versions, events):
    for number in (1, 2, 3):
        folder.write(versions(number))
    assert follower.step()
    assert serves(engine, versions(3), "3")
    for number in (4, 5, 6, 7, 8, 9, 10):  # the folder no longer has what comes after 3
        folder.write(versions(number))
    assert follower.step()
    assert serves(engine, versions(10), "10")
    assert [event["version"] for event in events] == ["3", "10"]


def test_an_engine_that_restarts_is_brought_back(folder, where, model_folder, versions, events, made):
    port = free_port()
    first = made(ReferenceEngine(model_folder("llama", 0), port=port).__enter__())
    follower = made(Follower(str(where), [first.url], lambda text, fields: events.append(fields), timeout_s=60.0))
    folder.write(versions(1))
    folder.write(versions(2))
    assert follower.step()
    first.close()
    assert not follower.step()
    assert not follower.step()
    assert [event["event"] for event in events] == ["pushed", "failed"]
    assert events[-1]["error"] == "EngineUnreachable"
    again = made(ReferenceEngine(model_folder("llama", 0), port=port).__enter__())
    assert follower.step()
    assert serves(again, versions(2), "2")
    folder.write(versions(3))
    assert follower.step()
    assert serves(again, versions(3), "3")


def test_an_engine_may_start_after_the_follower(folder, where, model_folder, versions, events, made):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    follower = made(Follower(str(where), [url], lambda text, fields: events.append(fields), timeout_s=60.0))
    folder.write(versions(1))
    assert not follower.step()
    assert events[-1]["error"] == "EngineUnreachable"
    engine = made(ReferenceEngine(model_folder("llama", 0), port=port).__enter__())
    assert follower.step()
    assert serves(engine, versions(1), "1")


def test_a_push_is_for_all_engines(folder, where, engine, model_folder, versions, events, made):
    port = free_port()
    other = made(ReferenceEngine(model_folder("llama", 0), port=port).__enter__())
    follower = made(Follower(str(where), [engine.url, other.url], lambda text, fields: events.append(fields)))
    folder.write(versions(1))
    assert follower.step()
    other.close()
    folder.write(versions(2))
    assert not follower.step()
    assert serves(engine, versions(1), "1")
    again = made(ReferenceEngine(model_folder("llama", 0), port=port).__enter__())
    assert follower.step()
    assert serves(engine, versions(2), "2")
    assert serves(again, versions(2), "2")


def test_a_store_is_followed_as_a_folder_is(engine, versions, capsys):
    folder = Folder("memory://followed")
    folder.write(versions(1))
    folder.write(versions(2))
    assert main(["follow", "memory://followed", engine.url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == "2"
    assert serves(engine, versions(2), "2")


# ---- what is refused -------------------------------------------------------------------------------------------------


def _unsigned(where, number):
    path = where / f"{number:012d}.json"
    signed = json.loads(path.read_text())
    path.write_text(json.dumps({**signed, "hmac": "0" * 64}))


BAD = {
    "a damaged file": (lambda where: damage(data_of(where, 3)), "SHA-256", "TransferFailed"),
    "a truncated file": (lambda where: data_of(where, 3).write_bytes(b""), "ends after 0 of", "TransferFailed"),
    "a damaged manifest": (lambda where: damage(where / "000000000003.json"), "000000000003.json", None),
    "a truncated manifest": (lambda where: (where / "000000000003.json").write_text("{"), "damaged", "TransferFailed"),
    "an unsigned manifest": (lambda where: _unsigned(where, 3), "not signed with this key", "AuthenticationFailed"),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_bad_is_refused_by_name_and_the_next_good_version_is_pushed(
    folder, where, follower, engine, versions, events, bad
):
    spoil, said, kind = BAD[bad]
    folder.write(versions(1))
    folder.write(versions(2))
    assert follower.step()
    folder.write(versions(3))
    spoil(where)
    for _ in range(2):  # it is told once
        assert not follower.step()
        assert serves(engine, versions(2), "2")
    (refused,) = events[1:]
    assert (refused["event"], refused["number"]) == ("refused", 3)
    assert said in refused["message"]
    assert kind in (None, refused["error"])
    folder.write(versions(4))
    assert not follower.step()
    assert "000000000004.json needs version 3" in events[-1]["message"]
    assert serves(engine, versions(2), "2")
    folder.write(versions(5))
    assert follower.step()
    assert (events[-1]["event"], events[-1]["version"]) == ("pushed", "5")
    assert serves(engine, versions(5), "5")
    assert len(events) == 4


def test_a_delta_whose_base_is_missing_is_refused_by_name(folder, where, follower, engine, versions, events):
    before = served_digest(engine)
    folder.write(versions(1))
    folder.write(versions(2))
    (where / "000000000001.json").unlink()
    assert not follower.step()
    assert events[-1]["message"] == f"000000000002.json needs version 1: it is not in {where}"
    assert served_digest(engine) == before


def test_versions_of_another_key_are_refused(where, follower, engine, versions, events):
    before = served_digest(engine)
    Folder(where, token="another key").write(versions(1))
    assert not follower.step()
    assert events[-1]["error"] == "AuthenticationFailed"
    assert served_digest(engine) == before
    assert Folder(where).write(versions(2)).number == 2
    assert follower.step()


def test_a_delta_to_another_version_of_the_same_number_is_refused(where, folder, follower, versions, events):
    """As two writers would leave it."""
    folder.write(versions(1))
    other = Folder(where.parent / "other")
    other.write(versions(7))
    other.write(versions(8))
    for path in (where.parent / "other").glob("000000000002*"):
        shutil.copy(path, where)
    assert not follower.step()
    assert "000000000002.json needs version 1: the one that is there is another" in events[0]["message"]
    assert events[1]["version"] == "1"


def test_a_damaged_full_version_leaves_engines_on_the_one_before(folder, where, follower, engine, versions, events):
    for number in (1, 2, 3, 4):
        folder.write(versions(number))
    assert follower.step()
    folder.write(versions(5))
    damage(data_of(where, 5))
    assert not follower.step()
    assert serves(engine, versions(4), "4")
    # The copy was overwritten; it is made again of the versions before.
    assert not follower.step()
    assert events[-1]["number"] == 5
    for number in (6, 7, 8, 9):
        folder.write(versions(number))
        follower.step()
    assert serves(engine, versions(9), "9")


def test_what_was_replaced_by_older_versions_is_not_pushed(folder, where, follower, engine, versions, events):
    folder.write(versions(1))
    old = where.parent / "old"
    shutil.copytree(where, old)
    folder.write(versions(2))
    assert follower.step()
    shutil.rmtree(where)
    old.rename(where)
    assert not follower.step()
    assert "holds version 1 at most, and version 2 was pushed already" in events[-1]["message"]
    assert serves(engine, versions(2), "2")


def test_a_version_that_does_not_fit_the_engine_is_told_and_the_next_is_pushed(
    folder, follower, engine, versions, events
):
    before = served_digest(engine)
    folder.write({"another": torch.ones(3)})
    assert not follower.step()
    assert events[-1]["error"] == "ManifestMismatch"
    assert served_digest(engine) == before
    Folder(folder._where).write(versions(2))
    assert follower.step()
    assert serves(engine, versions(2), "2")


# ---- at the same time ------------------------------------------------------------------------------------------------


def test_a_reader_beside_a_writer_and_its_garbage_collection(where, model_folder, versions, made):
    """A new full version every second time: files go while they are read. Every push is of one version."""
    engine = made(ReferenceInProcess(model_folder("llama", 0)))
    pushed, refused = [], []

    def say(text, fields):
        (pushed if fields["event"] == "pushed" else refused).append(fields)

    follower = made(Follower(str(where), [engine], say, timeout_s=60.0))
    folder = Folder(where, full_every=2)
    states = [versions(number) for number in range(40)]

    def write():
        for number, state in enumerate(states, 1):
            folder.write(state, version=f"v{number}")

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive() or not follower.step():
        follower.step()
    writer.join()
    labels = [int(event["version"][1:]) for event in pushed]
    assert labels == sorted(set(labels))
    assert labels[-1] == 40
    assert {one["event"] for one in refused} <= {"failed"}
    assert all("No such file" in one["message"] or "holds no version" in one["message"] for one in refused)
    assert digest_in(engine) == digest_of(states[-1].items())


WRITER = """
import sys
from safetensors.torch import load_file
from weightsync.files import Folder

folder, state = Folder(sys.argv[1], full_every=3), load_file(sys.argv[2])
while True:
    for tensor in state.values():
        tensor.view(-1)[::50] *= 1.01
    folder.write(state)
"""


def test_a_writer_may_be_killed_at_any_moment(where, model_folder, versions, made):
    """What it left unfinished is no version; a follower and the next writer go on."""
    engine = made(ReferenceInProcess(model_folder("llama", 0)))
    events = []
    follower = made(Follower(str(where), [engine], lambda text, fields: events.append(fields), timeout_s=60.0))
    command = [sys.executable, "-c", WRITER, str(where), str(model_folder("llama", 1) / "model.safetensors")]
    with subprocess.Popen(command) as writer:
        while sum(event["event"] == "pushed" for event in events) < 5:
            assert writer.poll() is None
            follower.step()
        writer.kill()
    assert follower.step()
    newest = max(event["number"] for event in events if event["event"] == "pushed")
    assert f"{newest:012d}.json" == max(path.name for path in where.glob("*.json"))
    assert Folder(where).write(versions(1)).number == newest + 1
    assert follower.step()
    assert digest_in(engine) == digest_of(versions(1).items())
    assert not [event for event in events if event["event"] == "refused"]


def test_the_command_follows_until_it_is_interrupted(folder, where, engine, versions):
    run = "import sys; from weightsync.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "follow", str(where), engine.url, "--json", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        try:
            lines = filter(str.strip, iter(following.stdout.readline, ""))
            for number in (1, 2, 3):
                folder.write(versions(number))
                assert any(json.loads(line).get("version") == str(number) for line in lines)
                assert serves(engine, versions(number), str(number))
        finally:
            following.send_signal(signal.SIGINT)
        following.stdout.read()
        assert following.wait(30) == 0


def test_a_follower_that_is_killed_is_replaced(folder, where, engine, versions, capsys):
    run = "import sys; from weightsync.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "follow", str(where), engine.url, "--json", "--every", "0.1"]
    folder.write(versions(1))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert json.loads(following.stdout.readline())["event"] == "pushed"
        following.kill()
    folder.write(versions(2))
    assert main(["follow", str(where), engine.url, "--once"]) == 0
    assert "version 2 (000000000002.json): pushed" in capsys.readouterr().out
    assert serves(engine, versions(2), "2")


def test_once_says_whether_the_newest_version_is_served(folder, where, engine, versions, capsys):
    assert main(["follow", str(where), engine.url, "--once"]) == 1
    assert "holds no version" in capsys.readouterr().err
    folder.write(versions(1))
    folder.write(versions(2))
    damage(data_of(where, 2))
    assert main(["follow", str(where), engine.url, "--once"]) == 1
    said = capsys.readouterr()
    assert "refused: 000000000002-" in said.err
    assert "version 1 (000000000001.json): pushed" in said.out
    assert serves(engine, versions(1), "1")
    assert main(["follow", str(where), "nowhere", "--once", "--json"]) == 1
    assert [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()] == ["refused", "failed"]


def test_a_key_is_needed(own_homes, where, capsys):
    assert main(["follow", str(where), "http://127.0.0.1:9", "--once"]) == 1
    assert "versions are signed, and the key is missing" in capsys.readouterr().err
