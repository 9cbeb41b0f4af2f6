"""Weights as trainers hold them: in other dtypes than the engine's, and without some of its layers."""

import contextlib
import functools
import random

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers import keen
from tests.lora.adapters import make_adapter
from tests.sharded.conftest import Trainer
from tools import models, servers
from weightsync.errors import ManifestMismatch, UnsupportedOption

from .conftest import ALL, NEW_TOKENS, PROMPT, assert_same, configurations, differ

pytestmark = configurations(ALL)
LAYER = "model.layers.1."


def test_float32_masters_arrive_as_the_engine_holds_them(served):
    served.push(served.b)
    want = served.digests()
    masters = models.load_reference(served.b).float()
    with served.sender() as sender:
        for _ in range(2):
            sender.push(models.load_reference(served.a))
            result = sender.push(masters, version="masters")
            assert result.cast > 10
            assert result.nbytes == sum(2 * parameter.numel() for parameter in masters.parameters())
            assert served.digests() == want
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_an_iterator_in_any_order_pushed_in_the_background(served):
    served.push(served.b)
    want = served.digests()
    served.push(served.a)
    b = load_file(served.b / "model.safetensors")
    shuffled = random.Random(1).sample(sorted(b.items()), len(b))
    with served.sender() as sender:
        assert sender.push(iter(shuffled), version="iterated").read == "copied"
        assert served.digests() == want
        sender.push(served.a)
        trained = {name: tensor.clone() for name, tensor in b.items()}
        future = sender.push_async(trained, version="background")
        for tensor in trained.values():
            tensor.zero_()
        assert future.result().read == "copied"
        assert served.digests() == want
        assert served.state().version == "background"
        with pytest.raises(ManifestMismatch):
            sender.push(pair for pair in shuffled[1:])
    served.push(served.a)
    with served.sender(bucket_bytes=8192) as sender:
        with pytest.raises(ManifestMismatch, match="ended without"):
            sender.push(pair for pair in shuffled[1:])
        assert sender.push(iter(shuffled), version="in turn").read == "sent"
    assert served.digests() == want
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


def test_a_layer_that_the_trainer_lacks_stays_as_the_engine_has_it(served):
    a, b = (load_file(folder / "model.safetensors") for folder in (served.a, served.b))
    partial = {name: tensor for name, tensor in b.items() if not name.startswith(LAYER)}
    with served.sender() as sender:
        sender.push({**a, **partial})
        want, answer = served.digests(), servers.greedy(served.server, PROMPT, NEW_TOKENS)
        for _ in range(2):
            sender.push(a)
            result = sender.push(partial, version="part", allow_missing=[f"{LAYER}*"])
            assert result.kept == tuple(sorted(b.keys() - partial.keys()))
            assert served.digests() == want
        assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), answer)
        assert served.state().version == "part"


@pytest.mark.parametrize(
    ("options", "lacks", "error", "said"),
    [
        ({}, "self_attn.k_proj.weight", ManifestMismatch, r"k_proj\.weight cannot be left as the engine has them"),
        ({"verify": "deep"}, "", UnsupportedOption, "a fresh engine"),
    ],
)
def test_what_cannot_be_left_is_refused_by_name(served, options, lacks, error, said):
    for folder in (served.a, served.b, served.a):
        served.push(folder)
    ways = served.loading()
    before, b = served.digests(), load_file(served.b / "model.safetensors")
    pushed = {name: tensor for name, tensor in b.items() if not name.startswith(LAYER + lacks)}
    with served.sender(**options) as sender, pytest.raises(error, match=said):
        sender.push(pushed, allow_missing=[f"{LAYER}*"])
    assert served.digests() == before
    for folder in (served.b, served.a):
        served.push(folder)
    assert served.loading() == ways


@pytest.fixture(scope="module")
def trainers():
    """Return a function that starts a trainer of two processes, one for each model."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(folder):
            trainer = Trainer(folder)
            stack.callback(trainer.stop)
            return trainer

        yield start


def test_two_fsdp2_ranks_push_masters_mixed_dtypes_iterators_and_a_part(served, trainers):
    a, b = (load_file(folder / "model.safetensors") for folder in (served.a, served.b))
    part = {name: tensor for name, tensor in b.items() if not name.startswith(LAYER)}
    with served.sender() as sender:
        sender.push(b)
        want = served.digests()
        sender.push({**a, **part})
        want_part = served.digests()
    pair = trainers(served.b)
    orders = [("masters", "push", want), ("mixed", "push", want), ("shorter", f"push_without {LAYER}", want_part)]
    if served.kind != "qwen3_moe":  # transformers' module holds all experts of a layer in one tensor of another name
        orders.append(("masters", "iterate_shuffled", want))
    for how, word, digests in orders:
        served.push(served.a)
        assert pair.all(f"shard {how}") == [None, None]
        assert pair.build([served.server.url]) == [None, None]
        first, second = pair.all(word)
        assert first["version"] == second["version"], first
        assert served.digests() == digests, (how, word)
        if word == "push":
            assert first["cast"] > 0
            assert min(first["written"], second["written"]) > 0
        assert first.get("kept", []) == (sorted(b.keys() - part.keys()) if how == "shorter" else [])
        assert pair.all("close") == [None, None]


def test_what_has_changed_is_all_that_is_sent_elsewhere(served):
    """Over nixl, as to another host; by ranks that have all of the version before, and that have their part of it."""
    served.push(served.b)
    want = served.digests()
    b = load_file(served.b / "model.safetensors")
    with served.sender(transport="nixl") as sender, keen():
        for few in (False, True, False, True, True):
            state = {name: tensor.clone() if few else torch.randn_like(tensor) for name, tensor in b.items()}
            for tensor in state.values():
                tensor.view(-1)[::97] *= -1
            version, before = sender.push(state).version, served.digests()
            assert all(one != other for one, other in zip(before, want, strict=True))
            result = sender.push(b)  # as different from that as that was from this
            assert (result.delta is not None) == few
            assert served.digests() == want
        assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
        assert sender.rollback().version == version
        assert (served.digests(), served.state().version) == (before, version)
        assert differ(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)


@pytest.mark.parametrize("transport", ["nccl", "nixl"])
def test_two_fsdp2_ranks_on_two_hosts_push_what_each_holds(served, trainers, transport):
    served.push(served.b)
    want = served.digests()
    pair = trainers(served.b)
    pair.tell("elsewhere another", 1)
    assert pair.hear(1) == [None]
    assert pair.all("shard fsdp") == [None, None]
    assert pair.build([served.server.url], transport=transport) == [None, None]
    for number in range(4):  # by the engine's loader, and by the load plan where there is one
        pair.all("change")
        first, second = pair.all("push")
        assert first["version"] == second["version"] == served.state().version, first
        assert (served.digests() == want) == bool(number % 2)
        assert min(one["written"] for one in (first, second)) > 0.3 * first["nbytes"]
        # Over nixl the engine reads what is on its own host.
        assert [bool(one["sent"]) for one in (first, second)] == [transport == "nccl", True]
    assert pair.all("close") == [None, None]
    pair.tell("elsewhere", 1)
    assert pair.hear(1) == [None]


def test_two_fsdp2_ranks_whose_shards_are_in_shared_memory_are_read_in_place(served, trainers):
    served.push(served.b)
    want = served.digests()
    pair = trainers(served.b)
    assert pair.all("shard fsdp") == [None, None]
    assert pair.all("share") == [None, None]
    assert pair.build([served.server.url]) == [None, None]
    for number in range(4):  # by the engine's loader, and by the load plan where there is one
        pair.all("change")
        first, second = pair.all("push")
        assert first["version"] == second["version"] == served.state().version, first
        assert (served.digests() == want) == bool(number % 2)
        assert [one["written"] for one in (first, second)] == [0, 0]
    assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
    assert pair.all("close") == [None, None]


#: What each engine says that was started without LoRA.
NO_LORA = {
    "vllm": "this vllm takes no adapter: start vLLM with --enable-lora",
    "sglang": "this sglang takes no adapter: start SGLang with --enable-lora",
}


def test_an_engine_without_lora_refuses_an_adapter(served, tmp_path):
    served.push(served.b, version="base")
    folder = make_adapter(tmp_path, served.b, seed=1)
    with served.sender() as sender:
        with pytest.raises(UnsupportedOption, match=NO_LORA[served.server.engine]) as refused:
            sender.push(folder, lora="policy")
        assert refused.value.weights == "unchanged"
        (status,) = sender.status().values()
        assert (status.version, status.state) == ("base", "serving")
        assert_same(servers.greedy(served.server, PROMPT, NEW_TOKENS), served.fresh_b.short)
        sender.push(models.load_reference(served.b))
