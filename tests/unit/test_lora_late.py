"""Engines that come late, or restart, get the adapters that the sender pushed last; or the result says which not."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.lora.adapters import ALPHA, RANK, make_adapters
from weightsync import Sender
from weightsync.cli import main
from weightsync.testing import ModelAdapter, ReferenceEngine

PROMPT, TOKENS = list(b"Once upon a time"), 6


@pytest.fixture
def base(model_folder):
    return model_folder("llama", 0)


@pytest.fixture
def other(model_folder):
    """The weights with which late engines start."""
    return model_folder("llama", 1)


@pytest.fixture
def folders(base, tmp_path):
    return make_adapters(tmp_path, base, "ab")


def answers(engine, *names):
    return [engine.generate(PROMPT, TOKENS, name) for name in names]


@torch.no_grad()
def merged(base, folder):
    """What the model says with an adapter's product added to its weights."""
    adapter = ModelAdapter(Path(base), torch.device("cpu"))
    pushed = load_file(folder / "adapter_model.safetensors")
    for name, matrix in pushed.items():
        if ".lora_A." in name:
            weight = adapter.model.get_submodule(name[len("base_model.model.") :].partition(".lora_A")[0]).weight
            weight += (pushed[name.replace("lora_A", "lora_B")] @ matrix * (ALPHA / RANK)).to(weight.dtype)
    return adapter.generate(PROMPT, TOKENS)


def test_the_reference_engine_serves_an_adapter_beside_the_model(base, folders):
    with ReferenceEngine(base) as engine, Sender([engine.url]) as sender:
        plain = answers(engine, "")
        for name in "aba":
            sender.push(folders[name], lora="policy", version=name)
            ((token, *_), (logprob, *_)), want = answers(engine, "policy")[0], merged(base, folders[name])
            assert token == want[0][0] != plain[0][0][0]
            assert abs(logprob - want[1][0]) < 0.1
        assert answers(engine, "") == plain
        (status,) = sender.status().values()
        assert (status.version, status.adapters) == ("default", {"policy": "a"})


@pytest.mark.parametrize(("transport", "weights"), [("ipc_zmq", True), ("nccl", False), ("nixl", True)])
def test_a_late_engine_gets_every_adapter(base, other, folders, weights, transport):
    start = other if weights else base
    with ReferenceEngine(start) as first, Sender([first.url], transport=transport) as sender:
        if weights:
            sender.push(base, version="base")
        sender.push(folders["a"], lora="policy", version="1")
        sender.push(folders["b"], lora="policy", version="2")
        sender.push(folders["a"], lora="second")
        with ReferenceEngine(start) as late:
            result = sender.add_engine(late.url)
            assert result.noticed == ()
            assert answers(late, "", "policy", "second") == answers(first, "", "policy", "second")
            assert sender.status()[late.url].adapters == {"policy": "2", "second": "1"}
            assert all(not one.noticed for one in sender.push(folders["a"], lora="policy").engines.values())
            assert answers(late, "policy") == answers(first, "policy") == answers(first, "second")
            sender.remove_engine(late.url)


def test_a_restarted_engine_is_caught_up_and_the_other_left_alone(base, other, folders):
    with (
        ReferenceEngine(base) as first,
        ReferenceEngine(other) as second,
        Sender([first.url, second.url]) as sender,
    ):
        sender.push(base, version="base")
        sender.push(folders["a"], lora="policy", version="one")
        assert sender.catch_up() == {}
        second.close()
        port = int(second.url.rpartition(":")[2])
        with ReferenceEngine(other, port=port) as again:
            assert list(sender.catch_up()) == [again.url]
            assert answers(again, "", "policy") == answers(first, "", "policy")
            assert sender.catch_up() == {}


def test_an_engine_joins_with_adapters_alone(base, folders, capsys):
    with ReferenceEngine(base) as first, ReferenceEngine(base) as late, Sender([first.url]) as sender:
        address = sender.listen()
        sender.push(folders["a"], lora="policy", version="one")
        assert main(["join", address, late.url]) == 0
        assert "serves version default" in capsys.readouterr().out
        assert answers(late, "policy") == answers(first, "policy")


def test_an_adapter_that_no_arena_holds_any_more_is_named(base, folders):
    with ReferenceEngine(base) as first, ReferenceEngine(base) as late, Sender([first.url]) as sender:
        sender.push(folders["a"], lora="policy", version="one")
        sender._driver._transfer.close()  # as after a push that broke
        assert sender.add_engine(late.url) is None
        result = sender.push(base, version="base")
        assert result.engines[first.url].noticed == ()
        (note,) = result.engines[late.url].noticed
        assert note.startswith("lacks what this sender pushed as adapter 'policy' version 'one'")
        sender.push(folders["a"], lora="policy", version="two")
        assert sender.push(base).engines[late.url].noticed == ()
        assert answers(late, "policy") == answers(first, "policy")


def test_adapters_wait_for_the_weights_that_they_belong_to(base, other, folders):
    """No arena holds the weights: adapters would be served over others."""
    with ReferenceEngine(base) as first, ReferenceEngine(other) as late, Sender([first.url]) as sender:
        sender.push(base, version="base")
        sender.push(folders["a"], lora="policy", version="one")
        sender._driver._transfer._served = None  # as after a push of parameters that engines read in place
        assert sender.add_engine(late.url) is None
        assert not sender.status()[late.url].adapters
        assert "lacks" in sender.push(base).engines[late.url].noticed[-1]
        assert list(sender.catch_up()) == [late.url]
        assert answers(late, "", "policy") == answers(first, "", "policy")


def test_an_engine_that_waits_for_weights_takes_no_adapter_before(base, folders):
    args = ("--wait-for-initial-weights",)
    with ReferenceEngine(base) as first, ReferenceEngine(base, args=args) as late, Sender([first.url]) as sender:
        sender.push(folders["a"], lora="policy", version="one")
        assert sender.add_engine(late.url) is None
        assert "'policy' version 'one'" in sender.push(base).engines[late.url].noticed[-1]
        assert list(sender.catch_up()) == [late.url]
        assert answers(late, "policy") == answers(first, "policy")
