"""vLLM's own weight transfer with weightsync as its back end, over its routes and with its `AsyncLLM`."""

import json

import pytest
import requests

from tests.frameworks.running import ROUNDING, apart, label, run
from tools import models, servers
from weightsync import Sender

pytestmark = pytest.mark.frameworks
CHOSEN = ["--weight-transfer-config", '{"backend": "weightsync"}']
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture(scope="module")
def chosen(model_folder):
    with servers.start("vllm", model_folder("qwen3", 0), args=CHOSEN, env=DEV_MODE) as started:
        yield started


def transfer(program, *arguments, **options):
    done = run("-m", "tests.frameworks.weight_transfer", program, *arguments, **options)
    return json.loads(done.stdout.splitlines()[-1])["seen"] if done.returncode == 0 else done.stderr


def test_a_trainer_of_vllms_protocol_pushes(chosen, model_folder):
    before, trained = model_folder("qwen3", 0), model_folder("qwen3", 1)
    version = transfer("over_http", before, trained, chosen.url)
    assert label(chosen.url) == version
    assert requests.get(f"{chosen.url}/weight_info", timeout=30).json()["weight_version"] == version
    assert apart(chosen, models.load_reference(trained)) <= ROUNDING
    assert apart(chosen, models.load_reference(before)) > ROUNDING


def test_a_trainer_of_two_processes_pushes(chosen, model_folder):
    before, trained = model_folder("qwen3", 0), model_folder("qwen3", 2)
    assert transfer("sharded", before, trained, chosen.url, processes=2) == label(chosen.url)
    assert apart(chosen, models.load_reference(trained)) <= ROUNDING


def test_a_client_of_several_engines_commits_in_all(chosen, server, model_folder):
    trained = model_folder("qwen3", 1)
    with servers.start("vllm", model_folder("qwen3", 0), args=CHOSEN, env=DEV_MODE) as second:
        names = transfer("of_several", model_folder("qwen3", 0), trained, chosen.url, second.url)
        assert len(names) == 2
        assert label(chosen.url) == label(second.url)
        assert apart(second, models.load_reference(trained)) <= ROUNDING


def test_an_async_llm_needs_no_server(model_folder):
    seen = transfer("in_process", model_folder("qwen3", 0), model_folder("qwen3", 1))
    assert seen["changed"]
    assert seen["back"]


def test_a_sender_pushes_into_the_same_engine(chosen, model_folder):
    with Sender([chosen.url]) as sender:
        sender.push(models.load_reference(model_folder("qwen3", 0)), version="by URL")
    assert requests.get(f"{chosen.url}/weight_info", timeout=30).json()["weight_version"] == "by URL"


def test_a_model_that_does_not_fit_changes_nothing(chosen, model_folder):
    before = label(chosen.url)
    said = transfer("over_http", model_folder("llama", 0), model_folder("llama", 1), chosen.url, check=False)
    assert "ManifestMismatch" in said
    assert label(chosen.url) == before


def test_what_is_missing_is_said(server, chosen, model_folder, monkeypatch):
    folder = model_folder("qwen3", 0)
    said = transfer("over_http", folder, folder, server.url, check=False)
    assert "VLLM_SERVER_DEV_MODE=1" in said
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "another")
    said = transfer("over_http", folder, folder, chosen.url, check=False)
    assert "have both sides the same key?" in said


@pytest.mark.parametrize(
    ("call", "body"),
    [
        ("init_weight_transfer_engine", {"init_info": {"master_address": "127.0.0.1"}}),
        ("update_weights", {"update_info": {"names": []}}),
        ("update_weights", {"update_info": {"weightsync": "{}"}}),
        ("finish_weight_update", None),
        ("start_draft_weight_update", None),
    ],
)
def test_calls_of_others_change_nothing(chosen, model_folder, call, body):
    before = label(chosen.url)
    reply = requests.post(f"{chosen.url}/{call}", json=body, timeout=60)
    assert reply.status_code >= 400
    assert label(chosen.url) == before
    assert servers.greedy(chosen, list(b"count 7: "), 4)


def relayed(program, model_folder, *arguments):
    folders = model_folder("llama", 0), model_folder("llama", 1)
    done = run("-m", "tests.frameworks.relayed", program, *folders, *arguments)
    return json.loads(done.stdout.splitlines()[-1])["seen"]


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("staging", ["full", "none"])
def test_engines_behind_one_client_commit_at_once(model_folder, engines, staging):
    seen = relayed("pushed", model_folder, engines, staging)
    assert all(push["alike"] and push["answer"] != seen["before"] for push in seen["pushes"])
    assert seen["committed"] == [2] * engines
    assert len(seen["names"]) == engines


@pytest.mark.parametrize("engines", [1, 3])
def test_an_engine_that_was_restarted_is_found_again(model_folder, engines):
    seen = relayed("restarted", model_folder, engines)
    assert all(push["alike"] for push in seen["pushes"])
    assert seen["pushes"][0]["answer"] == seen["pushes"][1]["answer"]


def test_what_an_engine_refuses_is_what_the_trainer_raises(model_folder):
    kind, said = relayed("refused", model_folder, True, "0123456789abcdef" * 2)
    assert kind == "UnsupportedOption"
    assert "--api-server-count 1" in said
    kind, said = relayed("refused", model_folder, False, "another key, of at least 16 characters")
    assert kind == "EngineUnreachable"
    assert "set WEIGHTSYNC_TOKEN alike" in said
