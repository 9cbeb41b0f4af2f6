"""Reads the documents: their code blocks, code spans, tables and links."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "common" / "weightsync"
#: Documents whose blocks, commands and tables are checked.
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
#: The one whose blocks `tests.trainers` runs, some with packages that other tests do without.
TRAINERS = "docs/trainers.md"
#: Documents of which only the links are checked.
OTHERS = (
    "THREATS.md",
    "CHANGELOG.md",
    *(f"docs/integrations/{p.name}" for p in (ROOT / "docs" / "integrations").glob("*.md")),
)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: its document, the line of its first line, its language and its text."""

    document: str
    line: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.document}:{self.line} ({self.kind or 'no language'})"


def read(document):
    return (ROOT / document).read_text()


def blocks(document):
    """Every fenced block, in order."""
    page = read(document)
    found = [
        Block(document, page[: match.start(2)].count("\n") + 1, match[1], match[2]) for match in _FENCE.finditer(page)
    ]
    assert 2 * len(found) == len(re.findall(r"^\s*(?:```|~~~)", page, re.MULTILINE)), (
        f"{document}: a fence of another kind"
    )
    assert not re.search(r"\n\n {4,}\S", _FENCE.sub("", page)), f"{document}: an indented block; give it a fence"
    return found


def shown(document):
    """The text of the one block of Python below each heading of the second level."""
    found = {}
    for section in re.split(r"^## ", read(document), flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        texts = [text for kind, text in _FENCE.findall(section) if kind == "python"]
        assert len(texts) == 1, f"{document}: {heading} has {len(texts)} blocks of Python"
        found[heading] = texts[0]
    return found


def prose(document):
    """The document without its blocks."""
    return _FENCE.sub("", read(document))


def spans(document):
    """The content of every code span outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(document))


def links(document):
    """The targets of links that stay inside the repository."""
    return [link for link in _LINK.findall(prose(document)) if "://" not in link]


def anchors(document):
    """The headings of a document as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(document, first):
    """The rows of the table whose first column is called ``first``, each a list of cells; the heading is left out."""
    lines = prose(document).splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith(f"| {first} |")]
    assert len(starts) == 1, f"{document} has {len(starts)} tables of {first!r}"
    rows = []
    for line in lines[starts[0] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    assert rows
    return rows


def coded(cell):
    """The content of the code spans of a cell."""
    return re.findall(r"`([^`]+)`", cell)
