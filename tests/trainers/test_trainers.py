"""Models that real frameworks wrap and shard, in two processes: what is served is what the framework says they hold."""

import pytest

from tests.engines.conftest import BF16_ROUNDING
from tests.lora.conftest import OPTIONS
from tests.trainers.running import LAUNCHER, PACKAGES, check, pushes, run
from tests.trainers.trainer import ADAPTED, KINDS, NEED_PACKAGES
from tools import models, servers
from weightsync import Sender
from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="module")
def seen(engine, model_folder):
    return pushes("trainer", model_folder("llama", 1), engine.url, KINDS)


@pytest.mark.frameworks  # those of docs/trainers.md are in `make test`
@pytest.mark.parametrize("kind", KINDS)
def test_what_torch_wraps_and_shards_is_pushed(seen, kind):
    check(seen[kind])


@pytest.mark.frameworks
def test_what_other_packages_wrap_and_shard_is_pushed(engine, model_folder):
    seen = pushes("trainer", model_folder("llama", 1), engine.url, NEED_PACKAGES | ADAPTED, PACKAGES)
    for kind in NEED_PACKAGES | ADAPTED:
        check(seen[kind])


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_engines_hold_what_a_plain_model_would_give_them(kind, model_folder):
    trained = model_folder("llama", 1)
    with servers.start(kind, model_folder("llama", 0)) as started:
        with Sender([started.url]) as sender:
            sender.push(models.load_reference(trained))
            (rank,) = sender.status(digest=True)[started.url].ranks
        seen = pushes("trainer", trained, started.url, KINDS | NEED_PACKAGES, PACKAGES)
        assert servers.greedy(started, list(b"count 7: "), 4)
    assert {name: found[0][0] for name, found in seen.items()} == dict.fromkeys(KINDS | NEED_PACKAGES, rank.digest)
    assert all(found[1][0] != rank.digest for found in seen.values())


@pytest.mark.frameworks
def test_adapters_are_merged_as_peft_merges_them_or_refused(model_folder):
    (seen,) = run("tests.trainers.adapted", str(model_folder("llama", 0)), packages=PACKAGES)
    assert seen["merged"] == seen["merged by the user"] != seen["plain"] == seen["disabled"]
    assert seen["pushed"] == seen["merged"]
    assert seen["left alone"]
    assert seen["no identity"]
    assert seen["read again"]
    assert "has adapters of the kind IA3; merge adapters first" in seen["IA3"]
    assert "q_proj has LoRA with a bias; merge adapters first" in seen["bias"]
    assert "has adapters of the kind PROMPT_TUNING; merge adapters first" in seen["prompts"]
    assert "its adapters are disabled, but its weight still contains them" in seen["merged, then disabled"]
    assert seen["strided"] == seen["strided, merged"] != seen["plain"]
    assert "embed_tokens.weight has adapters, and is tied to lm_head.weight" in seen["tied"]
    assert "(TrainableTokensWrapper) is part of a PEFT adapter" in seen["tokens"]


@pytest.mark.frameworks
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_adapter_of_a_peft_model_is_served_alone(engine, model_folder):
    folder = str(model_folder("llama", 0))
    with servers.start(engine, folder, args=OPTIONS[engine]) as started:
        (seen,) = run("tests.trainers.adapter", folder, engine, started.url, packages=PACKAGES)
    assert seen["as saved"]
    assert seen["lora"] == "policy"
    assert seen["left alone"]
    assert seen["apart"] <= 2 * BF16_ROUNDING < seen["without"] / 2
    named = {"two": "2 adapters are active", "DoRA": "use_dora", "IA3": "of the kind IA3", "plain": "push a PEFT model"}
    assert all(text in seen["refused"][name] for name, text in named.items()), seen["refused"]


@pytest.mark.frameworks
def test_the_adapter_that_two_processes_train_is_served_as_its_folder_is(model_folder):
    folder = str(model_folder("llama", 0))
    with ReferenceEngine(folder) as started:
        command = [*LAUNCHER, "tests.trainers.adapter_parts", folder, started.url]
        seen = {kind: answers for line in run(*command, packages=PACKAGES) for kind, answers in line.items()}
    assert seen.keys() == {"fsdp2", "ddp"}
    for before, was, after, now in seen.values():
        assert (before, after) == (was, now)
        assert before != after, "the step has changed the adapter"


#: Ranks of tensor, pipeline and expert parallelism, by the kind of model.
SPLITS = {"llama": [(2, 1, 1), (1, 2, 1)], "qwen3": [(2, 1, 1), (1, 2, 1)]}
SPLITS["qwen3_moe"] = [*SPLITS["llama"], (1, 1, 2)]


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_models_of_megatron_core_are_pushed_in_parts(engine, kind, model_folder):
    trained = model_folder(kind, 1)
    with servers.start(engine, model_folder(kind, 0)) as started:
        for split in SPLITS[kind]:
            command = [*LAUNCHER, "tests.trainers.parallel", str(trained), started.url, *map(str, split)]
            (said,) = run(*command, packages=PACKAGES)
            assert said["loaded"], split
            assert said["apart"] < 1e-3, split
            check(said["seen"])
            assert servers.greedy(started, list(b"count 7: "), 4)
