"""Engines in actors of a local Ray."""

import functools

import pytest

from tests.engines.conftest import BF16_ROUNDING, apart
from tests.in_process import doors
from tests.trainers import running
from tools import models, versions

pytestmark = pytest.mark.frameworks

#: Nothing is sent to Ray's authors. Actors get the cores as other processes do, not after them.
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_worker_niceness": "0"}
PACKAGES = versions.folder("ray", versions.RAY)
start = functools.partial(running.run, "tests.ray.run", packages=PACKAGES, env=ENVIRONMENT)


def run(part, *arguments):
    (seen,) = start(part, *map(str, arguments))
    return seen


@pytest.fixture(scope="module")
def folders(model_folder):
    return model_folder("llama", 0), model_folder("llama", 1)


def test_actors_of_all_kinds_are_pushed_to_as_they_are(folders):
    seen = run("kinds", *folders)
    before, after = seen["fresh"]
    assert before != after
    assert seen["before"] == seen["back"] == [before] * 3
    assert seen["after"] == [after] * 3
    assert sorted(seen["engines"]) == sorted(seen["names"])
    assert len(set(seen["previous"])) == 1


def test_a_trainer_in_an_actor_pushes_but_not_into_itself(folders):
    seen = run("trainer", *folders)
    assert seen["after"] == seen["fresh"]
    assert "is the actor that pushes, and cannot answer meanwhile: give the sender the engine" in seen["itself"]


def test_what_is_no_engine_or_does_not_answer_is_refused_by_name(folders):
    seen = run("refused", *folders)
    assert "UnsupportedOption: Actor(Empty" in seen["empty"]
    assert "has no engine among its attributes: give one that has exactly one vllm.LLM" in seen["empty"]
    assert "the actor of Two has engine, other among its attributes" in seen["two"]
    assert "is no actor of Ray: give the handle of one that holds an engine" in seen["value"]
    assert not any("\n" in told for told in seen.values() if isinstance(told, str))
    assert "EngineUnreachable: Actor(Held" in seen["dead"]
    assert "PushTimeout: " in seen["busy"]
    assert "its actor, which runs one call at a time" in seen["busy"]
    assert seen["unchanged"]
    assert seen["after"] == seen["fresh"]


def test_an_actor_with_coroutines_starts_calls_while_its_engine_is_asked(folders):
    seen = run("beside", *folders)
    assert not seen["done"]
    assert [seen["meanwhile"], seen["after"]] == seen["fresh"]


def test_a_trainer_of_ray_train_pushes_from_all_its_workers(folders):
    seen = run("train_group", *folders)
    assert seen["after"] == [seen["fresh"]] * 2


def test_an_actor_of_a_cluster_that_was_left_is_refused_and_its_namesake_left_alone(folders):
    seen = run("left", *folders)
    assert "EngineUnreachable: Actor(Held" in seen["error"]
    assert "from a different cluster" in seen["error"]
    assert "get its handle again" in seen["error"]
    assert seen["unchanged"]
    assert seen["after"] == seen["fresh"]


def test_an_actor_that_comes_back_or_is_new_is_brought_to_the_version(folders):
    seen = run("restarted", *folders)
    assert seen["after"] == [seen["fresh"]] * 3
    assert set(seen["errors"]) <= {"EngineUnreachable", "PushTimeout", "EngineRestarted"}


@pytest.mark.parametrize(
    ("engine", "door", "kind"),
    [
        ("vllm", "Llm", "Doors"),
        ("vllm", "AsyncLlm", "DoorsByCoroutines"),
        ("sglang", "Engine", "Doors"),
        ("sglang", "EngineInLoop", "DoorsByCoroutines"),
    ],
)
def test_the_engines_in_actors_serve_what_was_pushed(engine, door, kind, folders):
    seen = run("engines", engine, door, kind, *folders)
    assert seen["ranks"] == 1
    assert seen["transports"] == ["ipc_zmq", "nixl", "nccl", "rdt"]
    served = [models.load_reference(folder) for folder in folders]
    for number, (tokens, logprobs) in enumerate([seen["first"], *seen["answers"]]):
        wanted = models.reference_logprobs(served[number % 2], [*doors.PROMPT, *tokens], len(doors.PROMPT))
        assert apart(logprobs, wanted) <= BF16_ROUNDING
