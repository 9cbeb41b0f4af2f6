"""Ranks that disagree, by what they hold, how they send it or which release they are, are refused by name."""

import json

import pytest

from weightsync.protocol import http

from .conftest import assert_pushed, fine, served

pytestmark = pytest.mark.usefixtures("untrained")


@pytest.mark.parametrize("how", ["replicas", "hsdp"])
def test_replicas_that_have_diverged_are_refused_by_name(engines, start, expected, untrained, how):
    """At the first push, and at each if asked to."""
    four = start(4)
    assert fine(four.all(f"shard {how}"), 4)
    assert fine(four.build(engines[:1]), 4)
    assert len({one["version"] for one in four.all("push")}) == 1
    assert served(engines[:1]) == [expected]
    four.tell("diverge 0", 3)
    four.hear(3)
    if how == "replicas":
        assert all("version" in one for one in four.all("push"))  # rank 0's copy is sent
        assert served(engines[:1]) == [expected]
    for options in ({}, {"check_replicas": "always"}):
        assert fine(four.all("close"), 4)
        assert fine(four.build(engines[:1], **options), 4)
        said = four.all("push")
        assert {one["error"] for one in said} == {"SourceError"}
        assert all("hold different values of the same weights" in one["message"] for one in said)
        assert all("rank" in one["message"] and "3" in one["message"] for one in said)
        assert served(engines[:1]) == [expected]
    four.stop()


def test_replicas_are_compared_at_every_hundredth_push(engines, start):
    pair = start(2)
    assert fine(pair.all("shard replicas"))
    assert fine(pair.build(engines[:1]))
    assert all("version" in one for one in pair.all("push"))
    pair.tell("diverge 0", 1)
    pair.hear(1)
    for _ in range(99):
        assert all("version" in one for one in pair.all("push"))
    assert {one["error"] for one in pair.all("push")} == {"SourceError"}
    pair.stop()


@pytest.mark.parametrize("name", ["transport", "pause", "engines"])
def test_ranks_with_different_options_are_refused_by_name(engines, pair, name):
    options = {"urls": engines, "timeout_s": 60}
    other = {"transport": {"transport": "nccl"}, "pause": {"pause": "wait"}, "engines": {"urls": engines[:1]}}[name]
    said = pair.all(f"build_apart {json.dumps([options, {**options, **other, 'timeout_s': 50}])}")
    assert {one["error"] for one in said} == {"UnsupportedOption"}
    assert all(f"trainer rank 1 has {name} " in one["message"] for one in said)


@pytest.mark.parametrize(
    ("kind", "hows", "reason"),
    [
        ("qwen3_narrow", ("fsdp", "fsdp"), "[512, 128] at trainer rank 0 and bfloat16[512, 32] at trainer rank 1"),
        ("qwen3_narrow", ("replicas", "replicas"), "at trainer rank 0 and bfloat16[512, 32] at trainer rank 1"),
        ("llama", ("fsdp", "masters"), "bfloat16[512, 128] at trainer rank 0 and float32[512, 128] at trainer rank 1"),
        ("qwen3", ("fsdp", "fsdp"), "self_attn.q_norm.weight [32] (held: rank 1 [16:32])"),
        ("qwen3", ("nothing", "replicas"), "self_attn.q_norm.weight"),
    ],
    ids=["shapes", "shapes of replicas", "dtypes", "a tensor of which one rank has its half", "more tensors"],
)
def test_ranks_with_different_models_are_refused_by_name(
    engines, pair, expected, untrained, model_folder, kind, hows, reason
):
    folders = [model_folder("llama", 1), model_folder(kind, 1)]
    try:
        for rank, (folder, how) in enumerate(zip(folders, hows, strict=True)):
            pair.tell(f"load {folder}", rank)
            pair.tell(f"shard {how}", rank)
        assert [pair.hear(0), pair.hear(0), pair.hear(1), pair.hear(1)] == [[None]] * 4
        assert fine(pair.build(engines))
        said = pair.all("push")
        assert all(reason in one["message"] for one in said), said
        assert served(engines) == [untrained] * 2
    finally:
        pair.all(f"load {folders[0]}")
    assert fine(pair.all("shard fsdp"))  # and go on, once they have the same
    assert_pushed(pair)
    assert served(engines) == [expected] * 2
    assert fine(pair.all("close"))


@pytest.mark.parametrize("greeting", ["", "of others"], ids=["known", "other fields"])
def test_ranks_with_different_versions_of_the_package_are_refused(engines, pair, expected, tmp_path, greeting):
    metadata = tmp_path / "weightsync-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.4\nName: weightsync\nVersion: 9.9.9\n")
    for folder, how in ((tmp_path, greeting), ("", "")):
        pair.tell(f"release {folder}", 1)
        pair.tell(f"greet {how}", 1)
        assert pair.hear(1) + pair.hear(1) == [None] * 2
        said = pair.build(engines)
        if folder:
            assert {one["error"] for one in said} == {"UnsupportedOption"}
            reason = f"weightsync 9.9.9 and rank 0 {http.package_version()}; "
            assert all("trainer rank 1 " in one["message"] and reason in one["message"] for one in said), said
    assert fine(said)  # once they have the same
    assert fine(pair.all("shard fsdp"))
    assert_pushed(pair)
    assert served(engines) == [expected] * 2
    assert fine(pair.all("close"))
