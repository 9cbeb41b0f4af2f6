"""A few scenarios, the same each time; `make scenarios` runs thousands of others."""

import logging

import pytest

from tests.scenarios.run import run

#: Seconds after which no further scenario begins, of both kinds.
LIMIT_S = 10.0
STEPS = 200


@pytest.fixture
def quiet():
    """Disable logging: injected faults are logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", ["reference", "drafts"])
def test_a_few_scenarios_find_no_violation(quiet, kind):
    found = run(kind, 0, steps=STEPS, limit_s=LIMIT_S / 2)
    assert found.violations == []
    assert found.tally.steps > 0
