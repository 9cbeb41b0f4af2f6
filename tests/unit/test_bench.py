"""`weightsync bench`: what it measures, and that engines serve afterwards what they served before."""

import json
import re

import pytest

from tests.unit import two_ranks
from tools import models, servers
from weightsync import Sender, bench
from weightsync.cli import main
from weightsync.errors import (
    EngineUnreachable,
    LeaseHeld,
    ManifestMismatch,
    UnsupportedOption,
    WeightSyncError,
    WrongState,
)
from weightsync.sources.checkpoint import local_folder
from weightsync.tensors.layout import digest_of
from weightsync.testing import ReferenceEngine
from weightsync.trainer.engines import Engines


@pytest.fixture
def started(model_folder):
    """A reference engine that serves the checkpoint that it was started with."""
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        yield engine


def served(url):
    """The version, the push that brought it, and the digest of an engine that nobody holds."""
    with Sender([url]) as sender:
        status = sender.status(digest=True)[url]
    assert (status.state, status.holder) == ("serving", "")
    return status.version, status.committed, status.ranks[0].digest


def nbytes_of(model):
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def test_a_rehearsal_changes_nothing_not_even_what_was_pushed(started, trained, capsys):
    before = served(started.url)
    assert main(["bench", "--json", started.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert served(started.url) == before
    assert (found["nbytes"], found["tensors"]) == (nbytes_of(trained), len(trained.state_dict()))
    assert [found[key] for key in ("committed", "disk_s", "link", "link_s")] == [False, None, None, None]
    assert list(found["engines"]) == [started.url]
    assert "ipc_zmq" in found["engines"][started.url]
    for push in found["pushes"]:
        assert 0 < push["transfer"] < push["total"]
        assert "commit" not in push
    with Sender([started.url]) as sender:
        sender.push(trained, version="pushed")
    pushed = served(started.url)
    assert bench.measure([started.url], commit=False).usual["transfer"] > 0
    assert served(started.url) == pushed
    with pytest.raises(WrongState, match="serves version 'pushed', which was pushed: --commit would replace it"):
        bench.measure([started.url], commit=True)
    assert served(started.url) == pushed


def test_a_commit_is_of_the_engines_own_checkpoint_under_its_label(started, model_folder, capsys):
    version, push, digest = served(started.url)
    assert push == ""
    for _ in range(2):
        assert main(["bench", "--commit", started.url]) == 0
        now = served(started.url)
        assert now[::2] == (version, digest)
        assert now[1].startswith("bench-")
    assert digest == digest_of(models.load_reference(model_folder("llama", 0)).state_dict().items())
    said = capsys.readouterr().out
    for row in ("prepare", "  record", "transfer", "  gather", "  digest", "  verify", "commit", "  pause", "total"):
        assert re.search(rf"^{row} +\d+\.\d{{4}} +\d+\.\d{{4}}$", said, re.MULTILINE), row
    assert re.search(r"^memcpy of the same bytes takes \d+\.\d{4} s, \d+% of transfer$", said, re.MULTILINE)
    assert re.search(r"^reading them from disk takes \d+\.\d{4} s, \d+% of transfer$", said, re.MULTILINE)


def test_engines_of_another_checkpoint_are_not_given_the_first_ones(started, model_folder):
    with ReferenceEngine(model_folder("llama", 1)) as other:
        before = [served(engine.url) for engine in (started, other)]
        with pytest.raises(UnsupportedOption, match="different checkpoints"):
            bench.measure([started.url, other.url], commit=True)
        assert set(bench.measure([started.url, other.url], commit=False).engines) == {started.url, other.url}
        assert [served(engine.url) for engine in (started, other)] == before


def test_weights_that_are_not_the_checkpoint_are_replaced_once_and_said(started, model_folder, monkeypatch):
    monkeypatch.setattr(bench, "local_folder", lambda model: model_folder("llama", 1))
    with pytest.raises(WeightSyncError, match=r"other weights before .* as version 'default'; start it") as raised:
        bench.measure([started.url], commit=True)
    assert raised.value.engines == {started.url: "committed"}


def test_engines_that_serve_nothing_or_keep_a_version_are_refused(started, model_folder, trained):
    with ReferenceEngine(model_folder("llama", 0), args=["--wait-for-initial-weights"]) as waiting:
        with pytest.raises(WrongState, match="serves nothing"):
            bench.measure([waiting.url], commit=False)
        assert Sender([waiting.url]).status()[waiting.url].state == "unsynced"
    with Sender([started.url], keep_previous=True, transport="nixl") as sender:
        for label in ("one", "two"):
            sender.push(trained, version=label)
        assert main(["abort", started.url]) == 0  # the lease ends, as after a long silence
        with pytest.raises(WrongState, match="keeps a version to go back to"):
            bench.measure([started.url], commit=False)
        assert sender.status()[started.url].ranks[0].previous == "one"


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
def test_every_rehearsal_uses_the_same_connections(started, monkeypatch, transport):
    asked = []
    join = Engines.join
    monkeypatch.setattr(Engines, "join", lambda self, *more: asked.append(more) or join(self, *more))
    assert len(bench.measure([started.url], commit=False, transport=transport).pushes) == 4
    assert len(asked) == 1


def test_a_checkpoint_that_is_not_on_this_host_is_named(started, monkeypatch, model_folder):
    absent = str(model_folder("llama", 0) / "absent")
    monkeypatch.setattr(bench, "local_folder", lambda _: local_folder(absent))
    with pytest.raises(UnsupportedOption, match=r"nor in the hub's cache \(\w+\) on this host: hf download"):
        bench.measure([started.url], commit=True)


def test_a_trainer_that_holds_the_lease_is_not_disturbed(started, trained, capsys):
    with Sender([started.url]) as sender:
        sender.push(trained, version="mine")
        with pytest.raises(LeaseHeld, match=r"another trainer pushes here.*\[prepare; try: weightsync abort http"):
            bench.measure([started.url], commit=False)
        assert main(["bench", started.url]) == 1
        assert "another trainer pushes here" in capsys.readouterr().err
        sender.push(trained, version="mine again")
    assert served(started.url)[0] == "mine again"


def nobody_knows():
    raise ManifestMismatch("no checkpoint")


def test_an_engine_that_does_not_say_what_a_push_is_and_a_url_without_one(made):
    engine = made(two_ranks.Engine())
    for rank in engine.ranks:
        rank._adapter.expected = nobody_knows
    with pytest.raises(UnsupportedOption, match=r"does not say what a complete push is: .*no checkpoint"):
        bench.measure([engine.url], commit=False)
    with pytest.raises(EngineUnreachable, match=r"\[bench; try: weightsync doctor"):
        bench.measure([f"http://127.0.0.1:{servers.free_port()}"], commit=False)


@pytest.mark.parametrize(
    ("most", "said"),
    [
        ({"record": 3.0, "prepare": 3.1}, "comparing load plans"),
        ({"prepare": 3.0}, "asking the engines"),
        ({"gather": 3.0, "transfer": 3.1}, "copying the tensors"),
        ({"digest": 3.0, "transfer": 3.1}, "hashing on the trainer"),
        ({"verify": 3.0, "transfer": 3.1}, "hashing at the slowest rank"),
        ({"transfer": 3.0}, "moving the bytes over the network"),
        ({"commit": 3.0}, "loading in the engines"),
    ],
)
def test_what_takes_most_is_named(most, said):
    push = {"record": 0.0, "prepare": 0.1, "transfer": 0.1, "gather": 0.0, "digest": 0.0, "verify": 0.0, **most}
    first = dict.fromkeys(push, 9.0)
    link = bench.Link("eth0 (10.0.0.1)", 1e10)
    report = bench.Report({}, 1 << 30, 1, False, [first, push, push], 0.1, None, link, 0.86)
    assert report.limit.startswith(said)
    assert "sending them over eth0 (10.0.0.1) takes at least 0.8600 s" in "\n".join(report.lines())
