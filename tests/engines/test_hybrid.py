"""SGLang with models whose kernels a CPU may lack: what its ranks hold, by their digests, and all that they reach."""

import json
import os

import pytest

from tools import models, servers
from weightsync import Sender

from .conftest import HERE, WAITING

pytestmark = pytest.mark.slow

OPTIONS = {
    "qwen3_next": [
        # Every fourth layer is one of attention, which transformers writes in another way than SGLang reads.
        *("--json-model-override-args", '{"full_attention_interval": 4}'),
        "--disable-radix-cache",  # SGLang has none for such models on a CPU
    ],
    "deepseek_v2": [],
}


def started(kind, model, tp, folder):
    """A server that generates nothing, because it waits for its first push; its ranks write to the folder."""
    site = HERE / "hybrid_site"
    path = os.pathsep.join(filter(None, (str(site), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    options = [*OPTIONS[kind], "--skip-server-warmup", *WAITING["sglang"]]  # a warmup would generate
    env = {"PYTHONPATH": path, "REACHED": str(folder)}
    return servers.start("sglang", model, tp=tp, args=options, env=env, timeout_s=240)


def ranks(sender):
    (status,) = sender.status(digest=True).values()
    return status.ranks


class Held:
    """What each rank holds."""

    def __init__(self, sender, folder):
        self.digests = [rank.digest for rank in ranks(sender)]
        self.reached = [json.loads((folder / str(rank)).read_text()) for rank in range(len(self.digests))]


def assert_same(found, expected):
    assert found.digests == expected.digests
    for these, those in zip(found.reached, expected.reached, strict=True):
        differing = {path for path in these.keys() | those.keys() if these.get(path) != those.get(path)}
        assert not differing, {path: (these.get(path), those.get(path)) for path in sorted(differing)}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_holds_what_an_engine_that_starts_with_it_holds(kind, tp, model_folder, tmp_path):
    a, b = (model_folder(kind, seed) for seed in (0, 1))
    first, second = map(models.load_reference, (a, b))
    with started(kind, b, tp, tmp_path) as server, Sender([server.url]) as sender:
        fresh = Held(sender, tmp_path)
    with started(kind, a, tp, tmp_path) as server:
        with Sender([server.url]) as sender:
            start = Held(sender, tmp_path)
            assert not set(start.digests) & set(fresh.digests)
            for _ in range(3):
                sender.push(second)
                assert_same(Held(sender, tmp_path), fresh)
                sender.push(first)
                assert_same(Held(sender, tmp_path), start)
            # Its loader also computes what no checkpoint has.
            for rank in ranks(sender):
                assert rank.loading == "into a standby, by the engine's own loader, and exchanged"
            sender.rollback()
            assert_same(Held(sender, tmp_path), fresh)
        with Sender([server.url], verify="deep", keep_previous=True) as sender:
            sender.push(first)
            assert sender.push(second).verify == "deep"
            assert_same(Held(sender, tmp_path), fresh)
            sender.rollback()
            assert_same(Held(sender, tmp_path), start)
