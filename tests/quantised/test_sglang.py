"""SGLang, started from a checkpoint in blocks of FP8: a trainer's bfloat16 is quantised on the way out."""

import os
from pathlib import Path

import pytest

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.sharded.conftest import Trainer
from tests.sharded.test_push import fine
from tests.unit.quantised import FINE, quantised_folder
from tools import models, servers
from weightsync import Sender
from weightsync.errors import ManifestMismatch

pytestmark = pytest.mark.slow  # what a trainer quantises for it is in tests/unit/test_quantised.py

SITE = Path(__file__).parent / "site"
#: Blocks of which each of two ranks has whole ones.
CONFIG = {**FINE, "weight_block_size": [32, 32]}
#: Layers of a model in bfloat16 that are not quantised: the projections of two layers are.
QUANTISED = 14


@pytest.fixture(scope="module")
def serving(model_folder, tmp_path_factory):
    """A server of model A in FP8, over two ranks, and the folders of models A and B in bfloat16."""
    a, b = model_folder("qwen3", 0), model_folder("qwen3", 1)
    path = os.pathsep.join(filter(None, (str(SITE), str(servers.ROOT), os.environ.get("PYTHONPATH"))))
    folder = quantised_folder(a, tmp_path_factory.mktemp("quantised"), CONFIG)
    with servers.start("sglang", folder, tp=2, args=["--sleep-on-idle"], env={"PYTHONPATH": path}) as server:
        yield server, a, b


def digests(sender):
    (status,) = sender.status(digest=True).values()
    return [rank.digest for rank in status.ranks]


def assert_serves(server, folder):
    """FP8 moves logprobs by more than bfloat16 does; other weights move them by 6."""
    tokens, logprobs = servers.greedy(server, PROMPT, NEW_TOKENS)
    own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
    assert apart(logprobs, own) <= 10 * BF16_ROUNDING


@pytest.mark.parametrize("options", [{}, {"transport": "nixl"}, {"verify": "deep"}, {"staging": "none"}], ids=str)
def test_every_push_is_served_as_by_an_engine_that_starts_with_it(serving, options):
    server, a, b = serving
    with Sender([server.url]) as sender:
        sender.push(a)
        started = digests(sender)
    with Sender([server.url], **options) as sender:
        for folder in (b, a, b, a):
            assert sender.push(models.load_reference(folder)).quantised == QUANTISED
            assert (digests(sender) == started) == (folder == a)
            assert_serves(server, folder)


def test_the_first_version_is_bit_by_bit_what_the_engine_reads_from_its_own_checkpoint(serving):
    server, a, _ = serving
    with Sender([server.url]) as sender:
        before = digests(sender)
        sender.push(models.load_reference(a))
        assert digests(sender) == before


@pytest.fixture(scope="module")
def pair(serving):
    """Two processes that train model B."""
    trainer = Trainer(serving[2], 2)
    yield trainer
    trainer.stop()


WAYS = [("fsdp", {}), ("mixed", {}), ("masters", {})] + [
    ("fsdp", options)
    for options in ({"transport": "nixl"}, {"transport": "nccl"}, {"bucket_bytes": 8192}, {"keep_previous": True})
]


@pytest.mark.parametrize(("how", "options"), WAYS, ids=str)
def test_processes_that_hold_shards_quantise_whole_tensors(serving, pair, how, options):
    server, a, b = serving
    with Sender([server.url]) as sender:
        sender.push(models.load_reference(b))
        wanted = digests(sender)
        sender.push(models.load_reference(a))
    assert fine(pair.all(f"shard {how}"))
    assert fine(pair.build([server.url], **options))
    for push in range(3):
        said = pair.all("push_async" if push == 1 else "push")
        assert len({one.get("version") for one in said}) == 1, said
        assert push == 1 or all("written" in one for one in said), said
        if push != 1:
            # Of the model as they hold it, which is larger than what crosses.
            assert sum(one["written"] for one in said) > said[0]["nbytes"], said
    assert fine(pair.all("close"))
    with Sender([server.url]) as sender:
        assert digests(sender) == wanted
    assert_serves(server, b)


def test_processes_that_share_no_memory_are_refused_before_a_byte_is_sent(serving, pair):
    server, _, _ = serving
    assert fine(pair.all("shard fsdp"))
    pair.tell("elsewhere another", 1)
    assert pair.hear(1) == [None]
    assert fine(pair.build([server.url], transport="nixl"))
    said = pair.all("push")
    assert fine(pair.all("elsewhere "))
    assert fine(pair.all("close"))
    for one in said:
        assert "several hosts, or on GPUs of their own, cannot put tensors together" in one["message"]


def test_it_goes_back_to_the_version_before(serving):
    server, a, b = serving
    with Sender([server.url]) as sender:
        for folder in (a, b):
            sender.push(models.load_reference(folder))
        (rank, _) = sender.status()[server.url].ranks
        assert rank.loading.startswith("load plan")
        sender.rollback()
        assert_serves(server, a)


def test_scales_of_other_blocks_are_refused_by_name(serving, tmp_path):
    server, _, b = serving
    other = quantised_folder(b, tmp_path / "other", {**FINE, "weight_block_size": [64, 64]})
    with Sender([server.url]) as sender:
        before = digests(sender)
        with pytest.raises(ManifestMismatch, match=r"down_proj\.weight_scale_inv \(\(2, 4\)"):
            sender.push(other)
        assert digests(sender) == before
