"""One sender and both engines at the same time, over each transport."""

import subprocess
import sys
import time

import pytest

from tests.engines.conftest import NEW_TOKENS, PROMPT, assert_agrees, differ
from tools import models, servers
from weightsync import Sender
from weightsync.deadline import Deadline
from weightsync.errors import UnsupportedOption
from weightsync.protocol import auth
from weightsync.trainer.client import EngineClient
from weightsync.transports.nccl.messages import InitNcclGroup

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

KIND = "qwen3"


@pytest.fixture(scope="module")
def both(model_folder):
    """vLLM with two ranks and SGLang with one, both started on model A."""
    a, b = model_folder(KIND, 0), model_folder(KIND, 1)
    with servers.start("vllm", a, tp=2) as vllm, servers.start("sglang", a, args=["--sleep-on-idle"]) as sglang:
        yield [vllm, sglang], a, b


def answers(running):
    return [servers.greedy(server, PROMPT, NEW_TOKENS) for server in running]


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_one_sender_pushes_to_both_engines(both, transport):
    running, a, b = both
    with Sender([server.url for server in running], transport=transport) as sender:
        sender.push(models.load_reference(a), version="a")
        before = answers(running)
        for version, folder in (("b", b), ("a again", a), ("b again", b)):
            result = sender.push(models.load_reference(folder), version=version)
        assert {engine.transport for engine in result.engines.values()} == {transport}
        assert {status.version for status in sender.status().values()} == {"b again"}
    for server, old, new in zip(running, before, answers(running), strict=True):
        assert differ(new, old)
        assert_agrees(server, models.load_reference(b), new)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_weights_are_streamed_over_every_transport(both, transport):
    running, a, b = both
    with Sender([server.url for server in running], transport=transport, staging="none") as sender:
        sender.push(models.load_reference(a))
        sender.push(models.load_reference(b))
    for server, answer in zip(running, answers(running), strict=True):
        assert_agrees(server, models.load_reference(b), answer)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_versions_are_kept_and_rolled_back(both, transport):
    running, a, b = both
    with Sender([server.url for server in running], transport=transport, keep_previous=True) as sender:
        for folder in (b, a, b):
            sender.push(models.load_reference(folder))
        sender.rollback()
    for server, answer in zip(running, answers(running), strict=True):
        assert_agrees(server, models.load_reference(a), answer)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_an_engine_joins_late_and_leaves_between_pushes(both, transport):
    running, a, b = both
    first, late = running
    with Sender([first.url], transport=transport) as sender:
        sender.push(models.load_reference(b), version="b")
        instance = sender.status()[first.url].instance
        joined = sender.add_engine(late.url)  # no model is passed
        assert joined.transport == transport
        assert {status.version for status in sender.status().values()} == {"b"}
        assert_agrees(late, models.load_reference(b), servers.greedy(late, PROMPT, NEW_TOKENS))
        assert list(sender.push(models.load_reference(a)).engines) == [first.url, late.url]
        sender.remove_engine(late.url)
        assert list(sender.push(models.load_reference(b)).engines) == [first.url]
        assert sender.status()[first.url].instance == instance
    assert_agrees(late, models.load_reference(a), servers.greedy(late, PROMPT, NEW_TOKENS))


def test_a_group_of_the_wrong_size_is_refused_before_any_rank_joins(both):
    running, _, _ = both
    client = EngineClient(running[0].url, auth.sender_token())
    begin = time.monotonic()
    asked = InitNcclGroup(
        group_name="g",
        master_address="127.0.0.1",
        master_port=1,
        rank_offset=1,
        world_size=2,
        backend="gloo",
        timeout_s=60.0,
        owner="test",
    )
    with pytest.raises(UnsupportedOption, match="world_size 2 is too small: this engine's 2 ranks are 1 to 2"):
        client.join("init_nccl_group", asked, Deadline(30.0))
    assert time.monotonic() - begin < 5


def test_two_fsdp2_processes_push_to_both_engines(both, tmp_path):
    running, a, _ = both
    before = answers(running)
    script = [servers.ROOT / "examples" / "fsdp2.py", a, *(server.url for server in running), "--save", tmp_path]
    subprocess.run([*TORCHRUN, *map(str, script)], check=True, timeout=300)
    for server, old, new in zip(running, before, answers(running), strict=True):
        assert differ(new, old)
        assert_agrees(server, models.load_reference(tmp_path), new)
