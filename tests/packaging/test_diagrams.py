"""docs/states.md shows the diagrams of the state tables."""

from tools import diagrams
from weightsync.protocol import states

#: Every table, so that none is missing on the page.
TABLES = [table for name, table in vars(states).items() if name.isupper() and isinstance(table, dict)]


def test_the_page_shows_the_diagrams_of_the_tables():
    page = diagrams.PAGE.read_text()
    assert page.count(diagrams.BEGIN) == page.count(diagrams.END) == page.count("# States\n") == 1
    assert diagrams.drawn(page) == page, "the tables have changed; run: python -m tools.diagrams"


def test_an_outdated_page_is_redrawn_and_its_other_text_kept():
    page = diagrams.drawn(f"above\n{diagrams.BEGIN}\nold\n{diagrams.END}\nbelow\n")
    assert page.startswith(f"above\n{diagrams.BEGIN}\n\n")
    assert page.endswith(f"```\n\n{diagrams.END}\nbelow\n")
    assert "old" not in page
    assert page.count("```mermaid\nstateDiagram-v2\n") == len(TABLES)
    for table in TABLES:
        for state, edges in table.items():
            assert all(f"    {state} --> {target}: " in page for target in edges.values())
