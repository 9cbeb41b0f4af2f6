"""Engines in the trainer's process: each is used by a script that the engine's own Python runs, as a trainer would."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.engines.conftest import BF16_ROUNDING, NEW_TOKENS, PROMPT, apart
from tests.faults.harness import SITE
from tests.in_process.doors import ENQUEUED
from tools import models, servers

#: By name: the engine, its door in `doors`, the name that results give it, and the environment.
DOORS = {
    "LLM": ("vllm", "LLM", "vllm.LLM#1", {}),
    "LLM without processes": ("vllm", "LLM", "vllm.LLM#1", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}),
    "AsyncLLM": ("vllm", "AsyncLLM", "vllm.AsyncLLM#1", {}),
    "Engine": ("sglang", "Engine", "sglang.Engine#1", {}),
    "Engine in coroutines": ("sglang", "EngineInLoop", "sglang.Engine#1", {}),
}
#: Seconds: longer than a script takes on a busy machine.
PATIENCE_S = 560


class Door:
    """What a script saw, and the folders of the two models that it pushed."""

    def __init__(self, name, found, a, b):
        self.kind, self.found, self.a, self.b = name, found, a, b
        self.name = DOORS[name][2]
        self.waits = self.kind.startswith("LLM")

    def __getitem__(self, act):
        return self.found[act]

    def assert_agrees(self, answer, folder):
        """Assert that the logprobs are those of transformers for the same tokens, within bf16 rounding."""
        tokens, logprobs = answer
        assert len(tokens) == NEW_TOKENS
        own = models.reference_logprobs(models.load_reference(folder), PROMPT + tokens, len(PROMPT))
        assert apart(logprobs, own) <= BF16_ROUNDING


#: What `make test-slow` uses: in three the front end is the same as in a server, in the loop of its own, and
#: tests/in_process/test_ways.py pushes into `vllm.LLM`.
SLOW = ("LLM", "LLM without processes", "AsyncLLM", "Engine in coroutines")


@pytest.fixture(scope="module", params=[pytest.param(d, marks=pytest.mark.slow if d in SLOW else ()) for d in DOORS])
def door(request, model_folder, tmp_path_factory):
    engine, kind, _, env = DOORS[request.param]
    a, b = model_folder("qwen3", 0), model_folder("qwen3", 1)
    scratch = tmp_path_factory.mktemp("door")
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH"), str(servers.ROOT))))
    env = {"PYTHONPATH": path, "FAULT_FILE": str(scratch / "order"), **env}
    python = servers.ROOT / f".venv-{engine}" / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "tests.in_process.run", kind, str(a), str(b)],
        cwd=scratch,
        env={**os.environ, **servers.environment_of(engine, 1, plugin=True), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    # SGLang ends the whole process if a child fails.
    assert done.returncode == (-signal.SIGKILL if kind == "Engine" else 0), done.stderr[-6000:]
    return Door(request.param, json.loads(done.stdout.splitlines()[-1]), Path(a), Path(b))


def test_the_engines_clients_are_found_by_entry_points(door):
    assert {"sglang", "vllm"} <= set(door["entry points"])


def test_every_transport_brings_the_weights(door):
    pushes = door["pushes"]
    assert {pushes[asked]["name"] for asked in ("auto", "nccl", "nixl")} == {door.name}
    assert [pushes[asked]["transport"] for asked in ("auto", "nccl", "nixl")] == ["ipc_zmq", "nccl", "nixl"]
    assert [pushes[asked]["version"] for asked in ("auto", "nccl", "nixl")] == ["auto", "nccl", "nixl"]
    assert pushes["auto"]["digests"] == pushes["nixl"]["digests"] != pushes["before"]["digests"]
    assert pushes["nccl"]["digests"] == pushes["before"]["digests"]
    door.assert_agrees(pushes["answers a"], door.a)
    door.assert_agrees(pushes["answers b"], door.b)


def test_rollback_restores_the_version_before(door):
    pushes = door["pushes"]
    assert (pushes["rolled back"]["version"], pushes["rolled back"]["state"]) == ("a", "serving")
    assert pushes["rolled back"]["digests"] == pushes["before"]["digests"]


def test_an_incomplete_push_changes_nothing(door):
    refused = door["refusals"]["incomplete"]
    assert (refused["error"], refused["engines"]) == ("ManifestMismatch", {door.name: "unchanged"})
    assert door["refusals"]["digests"] == door["pushes"]["before"]["digests"]


def test_models_that_were_made_for_a_push_are_given_back(door):
    assert len(set(door["given_back"]["modules"])) == 1


def test_a_pause_that_cannot_end_is_refused_by_name(door):
    refused = door["refusals"]["wait"]
    if door.kind == "LLM without processes":
        assert (refused["error"], "VLLM_ENABLE_V1_MULTIPROCESSING=0" in refused["text"]) == ("UnsupportedOption", True)
    else:
        assert refused == {}


def test_an_engine_with_half_of_a_push_does_not_generate_until_the_next_one(door):
    broken = door["broken"]
    assert (broken["push"]["error"], broken["push"]["engines"]) == ("ApplyFailed", {door.name: "dirty"})
    assert broken["state"] == "dirty"
    for asked in ("generate", "asked meanwhile", "wait"):
        if asked in broken:  # without coroutines nobody else could push, and a wait would never end
            assert "push failed half-way" in broken[asked]["text"], asked
    assert broken.get("enqueued", ENQUEUED) == ENQUEUED
    assert (broken["healed"]["version"], broken["healed"]["state"]) == ("healed", "serving")
    door.assert_agrees(broken["answers b"], door.b)


def test_a_push_and_a_request_of_another_thread_do_not_disturb_each_other(door):
    meanwhile = door["meanwhile"]
    assert meanwhile["version"] == "meanwhile"
    assert meanwhile["tokens"] > 0
    # The push of an LLM waits for the request; those of the others end while theirs goes on.
    assert meanwhile["generating"]
    if door.waits:
        waits = r"LLM.generate has run for"
        assert waits in meanwhile["detail"]
        assert (meanwhile["hasty"]["error"], waits in meanwhile["hasty"]["text"]) == ("PushTimeout", True)


def test_a_call_that_would_block_the_engines_own_loop_is_refused(door):
    if (refused := door["callers"]["loop"]) is not None:
        assert (refused["error"], "asyncio.to_thread" in refused["text"]) == ("UnsupportedOption", True)


def test_a_killed_engine_core_is_named_and_nobody_waits_for_it(door):
    if (killed := door["killed"]) is not None:
        # It loads into a standby before the commit, or in the commit.
        assert killed["push"]["engines"][door.name] in ("unchanged", "unknown", "dirty")
        assert killed["push"]["error"] != "PushTimeout"
        assert killed["generate"]["error"] in ("EngineDeadError", "RuntimeError")  # vLLM's, or ours


def test_an_engine_that_was_shut_down_leaves_nothing_behind(door):
    assert "weightsync-engine-loop" not in door["threads"] or door.kind.startswith("LLM")
    assert not door["loop runs"]


def test_an_engine_that_was_shut_down_is_named(door):
    for said in door["ended"].values():
        assert (said["error"], list(said["engines"])) == ("EngineUnreachable", [door.name])
        assert "shut down" in said["text"]
