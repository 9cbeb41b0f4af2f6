"""An adapter goes back to the version that was pushed before: when it is asked to, and when a push fails."""

import sys

import pytest

from tests.lora.adapters import make_adapters
from weightsync import Sender, errors
from weightsync.cli import main
from weightsync.testing import ReferenceEngine

PROMPT, TOKENS = list(b"Once upon a time"), 6


@pytest.fixture
def base(model_folder):
    return model_folder("llama", 0)


@pytest.fixture
def folders(base, tmp_path):
    return make_adapters(tmp_path, base, "abc")


def answer(engine, name="policy"):
    return engine.generate(PROMPT, TOKENS, name)


def adapters(sender):
    (status,) = sender.status().values()
    return status.adapters, status.ranks[0].adapters


def test_a_rollback_serves_the_adapter_before_and_a_second_the_newer_one(base, folders, capsys):
    with ReferenceEngine(base) as engine, Sender([engine.url], keep_previous=False) as sender:
        sender.push(folders["c"], lora="other", version="o")
        with pytest.raises(errors.TransferFailed, match=r"no version to go back to .*push 'other' twice"):
            sender.rollback(lora="other")
        said = {}
        for name in "abc":
            sender.push(folders[name], lora="policy", version=name)
            said[name] = answer(engine)
        assert adapters(sender) == ({"other": "o", "policy": "c"}, {"policy": "b"})
        assert main(["status", engine.url]) == 0
        assert "can go back to adapter policy 'b'" in capsys.readouterr().out
        for name in "bcb":
            result = sender.rollback(lora="policy")
            assert (result.version, result.lora, result.nbytes) == (name, "policy", 0)
            assert answer(engine) == said[name]
        assert adapters(sender) == ({"other": "o", "policy": "b"}, {"policy": "c"})
        assert answer(engine, "other") == said["c"]
        sender.push(folders["a"], lora="policy", version="a", expected="b")
        assert sender.rollback(lora="policy").version == "b"
        sender.push(base, version="base")
        assert sender.rollback(lora="policy").version == "a"
        assert answer(engine) == said["a"]


def test_rollbacks_of_weights_and_adapters_leave_each_other_alone(base, folders, model_folder):
    with ReferenceEngine(base) as engine, Sender([engine.url], keep_previous=True) as sender:
        sender.push(base, version="one")
        sender.push(folders["a"], lora="policy", version="a")
        sender.push(model_folder("llama", 1), version="two")
        sender.push(folders["b"], lora="policy", version="b")
        two = answer(engine, "")
        assert sender.rollback(lora="policy").version == "a"
        assert answer(engine, "") == two
        assert sender.rollback().version == "one"
        assert answer(engine, "") != two
        (status,) = sender.status().values()
        assert (status.version, status.adapters) == ("one", {"policy": "a"})


def test_every_engine_must_keep_it(base, folders):
    with ReferenceEngine(base) as first, ReferenceEngine(base) as late, Sender([first.url]) as sender:
        for name in "ab":
            sender.push(folders[name], lora="policy", version=name)
        sender.add_engine(late.url)
        with pytest.raises(errors.TransferFailed, match="that every engine keeps"):
            sender.rollback(lora="policy")
        sender.push(folders["c"], lora="policy", version="c")
        assert sender.rollback(lora="policy").version == "b"
        assert answer(first) == answer(late)


def test_an_engine_that_comes_after_a_rollback_is_said_to_lack_it(base, folders):
    """The arena holds the newer version."""
    with ReferenceEngine(base) as first, ReferenceEngine(base) as late, Sender([first.url]) as sender:
        for name in "ab":
            sender.push(folders[name], lora="policy", version=name)
        sender.rollback(lora="policy")
        assert sender.add_engine(late.url) is None
        assert "'policy' version 'a'" in sender.push(base).engines[late.url].noticed[-1]


FAILS = """
from weightsync import testing, testing_lora
step, calls = testing_lora.ModelLora.{step}, []
def failing(self, *given):
    calls.append(given)
    done = step(self, *given)
    if len(calls) in {fails}:
        raise RuntimeError("injected")
    return done
testing_lora.ModelLora.{step} = failing
testing.main()
"""


@pytest.mark.parametrize(("fails", "weights"), [((3,), "unchanged"), ((3, 4, 5), "dirty")], ids=str)
def test_a_rollback_that_fails_leaves_what_was_served_or_nothing(base, folders, fails, weights):
    launcher = (sys.executable, "-c", FAILS.format(step="serve", fails=fails))
    with ReferenceEngine(base, launcher=launcher) as engine, Sender([engine.url]) as sender:
        for name in "ab":
            sender.push(folders[name], lora="policy", version=name)
        before = answer(engine)
        with pytest.raises(errors.ApplyFailed) as failed:
            sender.rollback(lora="policy")
        assert failed.value.weights == weights
        if weights == "dirty":
            sender.push(base)
            assert not adapters(sender)[0]
            sender.push(folders["c"], lora="policy")
            return
        assert answer(engine) == before
        assert adapters(sender) == ({"policy": "b"}, {"policy": "a"})
        assert sender.rollback(lora="policy").version == "a"


@pytest.mark.parametrize(("step", "other"), [("make", "unchanged"), ("serve", "committed")])
def test_an_engine_that_fails_serves_the_adapter_before_and_the_error_says_what_the_other_does(
    base, folders, step, other
):
    """What fails before every engine has made its adapter changes none; after that, each answers for itself."""
    launcher = (sys.executable, "-c", FAILS.format(step=step, fails=(2,)))
    with ReferenceEngine(base) as first, ReferenceEngine(base, launcher=launcher) as second:
        urls = [first.url, second.url]
        with Sender(urls) as sender:
            sender.push(folders["a"], lora="policy", version="a")
            before = answer(first)
            with pytest.raises(errors.WeightSyncError, match="injected") as failed:
                sender.push(folders["b"], lora="policy", version="b")
            assert failed.value.engines == dict(zip(urls, (other, "unchanged"), strict=True))
            versions = [sender.status()[url].adapters["policy"] for url in urls]
            assert versions == ["a" if other == "unchanged" else "b", "a"]
            assert [answer(engine) == before for engine in (first, second)] == [other == "unchanged", True]
            sender.push(folders["b"], lora="policy", version="b")
            assert answer(first) == answer(second) != before
