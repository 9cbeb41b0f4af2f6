"""The tables in docs/versions.md are what `make test-versions` and `make test-frameworks` found."""

import pytest

from tools import versions

TESTED = {"versions": versions.VERSIONS, "frameworks": {"trl": tuple(versions.TRL)}}


@pytest.mark.parametrize("name", versions.TABLES)
def test_the_table_is_that_of_the_results(name):
    results = versions.results(name)
    assert {package: tuple(found) for package, found in results.items()} == TESTED[name]
    assert versions.table(results) in versions.PAGE.read_text()
