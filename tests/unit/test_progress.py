"""What a user sees of a push: the bar of ``progress=True``, and the phase and the remedy in the text of an error."""

import re
import sys

import pytest
import torch

from tests.unit import two_ranks
from tests.unit.test_guarantees import flip_in
from tests.unit.two_ranks import WEIGHTS
from tools import servers
from weightsync import Sender, errors
from weightsync.errors import (
    ApplyFailed,
    DigestMismatch,
    EngineUnreachable,
    LeaseHeld,
    ManifestMismatch,
    PushTimeout,
    SourceError,
    UnsupportedOption,
    WeightSyncError,
    WrongState,
)
from weightsync.testing import ReferenceEngine


def shown(capsys):
    """The bars that were drawn: for each its name, what it said after the numbers, and the last share of the bytes."""
    bars = {}
    for line in re.split(r"[\r\n]+", capsys.readouterr().err):
        if found := re.match(r"(?P<name>.*?): +(?:(?P<share>\d+)%\|)?[^[]*\[(?P<rest>.*?)\] *$", line):
            name = found["name"]
            said, _ = bars.setdefault(name, ([], 0))
            text = found["rest"].partition("B/s")[2].strip(", ")
            if not said or said[-1] != text:
                said.append(text)
            bars[name] = said, int(found["share"] or 0)
    return bars


def test_a_bar_shows_phases_engines_and_bytes(engine, trained, capsys):
    with Sender([engine.url], progress=True, bucket_bytes=100_000) as sender:
        sender.push(trained, version="a")
        sender.push(trained, version="b")
    bars = shown(capsys)
    assert list(bars) == ["push a", "push b"]
    waits = f"waits for {engine.url}"
    for (said, share), prepare in zip(bars.values(), ("prepare (loaders may be recorded)", "prepare"), strict=True):
        assert share == 100
        phases = ["read", f"{prepare}, {waits}", prepare, "transfer", f"commit, {waits}", "commit"]
        assert [text for text in said if text] == phases


class Unread:
    """Standard error as a pipe that nobody reads any more."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError


@pytest.mark.parametrize("wrong", [False, True])
def test_a_terminal_that_is_gone_fails_no_push(engine, trained, monkeypatch, wrong):
    monkeypatch.setattr(sys, "stderr", Unread())
    with Sender([engine.url], progress=True, timeout_s=20, bucket_bytes=100_000) as sender:
        for label in ("one", "two"):
            assert sender.push(trained, version=label).version == label
        if wrong:
            with pytest.raises(ManifestMismatch):
                sender.push({"a": torch.ones(2)})
        assert sender.push(trained, version="three").version == "three"


def test_nothing_is_drawn_unless_asked_for(engine, trained, capsys):
    with Sender([engine.url]) as sender:
        sender.push(trained)
    assert shown(capsys) == {}


def test_engines_that_join_or_are_caught_up_and_rollbacks_have_bars(engine, model_folder, trained, capsys):
    with (
        ReferenceEngine(model_folder("llama", 0)) as other,
        Sender([engine.url], progress=True, keep_previous=True) as sender,
    ):
        sender.push(trained, version="one")
        sender.push(trained, version="two")
        sender.add_engine(other.url)
        sender.remove_engine(other.url)
        sender.rollback()
    bars = shown(capsys)
    assert list(bars) == ["push one", "push two", f"catch_up {other.url} two", "rollback one"]
    assert bars[f"catch_up {other.url} two"][1] == 100
    assert f"commit, waits for {other.url}" in bars[f"catch_up {other.url} two"][0]
    assert bars["rollback one"][0][-1] == "commit"


def test_the_bar_of_a_failed_push_ends_in_the_phase_in_which_it_failed(engine, capsys):
    with Sender([engine.url], progress=True) as sender, pytest.raises(ManifestMismatch) as raised:
        sender.push({"a": torch.ones(2)}, version="bad")
    assert raised.value.phase == "prepare"
    assert shown(capsys)["push bad"][0][-1].startswith("prepare")


def test_an_error_names_its_phase_and_what_mends_it(engine, trained, made):
    with Sender([engine.url]) as sender:
        with pytest.raises(ManifestMismatch) as raised:
            sender.push({"a": torch.ones(2)})
        assert str(raised.value).endswith(f"[prepare; try: {ManifestMismatch.mend}]")
        assert raised.value.message in str(raised.value)
        with pytest.raises(WrongState, match=rf"\[prepare; try: weightsync status {engine.url}\]$"):
            sender.push(trained, expected="another")
        with pytest.raises(SourceError, match=r"\[push\]$"):
            sender.push(7)
        with pytest.raises(UnsupportedOption, match=r"\[push\]$"):
            sender.push(trained, version="")
        with pytest.raises(WeightSyncError, match=r"keep_previous=True and push twice \[rollback\]$"):
            sender.rollback()
        with pytest.raises(SourceError, match=r"\[transfer\]$"):
            sender.push(Vanishing(trained.state_dict()))
        with Sender([engine.url], timeout_s=5) as other:
            sender.push(trained)
            with pytest.raises(
                LeaseHeld, match=rf"\[prepare; try: weightsync abort {engine.url}, if that trainer hangs"
            ):
                other.push(trained)
    with pytest.raises(EngineUnreachable, match=r"\[build a Sender; try: weightsync doctor http://127.0.0.1:\d+\]$"):
        Sender([f"http://127.0.0.1:{servers.free_port()}"])


def test_a_damaged_tensor_and_a_failed_commit_name_their_phase(engine, trained, made, monkeypatch):
    with Sender([engine.url]) as sender, monkeypatch.context() as patch:
        flip_in(patch, 0)
        with pytest.raises(DigestMismatch, match=r"\[transfer; try: push again; weightsync doctor http"):
            sender.push(trained)
    small = made(two_ranks.Engine())
    small.ranks[1]._adapter.during = out_of_luck
    remedy = rf"\[commit; try: weightsync status {small.url}; push again\]$"
    with Sender([small.url]) as sender, pytest.raises(ApplyFailed, match=remedy):
        sender.push(WEIGHTS[1])


def out_of_luck():
    raise RuntimeError("out of luck")


class Vanishing(dict):
    """Weights of which the third can no longer be read when it is sent."""

    reads = 0

    def __getitem__(self, name):
        self.reads += 1
        if self.reads == 3:
            raise OSError("the disk is gone")
        return super().__getitem__(name)


def test_every_error_has_a_remedy_or_its_message_does():
    """Messages of the two classes without one name the option, or what can be sent, see their docstrings."""
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, WeightSyncError)]
    assert {one for one in found if not one.mend} == {UnsupportedOption, SourceError}


def test_the_text_of_an_error_of_two_engines_has_the_phase_once():
    failed = {url: PushTimeout(f"{url} is slow") for url in ("http://a:1", "http://b:2")}
    for error in failed.values():
        error.phase = "commit"
    both = errors.joined(failed, {})
    assert str(both) == (
        "http://a:1 is slow; http://b:2 is slow [commit; try: weightsync doctor http://a:1; Sender(..., timeout_s=...)]"
    )
