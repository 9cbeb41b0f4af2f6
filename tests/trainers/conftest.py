"""A reference engine for the tests in this folder."""

import pytest

from weightsync.testing import ReferenceEngine


@pytest.fixture(scope="package")
def engine(model_folder):
    with ReferenceEngine(model_folder("llama", 0)) as started:
        yield started
