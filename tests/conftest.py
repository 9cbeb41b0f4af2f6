"""What every test may use."""

import secrets
import signal

import pytest
from hypothesis import settings

from tools import models

# Nothing is timed in tests.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def own_key():
    """The tests' engines and senders have a key of their own, and leave the user's key file alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """A shell has what it starts in the background ignore SIGINT; tests raise it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Make tiny random models once: ``model_folder(kind, seed)``."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(kind, seed):
        if (kind, seed) not in made:
            made[kind, seed] = models.make_model(root / f"{kind}-{seed}", kind, seed=seed)
        return made[kind, seed]

    return make
