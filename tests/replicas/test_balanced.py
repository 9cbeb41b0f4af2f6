"""vLLM's hybrid balancing of a dense model: each server has some of the replicas, and is an engine of its own."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.replicas.test_replicas import PATIENCE_S
from tools import models, servers
from weightsync import Sender
from weightsync.testing import free_port

pytestmark = pytest.mark.slow  # three replicas


def start(model, port, first, count):
    """Start a server with ``count`` of the three replicas."""
    args = ("--data-parallel-size", "3", "--data-parallel-size-local", str(count), "--data-parallel-hybrid-lb")
    args += ("--data-parallel-start-rank", str(first), "--data-parallel-address", servers.HOST)
    args += ("--data-parallel-rpc-port", str(port), "--api-server-count", "1")
    return servers.start("vllm", model, args=args, env={"OMP_NUM_THREADS": "1"})


def push(urls, folder, version, transport):
    with Sender(urls, timeout_s=PATIENCE_S, transport=transport) as sender:
        sender.push(models.load_reference(folder), version=version)


def assert_serves(server, folder, version, ranks):
    with Sender([server.url], timeout_s=PATIENCE_S) as sender:
        (reply,) = sender.status(digest=True).values()
    assert (reply.state, reply.version, [rank.rank for rank in reply.ranks]) == ("serving", version, ranks)
    assert len({rank.digest for rank in reply.ranks}) == 1
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= BF16_ROUNDING


def test_each_server_is_an_engine_of_its_own(model_folder):
    a, b, port = model_folder("qwen3", 0), model_folder("qwen3", 1), free_port()
    with ExitStack() as running, ThreadPoolExecutor(2) as threads:
        # The first server starts only when it has heard of all replicas.
        starting = [threads.submit(start, a, port, first, count) for first, count in ((0, 2), (2, 1))]
        two, one = (running.enter_context(server.result()) for server in starting)
        push([two.url, one.url], a, "both", "ipc_zmq")
        for transport in ("ipc_zmq", "nccl", "nixl"):
            push([two.url], b, "two", transport)
            assert_serves(two, b, "two", [0, 1])
            assert_serves(one, a, "both", [0])
            push([one.url], b, "one", transport)
            assert_serves(one, b, "one", [0])
            assert_serves(two, b, "two", [0, 1])
            push([two.url, one.url], a, "both", transport)
            assert_serves(two, a, "both", [0, 1])
            assert_serves(one, a, "both", [0])
