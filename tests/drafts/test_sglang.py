"""SGLang with a draft model, which it cannot decode with on this CPU: what both models hold, by their digests."""

import os
from pathlib import Path

import pytest

from tests.drafts import bigrams
from tests.engines.conftest import WAITING
from tools import models, servers
from weightsync import Sender
from weightsync.errors import ManifestMismatch
from weightsync.protocol.draft import PREFIX

pytestmark = pytest.mark.slow

SITE = Path(__file__).parent / "site"
OPTIONS = [
    *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    "--skip-server-warmup",  # which would generate
    *WAITING["sglang"],
]


def started(model, *args, tp=1):
    """A server that generates nothing, because it waits for its first push."""
    path = os.pathsep.join(filter(None, (str(SITE), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    return servers.start("sglang", model, tp=tp, args=[*OPTIONS, *args], env={"PYTHONPATH": path}, timeout_s=240)


def digests(sender):
    (status,) = sender.status(digest=True).values()
    return [rank.digest for rank in status.ranks]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_draft_model_is_loaded_with_the_model(model_folder, tp):
    a, b, c, d = (model_folder(kind, seed) for kind, seed in (("qwen3", 0), ("qwen3", 1), ("llama", 2), ("llama", 3)))
    options = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(c)]
    first, second, draft, other = map(models.load_reference, (a, b, c, d))
    with started(a, *options, tp=tp) as server, Sender([server.url]) as sender:
        start = digests(sender)
        for _ in range(3):  # by the loader, then by the load plan
            sender.push(second, draft=other)
            assert not set(digests(sender)) & set(start)
            sender.push(first, draft=draft)
            assert digests(sender) == start
        result = sender.push(second)
        assert set(result.kept) == {PREFIX + name for name in dict(draft.named_parameters())}
        stale = digests(sender)
        sender.rollback()
        assert digests(sender) == start
        sender.push(second, draft=draft)
        assert digests(sender) == stale
        sender.rollback()
        assert digests(sender) == start
        with pytest.raises(ManifestMismatch, match="unknown to the engine: draft:"):
            sender.push(first, draft=first)
        (status,) = sender.status().values()
        assert "draft model" in status.off
    with started(b, *[*options[:-1], str(d)], tp=tp) as server, Sender([server.url]) as sender:
        fresh = digests(sender)
        sender.push(first, draft=draft)
        assert digests(sender) == start
        sender.push(second, draft=other)
        assert digests(sender) == fresh


def test_layers_for_multi_token_prediction_are_loaded_with_the_model(tmp_path):
    mtp, (a, b) = bigrams.MTP["mimo"], (bigrams.make(tmp_path / str(seed), seed) for seed in (0, 1))
    with started(a, "--speculative-algorithm", "NEXTN") as server, Sender([server.url]) as sender:
        start = digests(sender)
        for _ in range(3):
            sender.push(bigrams.weights_of(b))
            fresh = digests(sender)
            assert fresh != start
            sender.push(bigrams.weights_of(a))
            assert digests(sender) == start
        alone = {name: one for name, one in bigrams.weights_of(b).items() if not name.startswith(mtp)}
        sender.push(alone, allow_missing=[f"{mtp}*"])
        assert digests(sender) not in (start, fresh)
