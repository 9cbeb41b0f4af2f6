"""Trainers of several processes push to reference engines, which then serve the assembled model."""

import json

import pytest

from tools import models
from weightsync.protocol.http import TensorSpec
from weightsync.tensors.boxes import Box
from weightsync.tensors.held import HeldShards
from weightsync.tensors.layout import digest_of
from weightsync.trainer.ranks.assignment import plan

from .conftest import assert_pushed, fine, served

pytestmark = pytest.mark.usefixtures("untrained")


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_two_fsdp2_ranks_push_their_shards_to_two_engines(engines, pair, expected, changed, transport):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, transport=transport))
    first, second = assert_pushed(pair)
    assert abs(first - second) < 0.1 * (first + second)
    assert served(engines) == [expected, expected]
    pair.all("change")
    assert_pushed(pair)
    assert served(engines) == [changed, changed]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_two_ranks_send_what_has_changed(engines, start, model_folder, transport):
    """In another trainer, which sends changes from now on."""
    pair, state = start(2), models.load_reference(model_folder("llama", 1)).state_dict()
    assert fine(pair.all("keen"))
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, transport=transport))
    assert [one["delta"] for one in pair.all("push")] == [None] * 2
    for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"):
        assert fine(pair.all(f"change {name}"))
        state[name].neg_()
        said = pair.all("push")
        assert [one["delta"] for one in said] == [[1, len(state) - 1]] * 2
        assert all(one["written"] for one in said)
        assert served(engines) == [digest_of(state.items())] * 2
    assert fine(pair.all("close"))
    pair.stop()


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 8192}, {"transport": "nixl"}])
def test_every_rank_casts_its_shards_of_float32_masters(engines, pair, expected, changed, options):
    assert fine(pair.all("shard masters"))
    assert fine(pair.build(engines, **options))
    assert all(assert_pushed(pair))
    assert served(engines) == [expected, expected]
    pair.all("change")
    assert all(one["cast"] > 10 for one in pair.all("push"))
    assert served(engines) == [changed, changed]
    assert fine(pair.all("close"))


def test_rank_0_alone_shows_progress_and_every_rank_the_phase_of_an_error(engines, pair):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, progress=True))
    drawn = pair.all("watch")
    assert "100%" in drawn[0]
    assert "transfer" in drawn[0]
    assert drawn[1] == ""
    said = pair.all("lose")
    assert {one["message"].endswith("[transfer]") for one in said} == {True}, said
    assert fine(pair.all("close"))


@pytest.mark.parametrize("how", ["fsdp", "masters", "parts", "replicas"])
def test_every_rank_goes_on_when_the_tensors_of_all_are_copied(engines, pair, expected, how):
    assert fine(pair.all(f"shard {how}"))
    assert fine(pair.build(engines))
    for _ in range(3):
        said = pair.all("push_async")
        assert said[0] == said[1]
        assert said[0]["read"] == "copied"
        assert served(engines) == [expected, expected]
    assert {one["error"] for one in pair.all("fail_async")} == {"SourceError"}
    assert served(engines) == [expected, expected]
    assert all(pair.all("push"))
    assert fine(pair.all("close"))


@pytest.mark.parametrize(("options", "read"), [({}, "copied"), ({"bucket_bytes": 8192, "transport": "nccl"}, "sent")])
def test_every_rank_takes_part_in_making_what_the_iterator_of_rank_0_yields(
    engines, pair, expected, changed, options, read
):
    assert fine(pair.all("shard replicas"))
    assert fine(pair.build(engines, **options))
    first, second = pair.all("iterate")
    assert first == second
    assert first["read"] == read
    assert served(engines) == [expected, expected]
    pair.all("change")
    assert {one["error"] for one in pair.all("iterate 3")} == {"ManifestMismatch"}
    assert served(engines) == [expected, expected]
    assert all(pair.all("iterate"))
    assert served(engines) == [changed, changed]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 8192}])
def test_an_iterator_that_is_refused_in_the_middle_holds_up_no_rank(engines, pair, expected, untrained, options):
    """The other ranks wait in collectives for rank 0, which goes on to the end of its iterator."""
    assert fine(pair.all("shard masters"))
    assert fine(pair.build(engines, **options))
    said = pair.all("iterate_shuffled model.unknown")
    assert said[0] == said[1]
    assert said[0]["error"] == "ManifestMismatch"
    assert "model.unknown: the iterator yielded it" in said[0]["message"]
    assert served(engines) == [untrained, untrained]
    assert all(pair.all("iterate_shuffled"))
    assert served(engines) == [expected, expected]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("transport", ["ipc_zmq", "nccl", "nixl"])
def test_a_layer_that_an_fsdp2_trainer_lacks_stays_as_the_engines_have_it(
    engines, pair, expected, model_folder, transport
):
    a, b = (models.load_reference(model_folder("llama", seed)).state_dict() for seed in (0, 1))
    lacks = sorted(name for name in b if name.startswith("model.layers.1."))
    assert fine(pair.all("shard shorter"))
    assert fine(pair.build(engines, transport=transport))
    assert [one["kept"] for one in pair.all("push_without model.layers.1.")] == [lacks, lacks]
    want = digest_of({**b, **{name: a[name] for name in lacks}}.items())
    assert served(engines) == [want, want]
    assert fine(pair.all("close"))


def test_every_rank_broadcasts_its_share(engines, pair, expected, changed):
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build(engines, transport="nccl", bucket_bytes=8192))
    for want in (expected, changed):
        first, second = (one["sent"] for one in pair.all("push"))
        assert abs(len(first) - len(second)) <= 1
        assert len(first) > 10
        assert sum(first) + sum(second) >= sum(one["written"] for one in pair.all("push"))
        assert served(engines) == [want, want]
        pair.all("change")
    assert fine(pair.all(f"remove {engines[0]}"))
    assert all(one["sent"] for one in pair.all("push"))  # over new groups
    assert pair.all(f"add {engines[0]}") == [{"transport": "nccl"}] * 2
    assert len(set(served(engines))) == 1
    assert fine(pair.all("close"))
    assert fine(pair.build(engines, transport="nccl", bucket_bytes=8192, staging="none"))
    pair.all("change")
    assert all(one["sent"] for one in pair.all("push"))
    assert len({*served(engines), expected, changed}) == 2
    assert fine(pair.all("close"))


@pytest.mark.parametrize("how", ["columns", "parts", "stages", "named", "megatron", "unsharded", "replicas"])
def test_two_ranks_push_their_shards_for_every_kind_of_split(engines, pair, expected, how):
    assert fine(pair.all(f"shard {how}"))
    assert fine(pair.build(engines[:1]))
    if how == "replicas":
        assert [one["written"] for one in pair.all("push")] == [0, 0]  # rank 0 sends like a single process
    else:
        assert all(assert_pushed(pair))
    assert served(engines[:1]) == [expected]
    assert fine(pair.all("close"))


@pytest.mark.parametrize("how", ["fsdp", "hsdp", "mesh", "parts"])
def test_four_ranks_push_their_shards(engines, four, expected, how):
    assert fine(four.all(f"shard {how}"), 4)
    assert fine(four.build(engines[:1]), 4)
    written = assert_pushed(four)
    if how != "parts":
        assert max(written) - min(written) < 0.1 * sum(written)  # replicas share the work
    assert served(engines[:1]) == [expected]
    assert fine(four.all("close"), 4)


def test_small_buckets_streams_and_kept_versions(engines, pair, expected, changed):
    assert fine(pair.all("shard fsdp"))
    for options in ({"bucket_bytes": 8192}, {"staging": "none"}, {"verify": "off"}):
        assert fine(pair.build(engines, **options))
        assert_pushed(pair)
        pair.all("change")
        assert_pushed(pair)
        assert served(engines) == [changed, changed]
        pair.all("change")
        assert fine(pair.all("close"))
    assert fine(pair.build(engines, keep_previous=True))
    assert_pushed(pair)
    pair.all("change")
    assert_pushed(pair)
    before, after = pair.all("rollback")
    assert before == after
    assert list(pair.all("status")[1].values()) == [[expected], [expected]]
    assert fine(pair.all("close"))


def test_engines_are_added_and_removed(engines, pair, expected):
    first, second = engines
    assert fine(pair.all("shard fsdp"))
    assert fine(pair.build([first]))
    assert_pushed(pair)
    assert pair.all(f"add {second}") == [{"transport": "ipc_zmq"}] * 2
    assert served(engines) == [expected, expected]
    assert_pushed(pair)
    assert pair.all("catch_up") == [[], []]
    assert fine(pair.all(f"remove {first}"))
    assert [list(said) for said in pair.all("status")] == [[second]] * 2
    assert fine(pair.all("close"))


def test_the_store_has_one_key_during_and_after_pushes(engines, start, expected):
    pair = start(2)
    assert fine(pair.all("shard fsdp"))
    before = pair.all("keys")[0]
    for _ in range(2):
        assert fine(pair.build(engines))
        assert pair.all("keys") == [before + 1] * 2
        assert_pushed(pair)
        pair.all("status")
        assert pair.all("keys") == [before + 1] * 2
        assert fine(pair.all("close"))
        assert pair.all("keys") == [before + 1] * 2
    assert served(engines) == [expected, expected]
    pair.stop()


def planned(said):
    """The plan for ranks that hold tensors given as ``[name, shape, boxes]``."""
    return plan([[shards(*one) for one in held] for held in said])


def shards(name, shape, boxes):
    found = tuple(Box(tuple(start), tuple(size)) for start, size in boxes)
    return HeldShards(TensorSpec(name, "int64", tuple(shape)), found, replicated=True)


def test_local_parts_are_located_for_every_placement(four):
    held = four.all("placements")
    assert len(held[0]) > 100
    assert any("_S" in name for name, _, _ in held[0])
    assert len(planned(held).manifest) == len(held[0])


def test_a_sharded_module_is_sent_as_save_pretrained_would_write_it(four):
    said = four.all("modules")
    names = [one.name for one in planned([held for held, _ in said]).manifest]
    assert [name for name in names if name.startswith("tied")] == ["tied 0.weight", "tied 0.bias", "tied 1.bias"]
    assert "qwen3_moe model.layers.1.mlp.experts.3.up_proj.weight" in names
    assert not any(name.startswith("qwen3 lm_head") for name in names)
    for _, refusal in said:
        assert "is computed from" in refusal
        assert "keep that module from being sharded" in refusal


def test_a_process_group_of_some_ranks_is_the_trainer(engines, start, expected, changed):
    four = start(4)
    four.all("gather 1 3")
    trainer = [1, 3]
    four.tell("shard grouped", *trainer)
    assert fine(four.hear(*trainer))
    four.tell(f"build {json.dumps({'urls': engines, 'timeout_s': 60})}", *trainer)
    assert fine(four.hear(*trainer))
    for want in (expected, changed):
        four.tell("push", *trainer)
        first, second = four.hear(*trainer)
        assert first["written"] + second["written"] == first["nbytes"]
        assert min(first["written"], second["written"]) > 0
        assert served(engines) == [want, want]
        four.tell("change", *trainer)
        four.hear(*trainer)
    four.tell(f"build {json.dumps({'urls': engines, 'timeout_s': 60})}", 0)
    (said,) = four.hear(0)
    assert said["error"] == "UnsupportedOption"
    assert "this process is not in it" in said["message"]
    four.tell("close", *trainer)
    assert fine(four.hear(*trainer))
    four.stop()


def test_a_rank_may_hold_nothing(engines, four, expected):
    assert fine(four.all("shard half"), 4)
    assert fine(four.build(engines), 4)
    assert assert_pushed(four)[3] == 0
    assert served(engines) == [expected, expected]
    assert fine(four.all("shard nothing"), 4)
    assert {one["message"] for one in four.all("push")} == {
        "the mapping holds no tensors; there is nothing to send [push]"
    }
    assert fine(four.all("close"), 4)
