"""SGLang with a model of linear attention, whose kernels this CPU has not: what its ranks hold, by their digests."""

import os

import pytest

from tools import models, servers
from weightsync import Sender

from .conftest import HERE, WAITING

pytestmark = pytest.mark.slow

OPTIONS = [
    # Every fourth layer is one of attention, which transformers writes in another way than SGLang reads.
    *("--json-model-override-args", '{"full_attention_interval": 4}'),
    "--disable-radix-cache",  # SGLang has none for such models on a CPU
    "--skip-server-warmup",  # which would generate
    *WAITING["sglang"],
]


def started(model, tp):
    """A server that generates nothing, because it waits for its first push."""
    site = HERE / "hybrid_site"
    path = os.pathsep.join(filter(None, (str(site), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    return servers.start("sglang", model, tp=tp, args=OPTIONS, env={"PYTHONPATH": path}, timeout_s=240)


def ranks(sender):
    (status,) = sender.status(digest=True).values()
    return status.ranks


def digests(sender):
    return [rank.digest for rank in ranks(sender)]


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_holds_what_an_engine_that_starts_with_it_holds(model_folder, tp):
    a, b = (model_folder("qwen3_next", seed) for seed in (0, 1))
    first, second = map(models.load_reference, (a, b))
    with started(b, tp) as server, Sender([server.url]) as sender:
        fresh = digests(sender)
    with started(a, tp) as server:
        with Sender([server.url]) as sender:
            start = digests(sender)
            assert not set(start) & set(fresh)
            for _ in range(3):
                sender.push(second)
                assert digests(sender) == fresh
                sender.push(first)
                assert digests(sender) == start
            # Its norms keep one plus their weight too, which only the loader computes.
            for rank in ranks(sender):
                assert rank.loading == "into a standby, by the engine's own loader, and exchanged"
            sender.rollback()
            assert digests(sender) == fresh
        with Sender([server.url], verify="deep", keep_previous=True) as sender:
            sender.push(first)
            assert sender.push(second).verify == "deep"
            assert digests(sender) == fresh
            sender.rollback()
            assert digests(sender) == start
