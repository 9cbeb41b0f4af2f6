"""A trainer with transformers 4: what it pushes is what it would save."""

import os
import subprocess
import sys

import pytest

from tests.versions.layouts import FAMILIES
from tools import versions


@pytest.mark.versions
def test_a_module_of_transformers_4_is_read_as_it_would_be_saved(tmp_path):
    version = versions.TRANSFORMERS_4
    if not versions.there("transformers", version):
        pytest.skip(f"transformers {version} is not installed: make test-versions")
    path = os.pathsep.join([str(versions.folder("transformers", version)), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.versions.layouts", tmp_path],
        capture_output=True,
        text=True,
        cwd=versions.ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == f"{version} {' '.join(FAMILIES)}"
