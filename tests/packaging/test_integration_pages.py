"""The pages of docs/integrations: their blocks compile, and they say which names of which version they rest on."""

import json
import re

import pytest

from tests.documents import ROOT, blocks, read, spans

NAMES = json.loads((ROOT / "tests" / "frameworks" / "names.json").read_text())
PAGES = {path.stem: f"docs/integrations/{path.name}" for path in (ROOT / "docs" / "integrations").glob("*.md")}


def test_every_framework_has_a_page_and_every_page_is_linked():
    assert PAGES.keys() == NAMES.keys()
    assert all(f"integrations/{name}.md" in read("docs/frameworks.md") for name in PAGES)


@pytest.mark.parametrize("framework", PAGES)
def test_the_blocks_are_python_or_commands(framework):
    for block in blocks(PAGES[framework]):
        assert block.kind in ("python", "bash"), block
        if block.kind == "python":
            compile(block.text, str(block), "exec")


@pytest.mark.parametrize("framework", PAGES)
def test_the_page_names_its_version(framework):
    table, page = NAMES[framework], read(PAGES[framework])
    assert f" {table['version']}" in page
    assert table.get("commit", "") in page


@pytest.mark.parametrize("framework", [name for name in PAGES if name != "verl"])
def test_the_page_gives_exactly_the_names_that_were_checked(framework):
    rows = re.findall(r"^\| `([^`]+\.py)` \| (.*) \|$", read(PAGES[framework]), re.MULTILINE)
    given = {file: re.findall(r"`([A-Za-z_][\w.]*)`", cell) for file, cell in rows}
    for file, names in NAMES[framework]["files"].items():
        assert set(names) <= set(given.pop(file))
        assert all(name in spans(PAGES[framework]) for name in names)
    assert not given
