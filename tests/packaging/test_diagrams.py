"""What docs/states.md draws is what the tables say."""

from tools import diagrams
from weightsync.protocol import states

#: Every table that there is, so that none is left out of the page.
TABLES = [table for name, table in vars(states).items() if name.isupper() and isinstance(table, dict)]


def test_the_diagrams_are_those_of_the_tables():
    page = diagrams.PAGE.read_text()
    assert page.count(diagrams.BEGIN) == page.count(diagrams.END) == page.count("# States\n") == 1
    assert diagrams.drawn(page) == page, "the tables have changed; run: python -m tools.diagrams"


def test_a_page_that_is_out_of_date_is_drawn_anew_and_nothing_else_on_it_changes():
    page = diagrams.drawn(f"above\n{diagrams.BEGIN}\nold\n{diagrams.END}\nbelow\n")
    assert page.startswith(f"above\n{diagrams.BEGIN}\n\n")
    assert page.endswith(f"```\n\n{diagrams.END}\nbelow\n")
    assert "old" not in page
    assert page.count("```mermaid\nstateDiagram-v2\n") == len(TABLES)
    for table in TABLES:
        for state, edges in table.items():
            assert all(f"    {state} --> {target}: " in page for target in edges.values())
