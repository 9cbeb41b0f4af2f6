"""Draw the state machines into docs/states.md: ``python -m tools.diagrams``."""

from pathlib import Path

from weightsync.protocol.states import ENGINE, PLAN, PUSH, TOGETHER, diagram

PAGE = Path(__file__).resolve().parents[1] / "docs" / "states.md"
BEGIN, END = "<!-- states:begin -->", "<!-- states:end -->"
TITLES = {
    "An engine, and each of its ranks:": ENGINE,
    "A sender:": PUSH,
    "A rank's load plan:": PLAN,
    "SGLang's schedulers, all of an engine's together:": TOGETHER,
}


def drawn(page: str) -> str:
    """The page with new diagrams between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    fences = [f"{title}\n\n```mermaid\n{diagram(table)}\n```" for title, table in TITLES.items()]
    return "\n\n".join([before + BEGIN, *fences, END + after])


def main() -> None:
    """Write the page."""
    PAGE.write_text(drawn(PAGE.read_text()))


if __name__ == "__main__":
    main()
