"""Fixtures of the tests on a GPU."""

import pytest

from tools import models


@pytest.fixture(scope="session", autouse=True)
def forked_engines(own_key):
    """Have reference engines start as programs: CUDA does not work in a process that was forked after its first use."""


@pytest.fixture
def trained(model_folder):
    return models.load_reference(model_folder("llama", 1)).cuda()
