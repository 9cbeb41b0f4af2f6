"""What every test may use."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tools import models

# Nothing is timed in tests.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def own_runtime_directory():
    """Keys and sockets of the tests are their own. Short: a Unix socket's path takes 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = folder
        os.environ.pop("WEIGHTSYNC_TOKEN", None)
        yield Path(folder)
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Make tiny random models once: ``model_folder(kind, seed)``."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(kind, seed):
        if (kind, seed) not in made:
            made[kind, seed] = models.make_model(root / f"{kind}-{seed}", kind, seed=seed)
        return made[kind, seed]

    return make
