"""Parts of the engines that these tests cannot start as servers: their real classes, run by the engines' Python."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tools import servers

HERE = Path(__file__).parent


def run(engine, folder, what=None):
    env = {
        **os.environ,
        **({"TRITON_INTERPRET": "1"} if what == "triton" else {}),
        **servers.environment_of(engine, 1, plugin=True),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(servers.ROOT)))),
    }
    python = servers.ROOT / f".venv-{engine}" / "bin" / "python"
    command = [str(python), str(HERE / f"inside_{what or engine}.py"), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def vllm(model_folder):
    return run("vllm", model_folder("qwen3", 0))


@pytest.fixture(scope="module")
def triton(model_folder):
    """Triton comes with SGLang here; on a machine without a GPU it interprets kernels."""
    return run("sglang", model_folder("llama", 0), "triton")


@pytest.fixture(scope="module")
def sglang(model_folder):
    return run("sglang", model_folder("qwen3", 0))


@pytest.mark.parametrize("what", ["hashes", "digests", "copies", "tensor_copies", "pack_plans", "pushes"])
def test_kernels_for_gpus(triton, what):
    assert triton[what]


VLLM = {
    "none": "",
    "cpu tier": "",
    "second tier": "--kv-transfer-config.*TieringOffloadingSpec.*the CPU tier alone",
    "lmcache": "--kv-transfer-config.*LMCacheConnectorV1.*start the engine without it",
    "producer": "--kv-transfer-config.*kv_producer.*start the engine without it",
    "nixl": "--kv-transfer-config.*NixlConnector.*start the engine without it",
    "store": "--kv-transfer-config.*MooncakeStoreConnector.*start the engine without it",
    "several, all dropped": "",
    "several, one kept": "--kv-transfer-config.*ExampleConnector.*start the engine without it",
    "encoder": "--ec-transfer-config.*start this one without it",
    "eplb": "--enable-eplb.*start it without",
    "data parallel": "",
    "balanced elsewhere": "",
    "experts, hybrid": "",
    "experts, external": "",
    "experts, data parallel": "",
    "experts, offline": "VLLM_DP_RANK with a mixture of experts.*--data-parallel-size alone",
}
SGLANG = {
    "none": "",
    "host tier": "",
    "storage": "--hicache-storage-backend file.*start it without a storage back end",
    "lmcache": "--enable-lmcache.*start it without",
    "prefill": "--disaggregation-mode prefill.*start the engine without it",
    "decode": "--disaggregation-mode decode.*start the engine without it",
    "encoder": "--encoder-only.*start it without",
    "weight cache": "--weight-cache-mode daemon.*start it with --weight-cache-mode off",
    "eplb": "--enable-eplb.*start it without",
    "replicas": "",
    "pipeline": "",
    "nodes": "",
    "pipeline over nodes": "--nnodes 2 with --pp-size 2.*on one host",
    "tokenizers": "",
}


def assert_said(settings, wanted):
    assert settings.keys() == wanted.keys()
    for name, pattern in wanted.items():
        assert bool(settings[name]) == bool(pattern), (name, settings[name])
        assert re.search(pattern, settings[name]), (name, settings[name])


def test_unsupported_vllm_settings_are_refused_by_name(vllm):
    assert_said(vllm["settings"], VLLM)


def test_unsupported_sglang_settings_are_refused_by_name(sglang):
    assert_said(sglang["settings"], SGLANG)


def test_a_missing_name_that_only_deep_needs_refuses_only_deep_pushes(vllm, sglang):
    assert (vllm["deep"]["core"], vllm["deep"]["digest"]) == ("", "")
    assert "lacks vllm.model_executor.layers.rotary_embedding._ROPE_DICT" in vllm["deep"]["deep"]
    assert sglang["deep"]["core"] == ""
    assert sglang["deep"]["deep"].endswith("lacks sglang.srt.layers.rotary_embedding.factory._ROPE_DICT")


def test_the_first_calls_of_trigonometry_are_not_those_of_a_model(vllm, sglang):
    for found in (vllm, sglang):
        assert {"cos", "sin"} <= set(found["first calls"])


def test_status_tells_of_a_draft_model_with_its_own_checkpoint(vllm, sglang):
    assert [name for name, said in vllm["drafts"].items() if "draft model" in said] == ["model"]
    assert [name for name, said in sglang["drafts"].items() if "draft model" in said] == ["standalone"]
    loads = sglang["loads"]
    assert (loads["own, False"], loads["own, True"], loads["drafts"], loads["no drafts"]) == (False, True, True, "")


def test_embeddings_of_the_old_vision_tower_are_dropped(sglang):
    assert sglang["embeddings"] == {"flushed": True, "left": 0}


def test_plain_attributes_that_layers_compute_with_are_in_the_digest(sglang):
    assert {name: first != other for name, (first, other) in sglang["plain"].items()} == {
        "w_kc": True,
        "conv_weights": True,
    }


def test_a_failed_load_leaves_no_session_open(sglang):
    assert "not these" in sglang["loads"]["error"]
    assert sglang["loads"]["unpacked, packed"] == [1, 1]


def test_sglangs_own_guards_are_checked_before_the_engine_pauses(sglang):
    guards = sglang["guards"]
    assert guards["none"] == ""
    assert guards["derived"] == "derived weights are kept"
    assert "--weight-cache-mode client" in guards["weight cache"]
    assert "--lora-target-modules" in guards["experts"]
    assert "storage back end of HiCache is attached" in guards["attached"]
    assert guards["KV sleeps"] == ""


def test_tokenizer_workers_that_cannot_be_answered_are_refused_by_name(sglang):
    workers = sglang["workers"]
    assert re.fullmatch(
        r"--tokenizer-worker-num 2: SGLang \S+ lacks sglang.srt.environ.envs.GONE; install SGLang 0.5.23, or start the "
        "engine with --tokenizer-worker-num 1",
        workers["older"],
    )
    assert workers["other app"] == (
        "--tokenizer-worker-num 2: SGLANG_HTTP_SERVER_APP_PATH names another app; unset it, or start the engine with "
        "--tokenizer-worker-num 1"
    )
    assert re.search("tokenizer_worker_num=2.*build it with tokenizer_worker_num=1", workers["in process"])


def test_the_router_of_several_workers_holds_requests_back_and_aborts_those_that_wait(sglang):
    one, abort, asked = "TokenizedGenerateReqInput", ["AbortReq", "nobody's"], "WeightsyncReqInput"
    look = [["AbortReq", ""], [asked, "weightsync_in_flight"]]
    assert sglang["router"] == [
        [["AbortReq", "second"]],  # the answer to the worker
        [["AbortReq", "second"]],
        [[one, "first"], [one, "third"]],
        *(look, [abort], look, [abort]),
        "drained",
        [[one, "fourth"], [one, "fourth"]],
    ]


def test_an_idle_loop_leaves_pythons_lock_to_a_push(sglang):
    assert sglang["rests"] == [0, 1]


def test_a_push_does_not_wait_for_requests_that_a_user_has_paused(sglang):
    assert sglang["paused"] == [True, False]


def test_a_pause_that_a_user_ordered_survives_a_push(sglang):
    # Held by a push; after a user continues it; after the push releases it; after a user continues it again.
    assert sglang["pauses"] == {
        "nobody": [True, True, False, False],
        "before": [True, True, True, False],
        "meanwhile": [True, True, True, False],
    }
