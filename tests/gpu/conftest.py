"""Fixtures of the tests on a GPU."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def forked_engines(own_key):
    """Have reference engines start as programs: CUDA does not work in a process that was forked after its first use."""
