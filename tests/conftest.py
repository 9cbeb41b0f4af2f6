"""Fixtures for every test."""

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
    """Give the tests' engines and senders their own key, so that the user's key file is not touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTSYNC_TOKEN", secrets.token_urlsafe(32))
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heard():
    """Restore the default handler: a shell makes background processes ignore SIGINT, which tests raise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return ``model_folder(kind, seed)``, which creates each tiny random model once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(kind, seed):
        if (kind, seed) not in made:
            made[kind, seed] = models.make_model(root / f"{kind}-{seed}", kind, seed=seed)
        return made[kind, seed]

    return make
