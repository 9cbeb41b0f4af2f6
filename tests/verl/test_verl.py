"""verl's own classes update reference engines through our checkpoint engines, between actors of a local Ray."""

import functools
import json
import os
import subprocess

import pytest

from tests.engines.conftest import BF16_ROUNDING, apart
from tests.in_process import doors
from tests.ray.test_ray import ENVIRONMENT
from tests.trainers import running
from tools import models, servers, versions

pytestmark = pytest.mark.frameworks

start = functools.partial(
    running.run, "tests.verl.run", packages=os.pathsep.join(map(str, versions.verl_packages())), env=ENVIRONMENT
)


@pytest.fixture(scope="module")
def folders(model_folder):
    return model_folder("llama", 0), model_folder("llama", 1)


def run(part, folders):
    (seen,) = start(part, *map(str, folders))
    return seen


@pytest.mark.parametrize(("plugins", "module"), [("auto", None), ("none", "weightsync.integrations.verl")])
def test_verl_finds_both_by_entry_point_or_by_module(plugins, module):
    (seen,) = running.run(
        "tests.verl.registered",
        *([module] if module else []),
        packages=os.pathsep.join(map(str, versions.verl_packages())),
        env={"VERL_USE_EXTERNAL_PLUGINS": plugins},
    )
    assert seen["before"] == ([] if module else ["weightsync", "weightsync_transfer"])
    assert seen["after"] == ["weightsync", "weightsync_transfer"]


def test_servers_commit_what_verl_exports_or_nothing(folders):
    seen = run("into_servers", folders)
    before, after = seen["fresh"]
    assert before != after
    assert {"weightsync", "weightsync_transfer"} <= set(seen["registered"])
    assert seen["served"] == [[each] * 2 for each in (before, after, before, after)]
    assert seen["rollout"] == [[False, "delta_flush", 3]] * 2
    assert seen["versions"] == ["3", "3"]
    assert "ManifestMismatch" in seen["incomplete"]
    assert "model.norm.weight" in seen["incomplete"]
    assert seen["after a failure"] == [after] * 2
    assert seen["steps"] == [3, 3]
    assert seen["recovered"] == [before] * 2
    assert seen["one left"] == [after, before]
    assert "EngineUnreachable" in seen["dead"]
    assert seen["other"] == after


def test_a_server_with_vllms_own_engine_commits_what_verl_exports_or_nothing(folders):
    seen = run("into_vllm", folders)
    before, after = seen["fresh"]
    assert seen["other"] == [before, after, before, after]
    assert "ManifestMismatch" in seen["incomplete"]
    assert seen["unchanged"] == [seen["answers"][-1], after]
    served = [models.load_reference(folder) for folder in folders]
    for number, (tokens, logprobs) in enumerate(seen["answers"]):
        wanted = models.reference_logprobs(served[number % 2], [*doors.PROMPT, *tokens], len(doors.PROMPT))
        assert apart(logprobs, wanted) <= BF16_ROUNDING


@pytest.mark.parametrize("version", [versions.VERSIONS["vllm"][0], versions.VERSIONS["vllm"][-1]])
def test_verls_own_code_runs_beside_supported_versions_of_vllm(version):
    if not versions.there("vllm", version):
        pytest.skip(f"vllm {version} is not installed: make test-versions")
    beside = versions.environment("vllm", version).get("PYTHONPATH")
    path = (beside, *versions.verl_packages(), servers.ROOT)
    done = subprocess.run(
        [servers.ROOT / ".venv-vllm" / "bin" / "python", "-m", "tests.verl.adapter"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(each) for each in path if each)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen == {"vllm": version, "imported": ["vLLMHttpServer", "vLLMColocateWorkerExtension"], "calls": [[7]]}


def test_servers_that_cannot_be_pushed_into_are_refused(folders):
    seen = run("refused", folders)
    assert "EngineUnreachable: no server of verl in this Ray namespace has the rollout workers" in seen["no server"]
    assert "set actor_rollout_ref.rollout.free_cache_engine=False" in seen["dropped"]
    assert "UnsupportedOption: verl starts sglang_server_1_0 without vLLM's engine in the actor" in seen["other"]


def test_rollout_workers_are_given_verified_weights(folders):
    seen = run("transfer", folders)
    assert seen["updates"] == [[[True, "named_tensors", step]] * 2 for step in (1, 2, 3)]
    assert "ManifestMismatch" in seen["incomplete"]
    assert seen["unchanged"] == [True, True]
    assert "the trainer's memory is full" in seen["broken"]
    assert "the server's memory is full" in seen["stopped"]
    assert seen["recovered"] == [[True, "named_tensors", 6]] * 2
