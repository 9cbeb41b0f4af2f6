"""The same few scenarios each time; `make scenarios` runs thousands of others."""

import logging

import pytest

from tests.scenarios.run import run

#: Nothing is begun after that, however slow the machine is.
LIMIT_S = 20.0
STEPS = 400


@pytest.fixture
def quiet():
    """What goes wrong on purpose is logged by those it happens to."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_few_scenarios_find_no_violation(quiet):
    found = run("reference", 0, steps=STEPS, limit_s=LIMIT_S)
    assert found.violations == []
    assert found.tally.steps > 0
