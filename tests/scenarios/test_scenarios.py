"""A few scenarios, the same each time; `make scenarios` runs thousands of others."""

import logging

import pytest

from tests.scenarios.run import run

#: Seconds after which no further scenario begins.
LIMIT_S = 20.0
STEPS = 400


@pytest.fixture
def quiet():
    """Disable logging: injected faults are logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_few_scenarios_find_no_violation(quiet):
    found = run("reference", 0, steps=STEPS, limit_s=LIMIT_S)
    assert found.violations == []
    assert found.tally.steps > 0
