"""One SGLang over two hosts (``--nnodes 2``): its front end is on the trainer's, rank 1 on another."""

import contextlib

import pytest

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.hosts.programs import Nodes
from tools import models

pytestmark = pytest.mark.slow
#: Seconds; the limit of a push into a node that is frozen.
LIMIT_S = 10.0


@pytest.fixture(scope="module")
def nodes(network, model_folder, tmp_path_factory):
    hosts = network.hosts["trainer"], network.hosts["a"]
    engine = Nodes(hosts, model_folder("qwen3", 0), tmp_path_factory.mktemp("nodes"))
    with contextlib.ExitStack() as running:
        running.callback(engine.kill)
        engine.wait()
        yield engine


def assert_serves(nodes, folder, version):
    reply = nodes.status()
    assert (reply["state"], reply["version"]) == ("serving", version)
    tokens, logprobs = nodes.answer(PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= BF16_ROUNDING


def test_the_whole_engine_takes_a_transport_that_reaches_all_ranks(trainer, nodes, model_folder):
    for transport in ("auto", "nccl", "nixl"):
        for seed in (0, 1):
            version = f"{seed} by {transport}"
            said = trainer.push([nodes], model_folder("qwen3", seed), version=version, transport=transport)
            assert not said["error"], said
        assert_serves(nodes, model_folder("qwen3", 1), version)
        engine = said["engines"][nodes.url]
        assert transport in ("auto", engine["transport"])
        if transport == "auto":
            assert "several hosts, with rank 1 on another" in engine["reason"]


def test_ipc_zmq_is_refused_and_names_the_far_rank(trainer, nodes, model_folder):
    said = trainer.push([nodes], model_folder("qwen3", 1), transport="ipc_zmq")
    assert said["error"] == "UnsupportedOption"
    assert f"{nodes.url} runs on several hosts, with rank 1 on another" in said["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_host_stops_the_engine_until_a_push_heals_it(trainer, nodes, model_folder, rank):
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a")["error"]
    nodes.order("raise", rank)
    said = trainer.push([nodes], model_folder("qwen3", 1), version="never", staging="none")
    assert (said["error"], said["engines"]) == ("ApplyFailed", {nodes.url: "dirty"})
    assert f"rank {rank} failed" in said["message"]
    assert nodes.status()["state"] == "dirty"
    assert not trainer.push([nodes], model_folder("qwen3", 1), version="healed")["error"]
    assert_serves(nodes, model_folder("qwen3", 1), "healed")


def test_a_frozen_node_ends_the_push_in_time_and_the_next_push_succeeds(trainer, nodes, model_folder):
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a", timeout_s=LIMIT_S)["error"]
    with nodes.frozen(1):
        said = trainer.push([nodes], model_folder("qwen3", 1), version="b", timeout_s=LIMIT_S)
        assert said["error"] in ("PushTimeout", "TransferFailed")
        assert nodes.url in said["message"]
        assert said["seconds"] < LIMIT_S + 3.0
        assert said["engines"][nodes.url] in ("unchanged", "unknown")
    assert_serves(nodes, model_folder("qwen3", 0), "a")
    assert not trainer.push([nodes], model_folder("qwen3", 1), version="after")["error"]
    assert_serves(nodes, model_folder("qwen3", 1), "after")


def test_a_node_that_is_killed_while_it_loads_ends_its_engine_alone(trainer, nodes, model_folder):
    """The last test of this module: the engine is gone after it."""
    options = {"timeout_s": LIMIT_S}
    assert not trainer.push([nodes], model_folder("qwen3", 0), version="a", **options)["error"]
    nodes.order("kill", 1)
    said = trainer.push([nodes], model_folder("qwen3", 1), version="b", **options)
    assert said["engines"][nodes.url] in ("dirty", "unknown")
    assert said["seconds"] < LIMIT_S + 3.0
