"""The fault points of `make faults` still exist: clean pushes pass them all, and a fault at each has an effect."""

import json
import os

import pytest

from tests.faults.harness import SITE, Trainer
from tools import servers
from weightsync.testing import ReferenceEngine
from weightsync.transports import registry

#: Fault points with their conditions and actions.
POINTS = [
    ("trainer packs", {"number": 0}, "flip"),
    ("trainer packs", {"number": 0}, "raise"),
    ("trainer announces", {"number": 0}, "raise"),
    ("trainer tells", {"kind": "BucketReady", "number": 0}, "reorder"),
    ("rank connects", {}, "raise"),
    ("rank takes", {"bucket": 0}, "raise"),
    ("rank confirms", {}, "raise"),
    ("rank prepares", {}, "raise"),
    ("rank stops", {}, "raise"),
    ("rank loads", {"tensor": 0}, "raise"),
    ("rank loaded", {}, "raise"),
    ("trainer asks", {"route": "commit"}, "raise"),
    ("trainer is cut off", {"route": "commit"}, "cut"),
    ("trainer was answered", {"route": "commit"}, "raise"),
    ("front end prepares", {}, "raise"),
    ("front end commits", {}, "raise"),
]


@pytest.fixture(scope="module")
def harness(model_folder, tmp_path_factory):
    """A function that pushes from a trainer to an engine, both with fault points, and the file that orders a fault."""
    order = tmp_path_factory.mktemp("faults") / "order"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SITE), str(servers.ROOT)]), "FAULT_FILE": str(order)}
    trainer = Trainer(order)
    with ReferenceEngine(model_folder("llama", 0), env=env) as engine:
        yield lambda name, transport: pushed(trainer, engine.url, model_folder("llama", 1), name, transport), order
    trainer.close()
    for pipe in (trainer.process.stdin, trainer.process.stdout):
        pipe.close()


def pushed(trainer, url, folder, version, transport):
    """Push; returns the trainer's report."""
    options = {"transport": transport, "timeout_s": 60.0}
    trainer.order(urls=[url], options=options, model=str(folder), version=version)
    said = trainer.outcome(120.0)
    assert said is not None, "the trainer ended"
    return said


@pytest.mark.parametrize("transport", registry.available())
def test_every_fault_point_is_reached(harness, transport):
    push, order = harness
    for number in range(3):
        assert push(f"{transport} {number}", transport)["error"] == ""
    for point, where, action in POINTS:
        order.write_text(json.dumps({"point": point, "where": where, "action": action}))
        said = push("faulty", transport)
        assert not order.exists(), f"nobody came by {point}"
        assert said["error"], point
        assert action != "raise" or f"injected at {point}" in said["message"], (point, said)
        assert action != "cut" or "the commit was not carried out" in said["message"], (point, said)
        assert push("clean", transport)["error"] == "", point
