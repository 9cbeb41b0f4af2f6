"""The table of versions in docs/versions.md is what `make test-versions` found."""

import json

from tools import versions


def test_the_table_is_that_of_the_results():
    results = json.loads(versions.RESULTS.read_text())["results"]
    assert {engine: tuple(found) for engine, found in results.items()} == versions.VERSIONS
    assert versions.table(results) in versions.PAGE.read_text()
