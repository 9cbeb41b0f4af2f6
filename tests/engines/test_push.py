"""The main job, on every configuration: what was pushed is what is served."""

import pytest
from safetensors.torch import load_file
from tools import models, servers
from weightsync.errors import ManifestMismatch

from .conftest import NEW_TOKENS, PROMPT, ask, assert_agrees, assert_same, configurations, differ, long_prompt

pytestmark = configurations(
    *[
        (engine, kind, tp)
        for engine in ("vllm", "sglang")
        for kind, tp in (("qwen3", 1), ("qwen3", 2), ("llama", 1), ("qwen3_moe", 2))
    ]
)


def test_a_pushed_model_answers_like_a_fresh_server_and_like_transformers(served):
    served.push(served.a)
    before = ask(served.server)
    assert_agrees(served.server, models.load_reference(served.a), before.short)
    assert differ(before.short, served.fresh_b.short)

    trained = models.load_reference(served.b)
    with served.sender() as sender:
        result = sender.push(trained, version="b-1")
    after = ask(served.server)
    assert_same(after.short, served.fresh_b.short)
    assert_same(after.long, served.fresh_b.long)
    assert_agrees(served.server, trained, after.short)
    assert_agrees(served.server, trained, after.long, long_prompt())

    assert result.version == "b-1"
    assert result.nbytes == sum(p.numel() * p.element_size() for p in trained.parameters())
    assert result.engines[served.server.url].pause_s > 0
    status = served.state()
    assert (status.version, status.state) == ("b-1", "serving")
    assert [rank.rank for rank in status.ranks] == list(range(served.tp))


def test_every_rank_ends_where_it_began_after_ten_rounds(served):
    a, b = models.load_reference(served.a), models.load_reference(served.b)
    with served.sender() as sender:
        sender.push(a)
        first = served.digests()
        sender.push(b)
        other = served.digests()
        for _ in range(9):
            sender.push(a)
            sender.push(b)
        sender.push(a)
    assert served.digests() == first
    assert len(first) == served.tp
    assert all(one != two for one, two in zip(first, other, strict=True))


def test_tensors_larger_than_a_bucket_are_split(served):
    served.push(served.a)
    result = served.push(served.b, bucket_bytes=8192)
    assert result.nbytes > 50 * 8192
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_a_missing_tensor_is_refused_by_name_and_nothing_changes(served):
    served.push(served.a, version=None)
    digests = served.digests()
    weights = load_file(served.b / "model.safetensors")
    name = "model.layers.1.post_attention_layernorm.weight"
    del weights[name]
    with served.sender() as sender, pytest.raises(ManifestMismatch, match=f"missing:.*{name}") as raised:
        sender.push(weights)
    assert raised.value.weights == "unchanged"
    assert raised.value.engines == {served.server.url: "unchanged"}
    assert served.digests() == digests
    assert served.state().state == "serving"
