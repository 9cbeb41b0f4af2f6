"""The tree in the docstring of `weightsync.errors` matches the classes."""

import re

from weightsync import errors

BRANCH = re.compile(r"    (?P<into>(?:[│ ] {3})*)(?:├── |└── )?(?P<name>\w+)(?: +(?P<meaning>.+))?")


def drawn(page):
    """For each class of the drawn tree in order: its name, its parent's name, and its meaning."""
    above = []
    for line in page.partition("::\n\n")[2].partition("\n\n")[0].splitlines():
        found = BRANCH.fullmatch(line)
        assert found, line
        depth = len(found["into"]) // 4 + ("── " in line)
        above = [*above[:depth], found["name"]]
        assert len(above) == depth + 1, line
        yield found["name"], above[depth - 1] if depth else "Exception", found["meaning"]


def classes():
    """Name and parent of each class, in the order of the file."""
    found = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.WeightSyncError)]
    assert {one.__module__ for one in found} == {"weightsync.errors"}
    return [(one.__name__, one.__bases__[0].__name__) for one in found]


def test_the_documented_tree_matches_the_classes():
    assert [(name, base) for name, base, _ in drawn(errors.__doc__)] == classes()


def test_every_error_is_explained_on_one_line():
    meanings = {name: meaning for name, _, meaning in drawn(errors.__doc__) if name != "WeightSyncError"}
    assert None not in meanings.values()
    assert len(set(meanings.values())) == len(meanings)
    for name, meaning in meanings.items():
        also = [base.__name__ for base in getattr(errors, name).__bases__[1:]]
        assert re.findall(r"also an? `(\w+)`", meaning) == also, name


def test_a_drawn_tree_is_parsed():
    page = "::\n\n    A\n    ├── B   of b\n    │   └── C  of c\n    └── D  of d\n\nrest"
    assert list(drawn(page)) == [("A", "Exception", None), ("B", "A", "of b"), ("C", "B", "of c"), ("D", "A", "of d")]
