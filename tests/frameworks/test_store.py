"""Versions in an object store, through fsspec's package for S3 and a server that speaks it, and who follows them."""

import pytest

from tests.trainers.running import run
from tools import versions
from weightsync.testing import ReferenceEngine

pytestmark = pytest.mark.frameworks


def test_versions_in_an_object_store_are_followed(model_folder):
    packages = versions.folder("store", versions.STORE)
    with ReferenceEngine(model_folder("llama", 0)) as engine:
        lines = run("tests.frameworks.store", str(model_folder("llama", 0)), engine.url, packages=packages)
    seen = {line.pop("what"): line for line in lines}
    full = {number: seen[f"version {number}"] for number in range(1, 7)}
    assert full == {number: {"full": number in {1, 5}, "code": 0, "serves": True} for number in range(1, 7)}
    assert seen["files"] == {"there": [f"{number:012d}.json" for number in (5, 6)]}
    assert seen["damaged"] == {"code": 1, "serves": True}
    assert seen["killed"] == {"left": []}
    assert seen["after that"] == {"full": True, "code": 0, "serves": True}
    assert "cannot be written" in seen["gone"].pop("error")
    assert seen["gone"] == {"code": 1, "transfer_failed": True}
