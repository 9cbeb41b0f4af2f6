"""Pushes over Ray Direct Transport into engines in actors of a local Ray."""

import os
import subprocess
import sys

import pytest

from tests.ray.test_ray import ENVIRONMENT, PACKAGES
from tests.trainers import running
from tools import servers

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def folders(model_folder):
    return model_folder("llama", 0), model_folder("llama", 1)


def run(part, folders):
    (seen,) = running.run("tests.ray.rdt", part, *map(str, folders), packages=PACKAGES, env=ENVIRONMENT)
    return seen


@pytest.mark.parametrize("way", ["rdt and not tcp", "rdt-tcp"])
def test_the_contract_of_all_transports_holds(way):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract", "-m", "not slow"]
    done = subprocess.run(
        [*command, "-k", way],
        cwd=servers.ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(PACKAGES)},
        capture_output=True,
        text=True,
        timeout=running.PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def test_a_driver_and_an_actor_push_into_actors_and_leave_nothing_in_any_process(folders):
    seen = run("pushes", folders)
    assert seen["transports"] == ["rdt"]
    assert seen["served"]
    assert seen["again"]
    assert seen["tokens"] == [seen["fresh"]] * 2
    # Between pushes the arena is registered, and nothing else is held.
    assert seen["driver"] == [[0, 1], [0, 0]]
    assert seen["trainer"] == [[0, 1]] * 3 + [[0, 0]]
    assert seen["engines"] == [[0, 0]] * 2


def test_a_trainer_that_dies_or_freezes_leaves_the_engine_to_the_next(folders):
    seen = run("trainers", folders)
    assert seen["after_death"]
    assert seen["next"]
    assert set(seen["errors"]) <= {"LeaseHeld"}
    assert seen["restarted"]
    assert seen["pushed_again"]
    assert seen["while_frozen"]
    assert "PushTimeout: no answer within 10 s" in seen["resumed"]
    assert seen["unharmed"]
    assert seen["engine"] == [0, 0]


def test_an_engine_that_dies_or_freezes_is_named_and_the_others_are_unchanged(folders):
    seen = run("engines", folders)
    assert "Actor(Held" in seen["killed"]
    assert seen["killed"].startswith(("EngineUnreachable: ", "TransferFailed: "))
    assert seen["killed_s"] < running.PATIENCE_S / 10
    assert "PushTimeout: no answer within 10 s" in seen["frozen"]
    assert "still missing: rank 0 of Actor(Held" in seen["frozen"]
    assert seen["killed_other"]
    assert seen["frozen_other"]
    assert seen["next"]


def test_ranks_may_be_outside_of_the_cluster_but_a_trainer_that_is_and_another_ray_are_refused(folders):
    seen = run("outside", folders)
    assert seen["engine"] == ["rdt"]
    assert seen["served"]
    assert seen["auto"] == ["ipc_zmq"]
    assert "UnsupportedOption: the trainer has Ray 2.60.0, whose Ray Direct Transport is another" in seen["another"]
    assert "(get_nixl_agent not found): pip install 'ray>=2.60'" in seen["another"]
    assert "UnsupportedOption: the trainer is not part of a Ray cluster" in seen["trainer"]
    assert "call ray.init() first, or use another transport" in seen["trainer"]
