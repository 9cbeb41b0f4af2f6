"""Names of an engine that it does not document as stable: which of them it lacks.

Each engine package lists its own, module by module, in two tables: what every push needs, and what ``verify="deep"``
needs on top. A name that only the second lists never stands in the way of a push without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Module -> attributes of it, with dots into classes.
Names = Mapping[str, Sequence[str]]


def missing(needed: Names) -> list[str]:
    """Those of the names that cannot be found, with their modules."""
    gone = []
    for module, names in needed.items():
        for name in names:
            try:
                found: Any = importlib.import_module(module)
                for part in name.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                gone.append(f"{module}.{name}")
    return gone


def missing_below(found: Any, paths: Iterable[str]) -> list[str]:
    """Those of the paths that an object lacks, for attributes that exist on instances alone."""
    gone = []
    for path in paths:
        inner = found
        for part in path.split("."):
            if not hasattr(inner, part):
                gone.append(f"{type(found).__name__}.{path}")
                break
            inner = getattr(inner, part)
    return gone


def lacks(engine: str, supported: str, version: str, gone: Sequence[str]) -> str:
    """The sentence for names that are gone; empty if none are."""
    return f"weightsync needs {engine} {supported}; {engine} {version} lacks {', '.join(gone)}" if gone else ""
